"""The streaming data set: batches read from a cache's shards as the order asks for them, in bounded memory."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd3_light.data.order import Order, Picks, Segment, make_order, rank_slice
from sd3_light.data.shards import POOLED, TOKENS, Features, Manifest, ShardEntry, ShardReader
from sd3_light.randomness import stream

Batch = dict[str, Any]
MAX_OPEN_SHARDS = 64


@dataclass(frozen=True)
class BucketShards:
    """The shards of one bucket at one resolution, by directory."""

    bucket: str
    resolution: tuple[int, int]
    directories: tuple[int, ...]
    shards: tuple[tuple[ShardEntry, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each directory."""
        return tuple(sum(shard.count for shard in group) for group in self.shards)


def group_shards(shards: Sequence[ShardEntry]) -> tuple[BucketShards, ...]:
    """Buckets in a fixed order, so that every rank means the same by a number."""
    grouped: dict[tuple[tuple[int, int], str], dict[int, list[ShardEntry]]] = {}
    for shard in sorted(shards, key=lambda shard: shard.file):
        grouped.setdefault((shard.resolution, shard.bucket), {}).setdefault(shard.directory, []).append(shard)
    return tuple(
        BucketShards(bucket, resolution, tuple(sorted(parts)), tuple(tuple(parts[at]) for at in sorted(parts)))
        for (resolution, bucket), parts in sorted(grouped.items())
    )


class CachedDataset:
    """Random access to a cache by (bucket, directory, index); at most ``MAX_OPEN_SHARDS`` shards are open at a time."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.buckets = group_shards(manifest.shards)
        self._ends = [[np.cumsum([shard.count for shard in group]) for group in b.shards] for b in self.buckets]
        self._open: OrderedDict[str, ShardReader] = OrderedDict()
        self._verified: set[str] = set()  # a shard is hashed once a process, not each time it is opened

    def __getstate__(self) -> dict[str, Any]:
        # open files do not travel to worker processes
        return {**self.__dict__, "_open": OrderedDict()}

    def order(self, seed: int, repeats: Sequence[float], batch_of: Callable[[tuple[int, int]], int]) -> Order:
        """The order of this cache: ``repeats`` by directory, ``batch_of`` a resolution the global batch."""
        return make_order(
            seed,
            [
                (
                    [Segment(size, repeats[at]) for size, at in zip(b.sizes, b.directories, strict=True)],
                    batch_of(b.resolution),
                )
                for b in self.buckets
            ],
        )

    def empty_text(self) -> Features:
        """The features of the empty caption."""
        return self._reader(self.manifest.empty).caption(0, 0)

    def read(self, picks: Picks, seed: int) -> Batch:
        """The picked samples as one batch; caption and flip are each sample's own draw (law 1)."""
        rows = zip(picks.segment.tolist(), picks.index.tolist(), picks.repeat.tolist(), strict=True)
        samples = [self._sample(picks.bucket, *row, picks.epoch, seed) for row in rows]
        masks = [mask for _, _, mask, _ in samples]
        batch: Batch = {
            "sample_id": torch.tensor([sample_id for sample_id, _, _, _ in samples]),
            "epoch": torch.full((len(samples),), picks.epoch),
            "repeat": torch.from_numpy(picks.repeat),
            "moments": torch.stack([moments for _, moments, _, _ in samples]),
            "mask": None if all(mask is None for mask in masks) else _stack_masks(masks, samples[0][1]),
        }
        for name in (*TOKENS, *(f"{name}.pooled" for name in POOLED)):
            batch[name] = torch.stack([features[name] for _, _, _, features in samples])
        return batch

    def _sample(
        self, bucket: int, segment: int, index: int, repeat: int, epoch: int, seed: int
    ) -> tuple[int, Tensor, Tensor | None, Features]:
        ends = self._ends[bucket][segment]
        number = int(np.searchsorted(ends, index, side="right"))
        shard = self._reader(self.buckets[bucket].shards[segment][number])
        row = index - (int(ends[number - 1]) if number else 0)
        sample_id = int(shard.sample_id[row])
        caption = _choose(seed, "caption", epoch, repeat, sample_id, shard.num_captions(row))
        variant = _choose(seed, "flip", epoch, repeat, sample_id, shard.num_variants)
        return sample_id, *shard.picture(row, variant), shard.caption(row, caption)

    def _reader(self, entry: ShardEntry) -> ShardReader:
        reader = self._open.pop(entry.file, None)
        if reader is None:
            reader = ShardReader(self.folder, entry, verify=entry.file not in self._verified)
            self._verified.add(entry.file)
        self._open[entry.file] = reader
        if len(self._open) > MAX_OPEN_SHARDS:
            self._open.popitem(last=False)
        return reader


def _choose(seed: int, purpose: str, epoch: int, repeat: int, sample_id: int, count: int) -> int:
    return 0 if count == 1 else int(stream(seed, purpose, epoch, repeat, sample_id).integers(count))


def _stack_masks(masks: Sequence[Tensor | None], like: Tensor) -> Tensor:
    whole = torch.full(like.shape[-2:], 255, dtype=torch.uint8)
    return torch.stack([whole if mask is None else mask for mask in masks])


class MicroBatches(torch.utils.data.Dataset[Batch]):
    """A rank's micro-batches as a map: item ``step * micro_batches + micro``. Its whole state is that number."""

    def __init__(self, data: CachedDataset, order: Order, rank: int, world: int, micro_batches: int) -> None:
        self.data, self.order = data, order
        self.rank, self.world, self.micro_batches = rank, world, micro_batches

    def __getitem__(self, item: int) -> Batch:
        step, micro = divmod(item, self.micro_batches)
        size = self.order.batch_size(step)
        start, stop = rank_slice(size, self.rank, self.world, micro, self.micro_batches)
        return self.data.read(self.order.picks(step, start, stop), self.order.seed)
