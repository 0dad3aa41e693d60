"""The cache's format: immutable, self-describing shards of one bucket, and the manifest that lists them (law 3).

A shard is a safetensors file. With n samples, v variants of a picture (2 where flips are cached), k captions in all and
d distinct ones:

    sample_id        int64 [n]
    moments          fp16  [n, v, 2C, h, w]  mean and log-variance of the VAE, not normalised
    mask             uint8 [n, h, w]         present when any sample has one; 255 where a sample has none
    caption_start    int64 [n + 1]           number of each sample's first caption
    caption          int64 [k]               which distinct caption each of them is
    ENCODER.tokens   bf16  [rows, width]     ENCODER.start  int64 [d + 1]      first row of each distinct caption
    ENCODER.pooled   bf16  [d, width]        the CLIP encoders only

Beside it lies an Arrow file with each sample's source key, fingerprint, original size, captions and where its picture
is, read only to look for staleness or to show the data. Files appear by rename, so a name that exists is whole.
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
"""One caption's features: ENCODER -> tokens [rows, width], ENCODER.pooled -> [width]."""


@dataclass(frozen=True)
class ShardContent:
    """The tensors of a shard; ``text`` are those of the encoders, named as in the file."""

    sample_id: Tensor
    moments: Tensor
    caption_start: Tensor
    caption: Tensor
    text: dict[str, Tensor]
    mask: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All of them by their names in the file."""
        picture = {"sample_id": self.sample_id, "moments": self.moments}
        captions = {"caption_start": self.caption_start, "caption": self.caption}
        mask = {} if self.mask is None else {"mask": self.mask}
        return {name: tensor.contiguous() for name, tensor in {**picture, **captions, **mask, **self.text}.items()}


@dataclass(frozen=True)
class Origin:
    """Where a cached sample came from; a row of the Arrow file beside its shard.

    ``image`` and ``mask`` say where the bytes were, as `sources.location_text` writes it.
    """

    key: str
    fingerprint: str
    width: int
    height: int
    captions: tuple[str, ...]
    image: str = ""
    mask: str = ""


def write_shard(folder: Path, entry: ShardEntry, content: ShardContent, origins: Sequence[Origin]) -> ShardEntry:
    """Write a shard, its Arrow file and its manifest entry under ``folder``; returns the entry with size and hash.

    The shard's own name appears last, so that it never stands without the others.
    """
    count = len(content.sample_id)
    assert count == len(origins) > 0
    # one entry: safetensors writes several in an order of chance, and equal shards must be equal bytes
    about = json.dumps({"bucket": entry.bucket, "fingerprint": entry.fingerprint})
    path = folder / entry.file
    with atomic_file(path) as temporary:
        try:
            save_file(content.tensors(), temporary, {"shard": about})
        except SafetensorError as error:
            raise OSError(0, str(error)) from error
        # read back from the disk (its cache), so that the hash is that of the file
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
    """The rows of the Arrow file beside a shard."""
    rows = feather.read_table(path.with_suffix(".arrow"), memory_map=False).to_pylist()
    names = tuple(Origin.__dataclass_fields__)
    return [Origin(**{**{name: row[name] for name in names}, "captions": tuple(row["captions"])}) for row in rows]
