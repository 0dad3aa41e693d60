"""The cache's format: immutable, self-describing shards of one bucket, and the manifest that lists them (law 3).

A shard is a safetensors file. With n samples, v variants of a picture (2 where flips are cached), k captions in all:

    sample_id        int64 [n]               caption_start  int64 [n + 1]      first caption of each sample
    moments          fp16  [n, v, 2C, h, w]  mean and log-variance of the VAE, not normalised
    mask             uint8 [n, h, w]         present when any sample has one; 255 where a sample has none
    ENCODER.tokens   bf16  [rows, width]     ENCODER.start  int64 [k + 1]      first row of each caption
    ENCODER.pooled   bf16  [k, width]        the CLIP encoders only

Beside it lies an Arrow file with each sample's source key, fingerprint, original size and captions, read only to look
for staleness or to show the data. Files appear by rename, so a name that exists is whole.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from sd3_light.config.faults import UserError

FORMAT = 1
TOKENS = ("clip_l", "clip_g", "t5")
POOLED = ("clip_l", "clip_g")
MANIFEST = "manifest.json"

Features = dict[str, Tensor]
"""One caption's features: ENCODER -> tokens [rows, width], ENCODER.pooled -> [width]."""


@dataclass(frozen=True)
class Sample:
    """What the cache keeps of one sample."""

    sample_id: int
    moments: Tensor
    captions: Sequence[Features]
    mask: Tensor | None = None


@dataclass(frozen=True)
class Origin:
    """Where a cached sample came from; a row of the Arrow file beside its shard."""

    key: str
    fingerprint: str
    width: int
    height: int
    captions: tuple[str, ...]


@dataclass(frozen=True)
class ShardEntry:
    """A shard as the manifest knows it."""

    file: str
    bucket: str
    resolution: tuple[int, int]
    directory: int
    count: int
    bytes: int
    sha256: str
    fingerprint: str


@dataclass(frozen=True)
class Manifest:
    """All that opening a cache reads: what made it, and its shards."""

    recipe: dict[str, Any]
    shards: tuple[ShardEntry, ...]
    empty: ShardEntry
    counts: dict[str, int] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it atomically into a cache folder."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False)
        write_atomically(folder / MANIFEST, text.encode())

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Read a cache folder's manifest; a fault of the user where there is none."""
        path = folder / MANIFEST
        if not path.is_file():
            raise UserError(f"no cache at {folder}; build it with `sd3-light cache CONFIG`")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise UserError(f"{path} has format {data['format']}, this version reads {FORMAT}; build it anew")
            entries = tuple(_entry(item) for item in data["shards"])
            return Manifest(data["recipe"], entries, _entry(data["empty"]), data["counts"])
        except (ValueError, LookupError, TypeError) as error:  # no JSON, not UTF-8, or not what `save` wrote
            raise UserError(f"{path} is damaged ({error!r}); build the cache anew with --regenerate_cache") from error


def _entry(item: dict[str, Any]) -> ShardEntry:
    return ShardEntry(**{**item, "resolution": tuple(item["resolution"])})


def write_atomically(path: Path, data: bytes) -> None:
    """The file at ``path`` is either absent, what it was, or whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; nothing already written is lost") from error


def pack(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """The tensors of a shard."""
    captions = [features for sample in samples for features in sample.captions]
    tensors = {
        "sample_id": torch.tensor([sample.sample_id for sample in samples], dtype=torch.int64),
        "moments": torch.stack([sample.moments for sample in samples]).to(torch.float16),
        "caption_start": _starts([len(sample.captions) for sample in samples]),
    }
    if any(sample.mask is not None for sample in samples):
        whole = torch.full(samples[0].moments.shape[-2:], 255, dtype=torch.uint8)
        tensors["mask"] = torch.stack([whole if sample.mask is None else sample.mask for sample in samples])
    for name in TOKENS:
        tensors[f"{name}.tokens"] = torch.cat([features[name] for features in captions]).to(torch.bfloat16)
        tensors[f"{name}.start"] = _starts([len(features[name]) for features in captions])
    for name in POOLED:
        pooled = [features[f"{name}.pooled"] for features in captions]
        tensors[f"{name}.pooled"] = torch.stack(pooled).to(torch.bfloat16)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def write_shard(folder: Path, entry: ShardEntry, samples: Sequence[Sample], origins: Sequence[Origin]) -> ShardEntry:
    """Write a shard, its Arrow file and its manifest entry under ``folder``; returns the entry with size and hash.

    The shard's own name appears last, so that it never stands without the others.
    """
    assert len(samples) == len(origins) > 0
    # one entry: safetensors writes several in an order of chance, and equal shards must be equal bytes
    about = json.dumps({"bucket": entry.bucket, "fingerprint": entry.fingerprint})
    data = save(pack(samples), {"shard": about})
    entry = replace(entry, count=len(samples), bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    path = folder / entry.file
    write_atomically(path.with_suffix(".arrow"), _origin_table(samples, origins))
    write_atomically(path.with_suffix(".json"), json.dumps(asdict(entry)).encode())
    write_atomically(path, data)
    return entry


def _origin_table(samples: Sequence[Sample], origins: Sequence[Origin]) -> bytes:
    table = pa.table(
        {
            "key": [origin.key for origin in origins],
            "sample_id": [sample.sample_id for sample in samples],
            "fingerprint": [origin.fingerprint for origin in origins],
            "width": [origin.width for origin in origins],
            "height": [origin.height for origin in origins],
            "captions": [list(origin.captions) for origin in origins],
        }
    )
    sink = pa.BufferOutputStream()
    feather.write_feather(table, sink, compression="uncompressed")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def read_entry(folder: Path, file: str) -> ShardEntry | None:
    """The entry of a shard that stands whole under ``folder``, or None."""
    path = folder / file
    if not path.is_file():
        return None
    return _entry(json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))


def read_origins(path: Path) -> list[Origin]:
    """The rows of the Arrow file beside a shard."""
    rows = feather.read_table(path.with_suffix(".arrow"), memory_map=False).to_pylist()
    return [Origin(row["key"], row["fingerprint"], row["width"], row["height"], tuple(row["captions"])) for row in rows]


def file_sha256(path: Path) -> str:
    """The hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardReader:
    """Random access to the samples of one shard, which is checked against its manifest entry when first opened."""

    def __init__(self, folder: Path, entry: ShardEntry, verify: bool = True) -> None:
        path = folder / "shards" / entry.file
        remedy = "run `sd3-light cache CONFIG` to encode it again"
        if not path.is_file():
            raise UserError(f"shard {path} is missing; {remedy}")
        if path.stat().st_size != entry.bytes or (verify and file_sha256(path) != entry.sha256):
            # caching takes a shard that stands as done and does not hash it, so it must go first
            raise UserError(f"shard {path} is damaged (its hash is not the manifest's); delete it, then {remedy}")
        file: Any = safe_open(str(path), framework="pt")  # stays open as long as its slices
        self.sample_id: Tensor = file.get_tensor("sample_id")
        self._caption_start: Tensor = file.get_tensor("caption_start")
        self._token_start: dict[str, Tensor] = {name: file.get_tensor(f"{name}.start") for name in TOKENS}
        self._slices = {name: file.get_slice(name) for name in list(file.keys()) if _is_read_in_parts(name)}
        assert len(self.sample_id) == entry.count, (path, len(self.sample_id), entry.count)

    def num_captions(self, row: int) -> int:
        """How many captions a sample has."""
        return int(self._caption_start[row + 1] - self._caption_start[row])

    @property
    def num_variants(self) -> int:
        """1, or 2 where the flipped picture is cached too."""
        return int(self._slices["moments"].get_shape()[1])

    def picture(self, row: int, variant: int) -> tuple[Tensor, Tensor | None]:
        """Moments [2C, h, w] and mask [h, w] of a sample; the mask of the flipped picture is flipped."""
        moments = self._slices["moments"][row, variant]
        if "mask" not in self._slices:
            return moments, None
        mask = self._slices["mask"][row]
        return moments, mask.flip(-1) if variant else mask

    def caption(self, row: int, number: int) -> Features:
        """One caption's features."""
        at = int(self._caption_start[row]) + number
        features: Features = {}
        for name, start in self._token_start.items():
            features[name] = self._slices[f"{name}.tokens"][int(start[at]) : int(start[at + 1])]
        for name in POOLED:
            features[f"{name}.pooled"] = self._slices[f"{name}.pooled"][at]
        return features


def _is_read_in_parts(name: str) -> bool:
    return name in ("moments", "mask") or name.endswith((".tokens", ".pooled"))
