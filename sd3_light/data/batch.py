"""Read one batch from rows of several shards, directly into one block of memory."""

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


class BatchRow(NamedTuple):
    """One sample of a batch: its reader, the offsets of its parts in the file, its id and its image variant."""

    reader: ShardReader
    offsets: RowOffsets
    sample_id: int
    variant: int


@dataclass
class _BatchLayout:
    """Offset, dtype and shape of each tensor of a batch in one block of memory."""

    tensors: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, name: str, dtype: torch.dtype, *shape: int) -> None:
        """Append a tensor."""
        offset = aligned(self.nbytes)
        self.tensors[name] = (offset, dtype, shape)
        self.nbytes = offset + dtype.itemsize * math.prod(shape)

    def row(self, name: str) -> tuple[int, int]:
        """Return (offset, bytes per row) of a tensor."""
        offset, dtype, shape = self.tensors[name]
        return offset, dtype.itemsize * math.prod(shape[1:])


def read_batch(
    rows: Sequence[BatchRow], order: Sequence[int], lengths: bool, allocate: AllocateBytes
) -> dict[str, Tensor]:
    """Read the tensors of a batch; files are read in the sequence ``order``.

    Returns sample_id, moments, tokens padded with zeros to the longest caption, pooled vectors, ``mask`` if any shard
    has masks, and with ``lengths`` ``ENCODER.length``.
    """
    counts = np.array([[count for _, count in row.offsets.tokens] for row in rows])
    layout = _layout(rows, counts.max(axis=0).tolist(), lengths)
    memory = allocate(layout.nbytes)
    _read_rows(rows, order, layout, memory.numpy().data)
    batch = {name: carve(memory, *tensor) for name, tensor in layout.tensors.items()}
    batch["sample_id"].numpy()[:] = [row.sample_id for row in rows]
    for name, token_counts in zip(TOKENS, counts.T, strict=True):
        for number in np.flatnonzero(token_counts < batch[name].shape[1]).tolist():
            batch[name][number, int(token_counts[number]) :] = 0
        if lengths:
            batch[f"{name}.length"].numpy()[:] = token_counts
    if "mask" in batch:
        _finish_masks(rows, batch["mask"])
    return batch


def _layout(rows: Sequence[BatchRow], longest: Sequence[int], lengths: bool) -> _BatchLayout:
    count, first, layout = len(rows), rows[0].reader, _BatchLayout()
    layout.add("sample_id", torch.int64, count)
    layout.add("moments", torch.float16, count, *first.latent_shape)
    if any(row.offsets.mask is not None for row in rows):
        layout.add("mask", torch.uint8, count, *first.latent_shape[1:])
    for name, max_tokens in zip(TOKENS, longest, strict=True):
        layout.add(name, torch.bfloat16, count, max_tokens, first.width(f"{name}.tokens"))
        if lengths:
            layout.add(f"{name}.length", torch.int64, count)
    for name in POOLED:
        layout.add(f"{name}.pooled", torch.bfloat16, count, first.width(f"{name}.pooled"))
    return layout


def _read_rows(rows: Sequence[BatchRow], order: Sequence[int], layout: _BatchLayout, memory: memoryview) -> None:
    """Read all tensors that come from files."""
    moments, moment_bytes = layout.row("moments")
    mask, mask_bytes = layout.row("mask") if "mask" in layout.tensors else (0, 0)
    tokens = [(*layout.row(name), 2 * layout.tensors[name][2][2]) for name in TOKENS]
    pooled = [layout.row(f"{name}.pooled") for name in POOLED]
    for number in order:
        read, offsets = rows[number].reader.read, rows[number].offsets
        start = moments + number * moment_bytes
        read(memory[start : start + moment_bytes], offsets.moments)
        if offsets.mask is not None:
            start = mask + number * mask_bytes
            read(memory[start : start + mask_bytes], offsets.mask)
        for (offset, num_tokens), (first, row_bytes, token_bytes) in zip(offsets.tokens, tokens, strict=True):
            start = first + number * row_bytes
            read(memory[start : start + num_tokens * token_bytes], offset)
        for offset, (first, row_bytes) in zip(offsets.pooled, pooled, strict=True):
            start = first + number * row_bytes
            read(memory[start : start + row_bytes], offset)


def _finish_masks(rows: Sequence[BatchRow], masks: Tensor) -> None:
    """Fill masks of shards without masks with white, and mirror those of flipped images."""
    for number, row in enumerate(rows):
        if row.offsets.mask is None:
            masks[number] = 255
        elif row.variant:
            masks[number] = masks[number].flip(-1)
