"""The shard format of the cache: immutable, self-describing files with samples of one bucket (law 3).

A shard is a safetensors file with the index of its samples and the tensors of its columns (`core.columns`). With n
samples, k captions in total and d distinct ones the index is:

    sample_id        int64 [n]
    caption_start    int64 [n + 1]           index of each sample's first caption
    caption          int64 [k]               index of the distinct caption of each

Its metadata declares the columns. An Arrow file next to it has each sample's source key, the fingerprints of its image
and mask, its original size, captions and image location; it is read only to find what an update can copy, or to show
the data. Files are written atomically: a file that exists is complete.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.feather as feather
from safetensors import SafetensorError

from sd3_light.core.columns import INDEX, MASK, OPTIONAL, ROWS, Column, reads_caption
from sd3_light.data.manifest import ShardEntry
from sd3_light.files import atomic_file, file_sha256, write_atomically
from sd3_light.inputs import require_regular
from sd3_light.tensor_file import DTYPES, StoredTensor

if TYPE_CHECKING:  # origins are read without torch, whose import takes seconds
    from torch import Tensor

CaptionFeatures = dict[str, "Tensor"]
"""The features of one caption: the name of a column -> its value."""


@dataclass(frozen=True)
class ShardContent:
    """The tensors of a shard; ``values`` are those of its columns, named as in the file, `OPTIONAL` ones if present.

    ``fingerprints`` are those of the columns by name.
    """

    columns: Sequence[Column]
    sample_id: "Tensor"
    caption_start: "Tensor"
    caption: "Tensor"
    values: "dict[str, Tensor]"
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    @property
    def present(self) -> list[Column]:
        """The columns that the shard has: all but absent optional ones."""
        return [column for column in self.columns if column.reads not in OPTIONAL or column.name in self.values]

    def declared(self) -> dict[str, dict[str, Any]]:
        """Return what the metadata of the shard says about its columns."""
        known = self.fingerprints
        columns = {column.name: column.described() for column in self.present}
        return {name: {**keys, "fingerprint": known[name]} if name in known else keys for name, keys in columns.items()}

    def tensors(self) -> "dict[str, Tensor]":
        """Return all tensors by their names in the file. They must be those of the columns."""
        names = [name for column in self.present for name in column.tensors]
        assert sorted(names) == sorted(self.values), (names, list(self.values))
        for column in self.present:
            self._check(column)
        index = {name: getattr(self, name) for name in INDEX}
        return {name: value.contiguous() for name, value in {**index, **self.values}.items()}

    def _check(self, column: Column) -> None:
        values = self.values[column.tensors[0]]
        layout = str(values.dtype).removeprefix("torch."), tuple(values.shape[_leading_dimensions(column.reads) :])
        assert layout == (column.dtype, column.row_shape), (column, layout)
        if column.ragged:
            longest = int(self.values[column.tensors[1]].diff().max())
            assert longest <= column.shape[0], (column, longest)


REFERENCES = "reference_fingerprints"
_LISTS = ("captions", REFERENCES)


@dataclass(frozen=True)
class Origin:
    """The source of a sample, a row of the Arrow file; ``image`` and ``mask`` are written by `sources.locations`.

    The fingerprints are those of `cache_plan.Member`, "" for what the sample has not.
    """

    key: str
    image_fingerprint: str
    width: int
    height: int
    captions: tuple[str, ...]
    image: str = ""
    mask: str = ""
    mask_fingerprint: str = ""
    rejected_fingerprint: str = ""
    reference_fingerprints: tuple[str, ...] = ()


def write_shard(
    folder: Path, entry: ShardEntry, content: ShardContent, origins: Sequence[Origin], vae_dtype: str = "float32"
) -> ShardEntry:
    """Write a shard, its Arrow file and its manifest entry to ``folder``; return the entry with size and hash."""
    assert len(content.sample_id) == len(origins) > 0
    # a single entry: safetensors writes several in random order, and equal shards must have equal bytes
    precision = {} if vae_dtype == "float32" else {"vae_dtype": vae_dtype}
    declared = content.declared()
    about = {"bucket": entry.bucket, "fingerprint": entry.fingerprint, "columns": declared, **precision}
    columns = {name: [getattr(origin, name) for origin in origins] for name in Origin.__dataclass_fields__}
    lists = {name: list(map(list, columns[name])) for name in _LISTS}
    if not any(lists[REFERENCES]):
        del columns[REFERENCES], lists[REFERENCES]
    rows = {**columns, "sample_id": content.sample_id.tolist(), **lists}
    complete = asdict(replace(entry, count=len(origins)))
    metadata = {"shard": json.dumps(about)}
    return ShardEntry(**write_files(folder / entry.file, content.tensors(), metadata, rows, complete))


def stored_columns(tensors: Mapping[str, StoredTensor], about: Mapping[str, Any]) -> list[Column]:
    """Return the columns that a shard declares in its metadata ``about``, with the dtypes and shapes of its tensors.

    The first dimension of ragged columns is 0. Raises ValueError, TypeError or LookupError unless the tensors are the
    index and those of the columns.
    """
    columns = [_stored_column(name, tensors, **keys) for name, keys in dict(about["columns"]).items()]
    names = [*INDEX, *(name for column in columns for name in column.tensors)]
    if unknown := sorted(tensors.keys() - set(names)):
        raise ValueError(f"it contains an unknown tensor {unknown[0]!r}")
    if len(set(names)) < len(names):
        raise ValueError("two of its columns have the same tensor")
    starts = [column.tensors[1] for column in columns if column.ragged]
    for name in (*INDEX, *starts):
        _require(tensors, name, lambda tensor: (tensor.dtype, len(tensor.shape)) == ("I64", 1))
    return columns


def stored_fingerprints(about: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprints of the columns that a shard's metadata ``about`` declares."""
    return {name: str(keys.get("fingerprint", "")) for name, keys in dict(about["columns"]).items()}


def _stored_column(
    name: str, tensors: Mapping[str, StoredTensor], reads: Any, ragged: Any = False, fingerprint: Any = ""
) -> Column:
    if not isinstance(reads, str) or not isinstance(ragged, bool) or not isinstance(fingerprint, str):
        raise TypeError(f"its metadata does not say what {name!r:.80} reads")
    first = _leading_dimensions(reads)
    tensor = _require(tensors, name + ROWS if ragged else name, lambda tensor: len(tensor.shape) >= first)
    if ragged and not reads_caption(reads):
        raise ValueError(f"{name + ROWS} reads the {reads:.80}, and only captions differ in length")
    if reads == MASK:
        _require(tensors, name, lambda tensor: (tensor.dtype, len(tensor.shape)) == ("U8", 3))
    elif not reads_caption(reads):
        _require(tensors, name, lambda tensor: tensor.shape[1] in (1, 2))  # variants
    shape = ((0,) if ragged else ()) + tensor.shape[first:]
    return Column(name, reads, DTYPES[tensor.dtype].torch_name, shape, (), ragged)


def _require(tensors: Mapping[str, StoredTensor], name: str, condition: Callable[[StoredTensor], bool]) -> StoredTensor:
    if name not in tensors:
        raise ValueError(f"it has no {name}")
    tensor = tensors[name]
    if not condition(tensor):
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}")
    return tensor


def _leading_dimensions(reads: str) -> int:
    """Return how many dimensions of a column's tensor precede those of a row: samples and variants, or one."""
    return 1 if reads == MASK or reads_caption(reads) else 2


def write_files(
    path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str], rows: dict[str, Any], entry: dict[str, Any]
) -> dict[str, Any]:
    """Write tensors, an Arrow file of ``rows`` and an entry; return the entry with ``bytes`` and ``sha256``.

    The metadata of the Arrow file has the hash too: it belongs to this file of tensors and to no other.
    """
    from safetensors.torch import save_file

    # the tensors' file appears last, so that it never exists without the others
    with atomic_file(path) as temporary:
        try:
            save_file(tensors, temporary, metadata)
        except SafetensorError as error:
            raise OSError(0, str(error)) from error
        # read back from the file, so that the hash is that of the written bytes
        entry = {**entry, "bytes": temporary.stat().st_size, "sha256": file_sha256(temporary)}
        sink = pa.BufferOutputStream()
        table = pa.table(rows, metadata={"sha256": entry["sha256"]})
        feather.write_feather(table, sink, compression="uncompressed")
        write_atomically(path.with_suffix(".arrow"), sink.getvalue().to_pybytes())
        write_atomically(path.with_suffix(".json"), json.dumps(entry).encode())
    return entry


def stored_names(path: Path, names: Iterable[str]) -> list[str]:
    """Return the columns of an Arrow file among ``names``: without those of references, if no sample has one."""
    with pa.OSFile(str(path)) as file:
        known = pa.ipc.open_file(file).schema.names
    return [name for name in names if name in known or name != REFERENCES]


def read_origins(path: Path) -> list[Origin]:
    """Read the Arrow file next to a shard."""
    require_regular(path.with_suffix(".arrow"))
    path = path.with_suffix(".arrow")
    table = feather.read_table(path, stored_names(path, Origin.__dataclass_fields__), memory_map=False)
    table.validate(full=True)  # pyarrow would read outside the file where offsets are damaged
    lists = [name for name in _LISTS if name in table.column_names]
    return [Origin(**{**row, **{name: tuple(row[name]) for name in lists}}) for row in table.to_pylist()]
