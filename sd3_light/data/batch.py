"""One batch from the rows of several shards: every part is read straight to its place in one piece of memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sd3_light.data.reader import RowOffsets, ShardReader
from sd3_light.data.shards import POOLED, TOKENS
from sd3_light.data.slots import AllocateBytes, aligned, carve

_Place = tuple[int, torch.dtype, tuple[int, ...]]


class BatchRow(NamedTuple):
    """One sample of a batch: its reader, where its parts lie there, its id, and the variant of its picture."""

    reader: ShardReader
    at: RowOffsets
    sample_id: int
    variant: int


@dataclass
class _Layout:
    """Where the tensors of a batch lie side by side: offset, dtype and shape of each."""

    places: dict[str, _Place] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, name: str, dtype: torch.dtype, *shape: int) -> None:
        """One more tensor."""
        offset = aligned(self.nbytes)
        self.places[name] = (offset, dtype, shape)
        self.nbytes = offset + dtype.itemsize * math.prod(shape)

    def row(self, name: str) -> tuple[int, int]:
        """(offset, bytes of a row) of a tensor."""
        offset, dtype, shape = self.places[name]
        return offset, dtype.itemsize * math.prod(shape[1:])


def read_batch(
    rows: Sequence[BatchRow], order: Sequence[int], lengths: bool, allocate: AllocateBytes
) -> dict[str, Tensor]:
    """The tensors of a batch, its rows read in some order: sample_id, moments, text as long as the longest caption with
    zeros behind the others, pooled text; ``mask`` where any shard has masks; ``ENCODER.length`` where ``lengths`` are
    wanted."""
    counts = np.array([[count for _, count in row.at.tokens] for row in rows])
    layout = _layout(rows, counts.max(axis=0).tolist(), lengths)
    memory = allocate(layout.nbytes)
    _read_rows(rows, order, layout, memory.numpy().data)
    batch = {name: carve(memory, *place) for name, place in layout.places.items()}
    batch["sample_id"].numpy()[:] = [row.sample_id for row in rows]
    for name, of_name in zip(TOKENS, counts.T, strict=True):
        for at in np.flatnonzero(of_name < batch[name].shape[1]).tolist():
            batch[name][at, int(of_name[at]) :] = 0
        if lengths:
            batch[f"{name}.length"].numpy()[:] = of_name
    if "mask" in batch:
        _finish_masks(rows, batch["mask"])
    return batch


def _layout(rows: Sequence[BatchRow], longest: Sequence[int], lengths: bool) -> _Layout:
    count, first, layout = len(rows), rows[0].reader, _Layout()
    layout.add("sample_id", torch.int64, count)
    layout.add("moments", torch.float16, count, *first.latent_shape)
    if any(row.at.mask is not None for row in rows):
        layout.add("mask", torch.uint8, count, *first.latent_shape[1:])
    for name, most in zip(TOKENS, longest, strict=True):
        layout.add(name, torch.bfloat16, count, most, first.width(f"{name}.tokens"))
        if lengths:
            layout.add(f"{name}.length", torch.int64, count)
    for name in POOLED:
        layout.add(f"{name}.pooled", torch.bfloat16, count, first.width(f"{name}.pooled"))
    return layout


def _read_rows(rows: Sequence[BatchRow], order: Sequence[int], layout: _Layout, memory: memoryview) -> None:
    """Everything that comes from files."""
    moments, moment_bytes = layout.row("moments")
    mask, mask_bytes = layout.row("mask") if "mask" in layout.places else (0, 0)
    tokens = [(*layout.row(name), 2 * layout.places[name][2][2]) for name in TOKENS]
    pooled = [layout.row(f"{name}.pooled") for name in POOLED]
    for number in order:
        read, at = rows[number].reader.read, rows[number].at
        start = moments + number * moment_bytes
        read(memory[start : start + moment_bytes], at.moments)
        if at.mask is not None:
            start = mask + number * mask_bytes
            read(memory[start : start + mask_bytes], at.mask)
        for (offset, length), (first, row_bytes, token_bytes) in zip(at.tokens, tokens, strict=True):
            start = first + number * row_bytes
            read(memory[start : start + length * token_bytes], offset)
        for offset, (first, row_bytes) in zip(at.pooled, pooled, strict=True):
            start = first + number * row_bytes
            read(memory[start : start + row_bytes], offset)


def _finish_masks(rows: Sequence[BatchRow], masks: Tensor) -> None:
    """White where a shard has no masks, and mirrored where the picture is."""
    for at, row in enumerate(rows):
        if row.at.mask is None:
            masks[at] = 255
        elif row.variant:
            masks[at] = masks[at].flip(-1)
