"""The shards of a manifest as entries, and for millions of them as a memory-mapped Arrow table.

The table has one row per shard, sorted by resolution, bucket and file, so a bucket is a range of rows. Its pages belong
to the kernel and are shared by all processes of a machine. Imports no torch.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sd3_light.inputs import require_regular

_CHUNK = 8192  # rows that are converted at a time
_BUCKET = re.compile(r"\d+x\d+(x\d+)?")


@dataclass(frozen=True, slots=True)  # slots: a process may hold thousands of entries
class ShardEntry:
    """A shard in the manifest. ``directory`` is the label of its source, as in its samples' keys."""

    file: str
    bucket: str
    resolution: tuple[int, int]
    directory: str
    count: int
    bytes: int
    sha256: str
    fingerprint: str


ENTRY_FIELDS = frozenset(field.name for field in fields(ShardEntry))

_TEXT = pa.large_string()
_NAME = pa.dictionary(pa.int32(), pa.string())
_SCHEMA = pa.schema(
    {
        "file": _TEXT,
        "bucket": _NAME,
        "width": pa.int32(),  # of the resolution
        "height": pa.int32(),
        "directory": _NAME,
        "count": pa.int64(),
        "bytes": pa.int64(),
        "sha256": pa.binary(32),
        "fingerprint": _TEXT,
    }
)


class ShardTable(Sequence[ShardEntry]):
    """Entries in a table. An entry is created when it is asked for; `column` returns a field of all of them."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    @staticmethod
    def of(entries: Sequence[ShardEntry]) -> "ShardTable":
        """Return the table of some entries."""
        if isinstance(entries, ShardTable):
            return entries
        entries = sorted(entries, key=lambda entry: (entry.resolution, entry.bucket, entry.file))
        values: dict[str, list[Any]] = {name: [getattr(entry, name) for entry in entries] for name in ENTRY_FIELDS}
        values["width"], values["height"] = map(list, zip(*values["resolution"], strict=True))
        values["sha256"] = list(map(bytes.fromhex, values["sha256"]))
        return ShardTable(pa.record_batch([pa.array(values[field.name], field.type) for field in _SCHEMA], _SCHEMA))

    @staticmethod
    def read(path: Path) -> "ShardTable":
        """Map a table into memory. Raises OSError, ValueError or ArrowException if it is missing or not valid."""
        require_regular(path)
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            if reader.num_record_batches != 1 or not reader.schema.equals(_SCHEMA):
                raise ValueError("its columns are not those of a list of shards")
            rows = reader.get_batch(0)
        rows.validate(full=True)  # pyarrow would read outside the file where offsets are damaged
        table = ShardTable(rows)
        table._require_valid()
        return table

    def write(self, path: Path) -> None:
        """Write the table."""
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
            writer.write_batch(self._rows)

    def _require_valid(self) -> None:
        """Raise a ValueError for missing values, files elsewhere, impossible numbers, or rows that are not sorted."""
        files = self._rows["file"]
        rows = self._rows
        if (
            any(column.null_count for column in rows.columns)
            or pc.any(pc.match_substring_regex(files, r"[/\\\x00]")).as_py()
        ):
            raise ValueError("a value is missing, or a shard is in another folder")
        if min(int(self.column(name).min(initial=1)) for name in ("width", "height", "count", "bytes")) < 1:
            raise ValueError("a number is not positive")
        groups = self.groups()
        keys = [(group[0].resolution, group[0].bucket) for group in groups]
        if keys != sorted(set(keys)) or not all(_BUCKET.fullmatch(bucket) for _, bucket in keys):
            raise ValueError("its buckets are not valid")
        for group in groups:
            names = group._rows["file"]
            if not pc.all(pc.less(names[:-1], names[1:]), min_count=0).as_py():
                raise ValueError("its files are not sorted")

    def groups(self) -> list["ShardTable"]:
        """Return the shards of each bucket at each resolution."""
        codes = [self._rows["bucket"].indices.to_numpy(), self.column("width"), self.column("height")]
        edges = np.flatnonzero(np.any([np.diff(code) != 0 for code in codes], axis=0)) + 1
        bounds = [0, *edges.tolist(), len(self)] if len(self) else []
        return [self[start:end] for start, end in pairwise(bounds)]

    def column(self, name: str) -> NDArray[Any]:
        """Return a field of all entries: a number, ``bucket`` or ``directory``."""
        values = self._rows[name]
        is_name = values.type == _NAME
        array: NDArray[Any] = (values.indices if is_name else values).to_numpy()
        return np.array(values.dictionary.to_pylist(), dtype=object)[array] if is_name else array

    def numbers(self, files: Sequence[str]) -> dict[str, int]:
        """Return the numbers of those entries that have one of these files."""
        numbers = pc.index_in(pa.array(files, _TEXT), value_set=self._rows["file"]).to_pylist()
        return {file: number for file, number in zip(files, numbers, strict=True) if number is not None}

    def take(self, numbers: NDArray[np.int64]) -> "ShardTable":
        """Return a table of the entries with these numbers, in memory."""
        return ShardTable(self._rows.take(pa.array(numbers)))

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardTable) and bool(self._rows.equals(other._rows))

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, index: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, index: slice) -> "ShardTable": ...
    def __getitem__(self, index: int | slice) -> "ShardEntry | ShardTable":
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1
            return ShardTable(self._rows.slice(start, max(0, stop - start)))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return next(iter(self[index % len(self) :][:1]))

    def __iter__(self) -> Iterator[ShardEntry]:
        for start in range(0, len(self), _CHUNK):
            for row in self._rows.slice(start, _CHUNK).to_pylist():
                sides = (row.pop("width"), row.pop("height"))
                digest = row.pop("sha256").hex()
                yield ShardEntry(resolution=sides, sha256=digest, **row)


def column(shards: Sequence[ShardEntry], name: str) -> NDArray[Any]:
    """Return a field of all shards: ``count``, ``bytes``, ``bucket`` or ``directory``."""
    if isinstance(shards, ShardTable):
        return shards.column(name)
    return np.array(
        [getattr(shard, name) for shard in shards], dtype=np.int64 if name in ("count", "bytes") else object
    )


@dataclass(frozen=True)
class BucketShards:
    """The shards of one bucket at one resolution; ``own_counts`` are their samples if not all are used."""

    bucket: str
    resolution: tuple[int, int]
    shards: Sequence[ShardEntry]
    own_counts: NDArray[np.int64] | None = None

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of samples in each shard."""
        return column(self.shards, "count") if self.own_counts is None else self.own_counts

    @property
    def size(self) -> int:
        """Number of samples in the bucket."""
        return int(self.counts.sum())


def group_shards(shards: Sequence[ShardEntry]) -> tuple[BucketShards, ...]:
    """Group shards by bucket in a fixed order, so that a bucket number means the same on every rank."""
    if isinstance(shards, ShardTable):
        return tuple(BucketShards(group[0].bucket, group[0].resolution, group) for group in shards.groups())
    groups: dict[tuple[tuple[int, int], str], list[ShardEntry]] = {}
    for shard in sorted(shards, key=lambda shard: shard.file):
        groups.setdefault((shard.resolution, shard.bucket), []).append(shard)
    return tuple(
        BucketShards(bucket, resolution, tuple(group)) for (resolution, bucket), group in sorted(groups.items())
    )
