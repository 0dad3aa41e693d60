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

import pyarrow as pa
import pyarrow.feather as feather
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sd3_light.data.manifest import ShardEntry
from sd3_light.files import atomic_file, file_sha256, write_atomically

TOKENS = ("clip_l", "clip_g", "t5")
POOLED = ("clip_l", "clip_g")

CaptionFeatures = dict[str, Tensor]
"""The features of one caption: ENCODER -> tokens [rows, width], ENCODER.pooled -> [width]."""


@dataclass(frozen=True)
class ShardContent:
    """The tensors of a shard; ``text`` contains those of the encoders, named as in the file."""

    sample_id: Tensor
    moments: Tensor
    caption_start: Tensor
    caption: Tensor
    text: dict[str, Tensor]
    mask: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by their names in the file."""
        image = {"sample_id": self.sample_id, "moments": self.moments}
        captions = {"caption_start": self.caption_start, "caption": self.caption}
        mask = {} if self.mask is None else {"mask": self.mask}
        return {name: tensor.contiguous() for name, tensor in {**image, **captions, **mask, **self.text}.items()}


@dataclass(frozen=True)
class Origin:
    """The source of a cached sample: a row of the Arrow file next to its shard.

    ``image`` and ``mask`` are locations as `sources.location_text` writes them.
    """

    key: str
    fingerprint: str
    width: int
    height: int
    captions: tuple[str, ...]
    image: str = ""
    mask: str = ""


def write_shard(folder: Path, entry: ShardEntry, content: ShardContent, origins: Sequence[Origin]) -> ShardEntry:
    """Write a shard, its Arrow file and its manifest entry to ``folder``; return the entry with size and hash.

    The shard file appears last, so that it never exists without the others.
    """
    count = len(content.sample_id)
    assert count == len(origins) > 0
    # a single entry: safetensors writes several in random order, and equal shards must have equal bytes
    metadata = json.dumps({"bucket": entry.bucket, "fingerprint": entry.fingerprint})
    path = folder / entry.file
    with atomic_file(path) as temporary:
        try:
            save_file(content.tensors(), temporary, {"shard": metadata})
        except SafetensorError as error:
            raise OSError(0, str(error)) from error
        # read back from the file, so that the hash is that of the written bytes
        entry = replace(entry, count=count, bytes=temporary.stat().st_size, sha256=file_sha256(temporary))
        write_atomically(path.with_suffix(".arrow"), _origin_table(content.sample_id.tolist(), origins))
        write_atomically(path.with_suffix(".json"), json.dumps(asdict(entry)).encode())
    return entry


def _origin_table(ids: Sequence[int], origins: Sequence[Origin]) -> bytes:
    columns = {name: [getattr(origin, name) for origin in origins] for name in Origin.__dataclass_fields__}
    table = pa.table({**columns, "sample_id": ids, "captions": [list(captions) for captions in columns["captions"]]})
    sink = pa.BufferOutputStream()
    feather.write_feather(table, sink, compression="uncompressed")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def read_origins(path: Path) -> list[Origin]:
    """Read the Arrow file next to a shard."""
    rows = feather.read_table(path.with_suffix(".arrow"), memory_map=False).to_pylist()
    names = tuple(Origin.__dataclass_fields__)
    return [Origin(**{**{name: row[name] for name in names}, "captions": tuple(row["captions"])}) for row in rows]
