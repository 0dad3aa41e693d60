"""The shard format of the cache: immutable, self-describing files with samples of one bucket (law 3).

A shard is a safetensors file. With n samples, v variants per image (2 if flips are cached), k captions in total and d
distinct ones:

    sample_id        int64 [n]
    moments          fp16  [n, v, 2C, h, w]  mean and log-variance of the VAE, not normalized
    mask             uint8 [n, h, w]         present if any sample has one; 255 for samples without
    caption_start    int64 [n + 1]           index of each sample's first caption
    caption          int64 [k]               index of the distinct caption of each
    ENCODER.tokens   bf16  [rows, width]     ENCODER.start  int64 [d + 1]      first row of each distinct caption
    ENCODER.pooled   bf16  [d, width]        CLIP encoders only

An Arrow file next to it has each sample's source key, fingerprint, original size, captions and image location; it is
read only to find stale samples or to show the data. Files are written atomically: a file that exists is complete.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.feather as feather
from safetensors import SafetensorError

from sd3_light.data.manifest import ShardEntry
from sd3_light.files import atomic_file, file_sha256, write_atomically
from sd3_light.inputs import require_regular

if TYPE_CHECKING:  # origins are read without torch, whose import takes seconds
    from torch import Tensor

TOKENS = ("clip_l", "clip_g", "t5")
POOLED = ("clip_l", "clip_g")

CaptionFeatures = dict[str, "Tensor"]
"""The features of one caption: ENCODER -> tokens [rows, width], ENCODER.pooled -> [width]."""


@dataclass(frozen=True)
class ShardContent:
    """The tensors of a shard; ``text`` contains those of the encoders, named as in the file."""

    sample_id: "Tensor"
    moments: "Tensor"
    caption_start: "Tensor"
    caption: "Tensor"
    text: "dict[str, Tensor]"
    mask: "Tensor | None" = None

    def tensors(self) -> "dict[str, Tensor]":
        """Return all tensors by their names in the file."""
        values = {**vars(self), **self.text}
        return {name: value.contiguous() for name, value in values.items() if name != "text" and value is not None}


@dataclass(frozen=True)
class Origin:
    """The source of a sample, a row of the Arrow file; ``image`` and ``mask`` are written by `sources.locations`."""

    key: str
    fingerprint: str
    width: int
    height: int
    captions: tuple[str, ...]
    image: str = ""
    mask: str = ""


def write_shard(
    folder: Path, entry: ShardEntry, content: ShardContent, origins: Sequence[Origin], vae_dtype: str = "float32"
) -> ShardEntry:
    """Write a shard, its Arrow file and its manifest entry to ``folder``; return the entry with size and hash."""
    assert len(content.sample_id) == len(origins) > 0
    # a single entry: safetensors writes several in random order, and equal shards must have equal bytes
    precision = {} if vae_dtype == "float32" else {"vae_dtype": vae_dtype}
    metadata = json.dumps({"bucket": entry.bucket, "fingerprint": entry.fingerprint, **precision})
    columns = {name: [getattr(origin, name) for origin in origins] for name in Origin.__dataclass_fields__}
    rows = {**columns, "sample_id": content.sample_id.tolist(), "captions": list(map(list, columns["captions"]))}
    complete = asdict(replace(entry, count=len(origins)))
    return ShardEntry(**write_files(folder / entry.file, content.tensors(), {"shard": metadata}, rows, complete))


def write_files(
    path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str], rows: dict[str, Any], entry: dict[str, Any]
) -> dict[str, Any]:
    """Write tensors, an Arrow file of ``rows`` and an entry; return the entry with ``bytes`` and ``sha256``."""
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
        feather.write_feather(pa.table(rows), sink, compression="uncompressed")
        write_atomically(path.with_suffix(".arrow"), sink.getvalue().to_pybytes())
        write_atomically(path.with_suffix(".json"), json.dumps(entry).encode())
    return entry


def read_origins(path: Path) -> list[Origin]:
    """Read the Arrow file next to a shard."""
    require_regular(path.with_suffix(".arrow"))
    table = feather.read_table(path.with_suffix(".arrow"), list(Origin.__dataclass_fields__), memory_map=False)
    table.validate(full=True)  # pyarrow would read outside the file where offsets are damaged
    return [Origin(**{**row, "captions": tuple(row["captions"])}) for row in table.to_pylist()]
