"""A whole cache in the memory of the host or of a GPU, from which batches are gathered by index."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from sd3_light.budget.residence import LARGEST_SHARE
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import Manifest, ShardEntry
from sd3_light.data.order import Order, Picks, rank_picks
from sd3_light.data.reader import ShardReader
from sd3_light.data.shards import POOLED, TOKENS, CaptionFeatures
from sd3_light.data.stream import CachedDataset

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class ResidentText:
    """The distinct captions of a bucket, numbered over its shards; number ``empty`` is the empty caption.

    ``starts`` are the first token rows of each. The last row of every table is zeros.
    """

    starts: Mapping[str, Indices]
    tokens: Mapping[str, Tensor]
    pooled: Mapping[str, Tensor]
    empty: int

    def zero_row(self, name: str) -> int:
        """Return the row of zeros among an encoder's tokens."""
        return int(self.starts[name][-1])


@dataclass(frozen=True)
class ResidentBucket:
    """The samples of a bucket, in the order of its shards; arrays [N] and [N + 1] are on the host.

    Sample n of segment s has number ``first_sample[s] + n``, the image rows from ``first_image`` and the captions from
    ``first_caption``.
    """

    first_sample: Indices
    ids: Indices
    first_image: Indices
    first_caption: Indices
    captions: Indices
    masked: NDArray[np.bool_]
    moments: Tensor
    masks: Tensor | None
    text: ResidentText


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
        self.device, self.pick_captions = device, data.pick_captions
        self.buckets = [_load_bucket(data, bucket.shards, empty, device) for bucket in data.buckets]


def _too_large(manifest: Manifest, device: torch.device, processes: int) -> str | None:
    if device.type != "cuda":
        return manifest.too_large(processes)
    nbytes, free = manifest.nbytes, torch.cuda.mem_get_info(device)[0]
    if nbytes <= LARGEST_SHARE * free:
        return None
    return (
        f"the cache takes {nbytes / 1e9:.1f} GB and {free / 1e9:.1f} GB of GPU memory are free, of which "
        f'{LARGEST_SHARE:.0%} may be taken; write cache_residence = "host" or "stream"'
    )


class ResidentPicks(Dataset[Picks]):
    """A rank's micro-batches by number, as picks: item ``step * micro_batches + micro``."""

    def __init__(self, order: Order, rank: int, world: int, micro_batches: int, by_segment: bool = False) -> None:
        self.order, self.rank, self.world, self.micro_batches = order, rank, world, micro_batches
        self.by_segment = by_segment

    def __getitem__(self, item: int) -> Picks:
        step, micro = divmod(item, self.micro_batches)
        return rank_picks(self.order, step, self.rank, self.world, micro, self.micro_batches, self.by_segment)


# --- loading -----------------------------------------------------------------------------------


class _Table:
    """Rows of one field of several shards, read one after another."""

    def __init__(self, rows: int, row_shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.values = torch.empty((rows, *row_shape), dtype=dtype, device=device)
        self._end = 0

    def read(self, reader: ShardReader, field: str) -> None:
        """Append a field of a shard."""
        span = reader.fields[field]
        rows = span.nbytes // max(1, self.values[:1].nbytes)
        target = self._next(rows)
        if not rows:
            return
        memory = target if target.device.type == "cpu" else torch.empty(target.shape, dtype=target.dtype)
        reader.read(memory.view(-1).view(torch.uint8).numpy().data, span.offset)
        if memory is not target:
            target.copy_(memory)

    def append(self, values: Tensor) -> None:
        """Append rows."""
        self._next(len(values)).copy_(values)

    def _next(self, rows: int) -> Tensor:
        self._end += rows
        return self.values[self._end - rows : self._end]


def _load_bucket(
    data: CachedDataset, entries: Sequence[ShardEntry], empty: CaptionFeatures, device: torch.device
) -> ResidentBucket:
    """Read the shards of a bucket, verified; two passes, because only the files say how many rows they have."""
    shapes = [{name: field.shape for name, field in data.readers([entry])[0].fields.items()} for entry in entries]
    tables = _make_tables(shapes, empty, device)
    counts = [shape["moments"][0] for shape in shapes]
    variants = np.repeat([shape["moments"][1] for shape in shapes], counts)
    index: dict[str, list[Indices]] = {name: [np.zeros(1, np.int64)] for name in ("caption_start", *_starts())}
    ids: list[Indices] = []
    captions: list[Indices] = []
    num_captions = 0
    for entry in entries:
        (reader,) = data.readers([entry])
        for name, table in tables.items():
            _read_field(reader, name, table)
        ids.append(reader.index["sample_id"])
        captions.append(reader.index["caption"] + num_captions)
        num_captions += reader.fields["clip_l.pooled"].shape[0]
        for name, starts in index.items():
            starts.append(reader.index[name][1:] + starts[-1][-1])
    text = _finish_text(tables, {name: np.concatenate(index[f"{name}.start"]) for name in TOKENS}, empty, num_captions)
    masks = tables.get("mask")
    return ResidentBucket(
        first_sample=_offsets(counts),
        ids=np.concatenate(ids),
        first_image=_offsets(variants),
        first_caption=np.concatenate(index["caption_start"]),
        captions=np.concatenate(captions),
        masked=np.repeat(["mask" in shape for shape in shapes], counts),
        moments=tables["moments"].values,
        masks=None if masks is None else masks.values,
        text=text,
    )


def _starts() -> tuple[str, ...]:
    return tuple(f"{name}.start" for name in TOKENS)


def _offsets(counts: Sequence[int] | Indices) -> Indices:
    """Return where each of several parts begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _make_tables(
    shapes: Sequence[Mapping[str, tuple[int, ...]]], empty: CaptionFeatures, device: torch.device
) -> dict[str, _Table]:
    """Allocate the tables of a bucket: with rows for the empty caption, and one of zeros."""
    samples, first = sum(shape["moments"][0] for shape in shapes), shapes[0]
    images = sum(shape["moments"][0] * shape["moments"][1] for shape in shapes)
    tables = {"moments": _Table(images, first["moments"][2:], torch.float16, device)}
    if any("mask" in shape for shape in shapes):
        tables["mask"] = _Table(samples, first["moments"][3:], torch.uint8, device)
    extra = {f"{name}.tokens": len(empty[name]) + 1 for name in TOKENS} | {f"{name}.pooled": 2 for name in POOLED}
    for name, rows in extra.items():
        total = sum(shape[name][0] for shape in shapes) + rows
        tables[name] = _Table(total, first[name][1:], torch.bfloat16, device)
    return tables


def _read_field(reader: ShardReader, name: str, table: _Table) -> None:
    if name in reader.fields:
        table.read(reader, name)
    else:  # a shard without masks
        shape = (reader.entry.count, *reader.latent_shape[1:])
        table.append(torch.full(shape, 255, dtype=torch.uint8))


def _finish_text(
    tables: Mapping[str, _Table], starts: dict[str, Indices], empty: CaptionFeatures, num_captions: int
) -> ResidentText:
    for name in TOKENS:
        tokens, table = empty[name], tables[f"{name}.tokens"]
        table.append(tokens)
        table.append(torch.zeros_like(table.values[:1]))
        starts[name] = np.append(starts[name], starts[name][-1] + len(tokens))
    for name in POOLED:
        table = tables[f"{name}.pooled"]
        table.append(empty[f"{name}.pooled"][None])
        table.append(torch.zeros_like(table.values[:1]))
    return ResidentText(
        starts,
        {name: tables[f"{name}.tokens"].values for name in TOKENS},
        {name: tables[f"{name}.pooled"].values for name in POOLED},
        num_captions,
    )
