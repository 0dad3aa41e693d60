"""A whole cache in the memory of the host or of a GPU, from which batches are gathered by index."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from sd3_light.config.faults import UserError
from sd3_light.core.columns import MASK, Column
from sd3_light.cost.residence import LARGEST_SHARE
from sd3_light.data.manifest import Manifest, ShardEntry
from sd3_light.data.order import Order, Picks, rank_picks
from sd3_light.data.reader import ShardReader
from sd3_light.data.shards import CaptionFeatures
from sd3_light.data.slots import AllocateTensor
from sd3_light.data.stream import CachedDataset

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class ResidentText:
    """The distinct captions of a bucket, numbered over its shards; number ``empty`` is the empty caption.

    ``tokens`` are the rows of ragged columns, ``starts`` the first row of each caption, ``fixed`` the other columns.
    The last row of every table is zeros.
    """

    starts: Mapping[str, Indices]
    tokens: Mapping[str, Tensor]
    fixed: Mapping[str, Tensor]
    empty: int

    def zero_row(self, name: str) -> int:
        """Return the row of zeros of a ragged column."""
        return int(self.starts[name][-1])


@dataclass(frozen=True)
class ResidentBucket:
    """The samples of a bucket, in the order of its shards; arrays [N] and [N + 1] are on the host.

    Sample n of segment s has the number that `numbers` returns, the rows of ``images`` from ``first_image`` and the
    captions from ``first_caption``. ``images`` are the columns of samples by name, apart from masks.
    """

    first_sample: Indices
    ids: Indices
    first_image: Indices
    first_caption: Indices
    captions: Indices
    masked: NDArray[np.bool_]
    images: Mapping[str, Tensor]
    masks: Tensor | None
    text: ResidentText
    kept: Indices | None = None
    """The numbers of the samples in use if not all are; ``first_sample[s] + n`` is then an index of it."""

    def numbers(self, segment: Indices, index: Indices) -> Indices:
        """Return the numbers of samples, given by their segments and indices."""
        numbers = self.first_sample[segment] + index
        return numbers if self.kept is None else self.kept[numbers]


class CacheTooLarge(UserError):
    """A cache does not fit into memory."""


class ResidentCache:
    """All samples of a cache on a device; every process holds a copy.

    ``processes`` is the number of processes on this machine. Raises `CacheTooLarge` if the memory does not suffice.
    """

    def __init__(self, data: CachedDataset, device: torch.device, processes: int = 1) -> None:
        if problem := _too_large(data.manifest, device, processes):
            raise CacheTooLarge(problem)
        empty = data.empty_text()
        self.device = device
        self.pick_captions = data.pick_captions
        self.buckets = [_load_bucket(data, bucket.shards, empty, device) for bucket in data.buckets]


def _too_large(manifest: Manifest, device: torch.device, processes: int) -> str | None:
    if device.type != "cuda":
        return manifest.too_large(processes)
    nbytes = manifest.nbytes
    free = torch.cuda.mem_get_info(device)[0]
    if nbytes <= LARGEST_SHARE * free:
        return None
    return (
        f"the cache takes {nbytes / 1e9:.1f} GB and {free / 1e9:.1f} GB of GPU memory are free, of which "
        f'{LARGEST_SHARE:.0%} may be taken; write cache_residence = "host" or "stream"'
    )


class ResidentPicks(Dataset[Picks]):
    """A rank's micro-batches by number, as picks: item ``step * micro_batches + micro``."""

    def __init__(self, order: Order, rank: int, world_size: int, micro_batches: int, by_segment: bool = False) -> None:
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self.micro_batches = micro_batches
        self.by_segment = by_segment

    def __getitem__(self, item: int) -> Picks:
        step, micro = divmod(item, self.micro_batches)
        return rank_picks(self.order, step, self.rank, self.world_size, micro, self.micro_batches, self.by_segment)


# --- loading -----------------------------------------------------------------------------------


class _Table:
    """Rows of one column of several shards, read one after another, then those of the empty caption and zeros."""

    def __init__(self, column: Column, rows: int, device: torch.device) -> None:
        self.column = column
        self.values = torch.empty((rows, *column.row_shape), dtype=getattr(torch, column.dtype), device=device)
        self._end = 0

    def read(self, reader: ShardReader) -> None:
        """Append the rows of a shard; white masks if it has none."""
        if self.column.tensors[0] not in reader.fields:
            self._next(reader.entry.count).fill_(255)
            return
        target = self._next(_num_rows(reader, self.column))
        if not target.numel():
            return
        memory = target if target.device.type == "cpu" else torch.empty(target.shape, dtype=target.dtype)
        reader.read(memory.view(-1).view(torch.uint8).numpy().data, reader.fields[self.column.tensors[0]].offset)
        if memory is not target:
            target.copy_(memory)

    def append(self, values: Tensor) -> None:
        """Append rows."""
        self._next(len(values)).copy_(values)

    def _next(self, rows: int) -> Tensor:
        self._end += rows
        return self.values[self._end - rows : self._end]


def _num_rows(reader: ShardReader, column: Column) -> int:
    """Return the rows of a column in a shard: images of all variants, captions, or tokens of all captions."""
    shape = reader.fields[column.tensors[0]].shape
    return math.prod(shape[: len(shape) - len(column.row_shape)])


def _load_bucket(
    data: CachedDataset, entries: Sequence[ShardEntry], empty: CaptionFeatures, device: torch.device
) -> ResidentBucket:
    """Read the shards of a bucket, verified; two passes, because only the files say how many rows they have."""
    shards = [_ShardSize(data.readers([entry])[0]) for entry in entries]
    tables = _make_tables(shards, empty, device)
    ragged = [table.column for table in tables.values() if table.column.ragged]
    starting = ("caption_start", *(column.tensors[1] for column in ragged))
    index: dict[str, list[Indices]] = {name: [np.zeros(1, np.int64)] for name in starting}
    ids: list[Indices] = []
    captions: list[Indices] = []
    kept: list[Indices] = []
    num_captions = 0
    for first, entry in zip(_offsets([shard.count for shard in shards]).tolist(), entries, strict=False):
        (reader,) = data.readers([entry])
        kept.append(first + (np.arange(entry.count) if reader.kept is None else reader.kept))
        for table in tables.values():
            table.read(reader)
        ids.append(reader.index["sample_id"])
        captions.append(reader.index["caption"] + num_captions)
        num_captions += reader.num_distinct
        for name, parts in index.items():
            parts.append(reader.index[name][1:] + parts[-1][-1])
    starts = {column.name: np.concatenate(index[column.tensors[1]]) for column in ragged}
    counts = [shard.count for shard in shards]
    masks = [table.values for table in tables.values() if table.column.reads == MASK]
    used = [len(rows) for rows in kept]
    return ResidentBucket(
        first_sample=_offsets(used),
        kept=None if used == counts else np.concatenate(kept),
        ids=np.concatenate(ids),
        first_image=_offsets(np.repeat([shard.variants for shard in shards], counts)),
        first_caption=np.concatenate(index["caption_start"]),
        captions=np.concatenate(captions),
        masked=np.repeat([shard.has_mask for shard in shards], counts),
        images=_values(tables, lambda column: not column.per_caption and column.reads != MASK),
        masks=masks[0] if masks else None,
        text=_finish_text(tables, starts, empty, num_captions),
    )


class _ShardSize:
    """The columns of a shard, and how many rows they have."""

    def __init__(self, reader: ShardReader) -> None:
        self.count = reader.entry.count
        self.variants = reader.num_variants
        self.has_mask = reader.mask is not None
        self.rows = {column: _num_rows(reader, column) for column in reader.columns}


def _make_tables(shards: Sequence[_ShardSize], empty: CaptionFeatures, device: torch.device) -> dict[str, _Table]:
    """Allocate the tables of a bucket: with rows for the empty caption, and one of zeros."""
    rows: Counter[str] = Counter()
    columns: dict[str, Column] = {}
    for shard in shards:
        for column, count in shard.rows.items():
            columns[column.name] = column
            rows[column.name] += count
    for column in columns.values():
        if column.reads == MASK:
            rows[column.name] = sum(shard.count for shard in shards)
        elif column.per_caption:
            rows[column.name] += len(_empty_rows(column, empty)) + 1
    return {name: _Table(column, rows[name], device) for name, column in columns.items()}


def _empty_rows(column: Column, empty: CaptionFeatures) -> Tensor:
    """Return the rows of the empty caption; none if the cache has no such caption."""
    if column.name not in empty:
        return torch.empty((0, *column.row_shape), dtype=getattr(torch, column.dtype))
    return empty[column.name] if column.ragged else empty[column.name][None]


def _offsets(counts: Sequence[int] | Indices) -> Indices:
    """Return where each of several parts begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _values(tables: Mapping[str, _Table], is_wanted: Callable[[Column], bool]) -> dict[str, Tensor]:
    return {name: table.values for name, table in tables.items() if is_wanted(table.column)}


def _finish_text(
    tables: Mapping[str, _Table], starts: dict[str, Indices], empty: CaptionFeatures, num_captions: int
) -> ResidentText:
    for name, table in tables.items():
        if not table.column.per_caption:
            continue
        rows = _empty_rows(table.column, empty)
        table.append(rows)
        table.append(torch.zeros_like(table.values[:1]))
        if table.column.ragged and name in empty:
            starts[name] = np.append(starts[name], starts[name][-1] + len(rows))
    return ResidentText(
        starts,
        _values(tables, lambda column: column.ragged),
        _values(tables, lambda column: column.per_caption and not column.ragged),
        num_captions,
    )


# --- gathering ---------------------------------------------------------------------------------


def index_rows(rows: Indices) -> Tensor:
    """Return row numbers as a tensor that fits into a batch."""
    return torch.from_numpy(rows.astype(np.int32))


def select_rows(table: Tensor, rows: Tensor, empty: AllocateTensor | None = None) -> Tensor:
    """Return the rows of a table, for an index of any shape; ``empty`` allocates their memory."""
    shape = (*rows.shape, *table.shape[1:])
    if empty is None:
        return table.index_select(0, rows.flatten()).view(shape)
    out = empty(shape, table.dtype)
    torch.index_select(table, 0, rows.flatten(), out=out.view(rows.numel(), *table.shape[1:]))
    return out


def select_masks(bucket: ResidentBucket, samples: Tensor, mirrored: Tensor) -> Tensor:
    """Return the masks of samples, those of mirrored images mirrored."""
    assert bucket.masks is not None
    masks = select_rows(bucket.masks, samples)
    return torch.where(mirrored.bool()[:, None, None], masks.flip(-1), masks)
