"""Read one batch from rows of several shards, directly into one block of memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sd3_light.core.batch import LENGTH
from sd3_light.core.columns import Column
from sd3_light.data.reader import RowOffsets, ShardReader
from sd3_light.data.slots import AllocateBytes, AllocateTensor, aligned, carve


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

    Returns sample_id and the values of the columns by name, those of ragged columns padded with zeros to the longest of
    the batch, ``mask`` if any shard has masks, and with ``lengths`` the rows ``NAME.length`` of ragged columns.
    """
    counts = np.array([[count for _, count in row.offsets.ragged] for row in rows])
    ragged = rows[0].reader.ragged
    masks = _mask_column(rows)
    layout = _layout(rows, counts.max(axis=0).tolist(), masks, lengths)
    memory = allocate(layout.nbytes)
    _read_rows(rows, order, layout, memory.numpy().data)
    batch = {name: carve(memory, *tensor) for name, tensor in layout.tensors.items()}
    batch["sample_id"].numpy()[:] = [row.sample_id for row in rows]
    for column, row_counts in zip(ragged, counts.T, strict=True):
        values = batch[column.name]
        for number in np.flatnonzero(row_counts < values.shape[1]).tolist():
            values[number, int(row_counts[number]) :] = 0
        if lengths:
            batch[column.name + LENGTH].numpy()[:] = row_counts
    if masks is not None:
        _finish_masks(rows, batch[masks.name])
    return batch


def pad_rows(texts: Sequence[Tensor], rows: int, allocate: AllocateTensor | None = None) -> Tensor:
    """Return values of unequal lengths as [B, rows, ...], padded with zeros, in memory that ``allocate`` returns."""
    shape = (len(texts), rows, *texts[0].shape[1:])
    padded = texts[0].new_empty(shape) if allocate is None else allocate(shape, texts[0].dtype)
    for target, text in zip(padded, texts, strict=True):
        target[: len(text)] = text
        target[len(text) :] = 0
    return padded


def _mask_column(rows: Sequence[BatchRow]) -> Column | None:
    return next((row.reader.mask for row in rows if row.offsets.mask is not None), None)


def _layout(rows: Sequence[BatchRow], longest: Sequence[int], masks: Column | None, lengths: bool) -> _BatchLayout:
    count = len(rows)
    first = rows[0].reader
    layout = _BatchLayout()
    layout.add("sample_id", torch.int64, count)
    for column in (*first.fixed, *(() if masks is None else (masks,))):
        layout.add(column.name, getattr(torch, column.dtype), count, *column.shape)
    for column, most in zip(first.ragged, longest, strict=True):
        layout.add(column.name, getattr(torch, column.dtype), count, most, *column.row_shape)
        if lengths:
            layout.add(column.name + LENGTH, torch.int64, count)
    return layout


def _read_rows(rows: Sequence[BatchRow], order: Sequence[int], layout: _BatchLayout, memory: memoryview) -> None:
    """Read all tensors that come from files."""
    reader = rows[0].reader
    masks = _mask_column(rows)
    fixed = [layout.row(column.name) for column in reader.fixed]
    ragged = [(*layout.row(c.name), math.prod(c.row_shape) * c.item_bytes) for c in reader.ragged]
    mask, mask_bytes = (0, 0) if masks is None else layout.row(masks.name)
    for number in order:
        read = rows[number].reader.read
        offsets = rows[number].offsets
        for offset, (first, nbytes) in zip(offsets.fixed, fixed, strict=True):
            start = first + number * nbytes
            read(memory[start : start + nbytes], offset)
        for (offset, count), (first, nbytes, row_bytes) in zip(offsets.ragged, ragged, strict=True):
            start = first + number * nbytes
            read(memory[start : start + count * row_bytes], offset)
        if offsets.mask is not None:
            start = mask + number * mask_bytes
            read(memory[start : start + mask_bytes], offsets.mask)


def _finish_masks(rows: Sequence[BatchRow], masks: Tensor) -> None:
    """Fill masks of shards without masks with white, and mirror those of flipped images."""
    for number, row in enumerate(rows):
        if row.offsets.mask is None:
            masks[number] = 255
        elif row.variant:
            masks[number] = masks[number].flip(-1)
