"""Build one unit of work: collect its decoded images, encode them, and write its files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.config.base import DataLocation
from sd3_light.config.faults import UserError
from sd3_light.core.columns import MASK, OPTIONAL, REJECTED, SMALLEST, Bucket, Column, with_pairs
from sd3_light.core.encoding import Encoders, Tokens
from sd3_light.core.registry import family_of
from sd3_light.data.cache_plan import Member, Unit, decode_task
from sd3_light.data.manifest import damaged_mark, read_entry
from sd3_light.data.shards import Origin, ShardContent, write_shard
from sd3_light.files import write_atomically
from sd3_light.sources.access import exists
from sd3_light.sources.decode import Decoded, DecodeTask
from sd3_light.sources.rejects import reject_line


def is_done(shards: Path, unit: Unit) -> bool:
    """Return whether a unit's shard (or the note that all its samples were rejected) exists and is not damaged."""
    path = shards / unit.file
    if damaged_mark(path).exists():
        return False
    return read_entry(shards, unit.file) is not None or path.with_suffix(".none").is_file()


@dataclass
class UnitInProgress:
    """The decoded and encoded samples of a unit so far."""

    unit: Unit
    members: list[Member]
    tokens: Future[Tokens]
    num_decoded: int = 0
    accepted: list[Member] = field(default_factory=list)
    images: dict[str, list[Tensor]] = field(default_factory=dict)
    masks: list[NDArray[np.uint8] | None] = field(default_factory=list)
    text: dict[str, Tensor] = field(default_factory=dict)
    rejected: list[dict[str, str]] = field(default_factory=list)
    vae_dtype: str = "float32"

    def add(self, images: Sequence[Decoded], parts: Encoders) -> None:
        """Encode the next images; record the rejected ones."""
        batch = self.members[self.num_decoded : self.num_decoded + len(images)]
        self.num_decoded += len(images)
        pixels = []
        worse = []
        for member, image in zip(batch, images, strict=True):
            if image.pixels is None:
                self.rejected.append(reject_line(member.row.key, image.reason, image.detail, member.row.image))
                continue
            self.accepted.append(member)
            # a copy: the mask of a Ray task refers to memory that also holds the pixels
            self.masks.append(None if image.mask is None else image.mask.copy())
            pixels.append(image.pixels)
            if image.worse is not None:
                worse.append(image.worse)
        if pixels:
            for name, values in parts.encode_images(np.stack(pixels), self.unit.flip).items():
                self.images.setdefault(name, []).append(values)
            for name, values in parts.encode_images(np.stack(worse), self.unit.flip).items() if worse else ():
                self.images.setdefault(f"{name}.{REJECTED}", []).append(values)
            self.vae_dtype = str(parts.vae_dtype).removeprefix("torch.")

    @property
    def is_decoded(self) -> bool:
        """Whether all images were added."""
        return self.num_decoded == len(self.members)

    def encode_text(self, parts: Encoders) -> None:
        """Encode the captions of the samples that were not rejected."""
        if not self.accepted:
            return
        distinct = distinct_captions(self.accepted)
        self.text = parts.encode_captions(parts.tokenize(list(distinct)) if self.rejected else self.tokens.result())

    def content(self, columns: Sequence[Column]) -> ShardContent:
        """Return the shard's tensors, which must be those of the columns. The encoders' results must be complete."""
        distinct, masks = distinct_captions(self.accepted), _stack_masks(self.masks)
        values = {name: torch.cat(parts) for name, parts in self.images.items()} | self.text
        if masks is not None:
            values |= {column.name: masks for column in columns if column.reads == MASK}
        return ShardContent(
            columns,
            torch.tensor([member.identity for member in self.accepted], dtype=torch.int64),
            torch.tensor([0, *(len(member.captions) for member in self.accepted)]).cumsum(0),
            torch.tensor([distinct[c] for member in self.accepted for c in member.captions], dtype=torch.int64),
            values,
        )

    def origins(self) -> list[Origin]:
        """Return the origins of the shard's samples."""
        return [
            Origin(m.row.key, m.fingerprint, m.row.width, m.row.height, m.captions, image=m.row.image, mask=m.row.mask)
            for m in self.accepted
        ]


def distinct_captions(members: Sequence[Member]) -> dict[str, int]:
    """Return the distinct captions of samples, numbered in order."""
    captions = dict.fromkeys(caption for member in members for caption in member.captions)
    return {caption: number for number, caption in enumerate(captions)}


def decode_batches(members: Sequence[Member], root: DataLocation, unit: Unit, size: int) -> Iterator[list[DecodeTask]]:
    """Yield the tasks of decoding a unit's images, in batches of ``size`` frames, at least one image."""
    size = max(1, size // unit.bucket.frames)
    for start in range(0, len(members), size):
        yield [decode_task(member, root, unit) for member in members[start : start + size]]


def _stack_masks(masks: Sequence[NDArray[np.uint8] | None]) -> Tensor | None:
    first = next((mask for mask in masks if mask is not None), None)
    if first is None:
        return None
    full = np.full_like(first, 255)
    return torch.from_numpy(np.stack([full if mask is None else mask for mask in masks]))


def write_unit(shards: Path, finished: UnitInProgress, root: DataLocation, model: ModelConfig) -> None:
    """Write the shard of a unit whose results are complete, and its rejects. ``root`` is the folder of its source."""
    if finished.rejected and not exists(root):
        raise UserError(
            f"{root} disappeared while it was being cached; restore it and run again: finished shards are kept"
        )
    write_rejects(shards, finished.unit, finished.rejected)
    if finished.accepted:
        content = finished.content(_columns(model, finished.unit.bucket))
        write_shard(shards, finished.unit.entry, content, finished.origins(), finished.vae_dtype)
        (shards / finished.unit.file).with_suffix(".none").unlink(missing_ok=True)
    else:
        write_empty_unit(shards, finished.unit)


def write_rejects(shards: Path, unit: Unit, rejected: Sequence[Mapping[str, str]]) -> None:
    """Write the rejects of a unit; without any, remove those of an earlier build."""
    path = (shards / unit.file).with_suffix(".rejects.jsonl")
    if rejected:
        lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in rejected)
        write_atomically(path, "".join(lines).encode())
    else:
        path.unlink(missing_ok=True)


def write_empty_unit(shards: Path, unit: Unit) -> None:
    """Write the note that all samples of a unit were rejected."""
    write_atomically((shards / unit.file).with_suffix(".none"), b"")
    (shards / unit.file).unlink(missing_ok=True)


def empty_content(parts: Encoders, model: ModelConfig) -> ShardContent:
    """Return the features of the empty caption, stored like a sample with one blank latent pixel."""
    text = parts.encode_empty()
    parts.synchronize()
    columns = _columns(model, SMALLEST)
    images = [column for column in columns if not column.per_caption and column.reads not in OPTIONAL]
    blank = {column.name: torch.zeros(1, 1, *column.shape, dtype=getattr(torch, column.dtype)) for column in images}
    return ShardContent(columns, torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([0]), blank | text)


def _columns(model: ModelConfig, bucket: Bucket) -> tuple[Column, ...]:
    return with_pairs(family_of(model).columns(model, model.diffusers_path, bucket))
