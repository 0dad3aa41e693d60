"""The streaming data set: batches read from a cache's shards as the order asks for them, in bounded memory."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from os import getpid
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.data.batch import BatchRow, read_batch
from sd3_light.data.manifest import ShardEntry
from sd3_light.data.memory import too_large
from sd3_light.data.order import WINDOW, Order, Picks, Segment, WindowRange, make_order, open_shards, rank_slice
from sd3_light.data.reader import ShardReader
from sd3_light.data.shards import CaptionFeatures
from sd3_light.data.slots import AllocateBytes, InPlaceDataset
from sd3_light.data.store import ShardStore, open_shard
from sd3_light.data.verify import Verifier
from sd3_light.randomness import stream

CachedBatch = dict[str, Any]
_SEEN_AHEAD = 256  # forgetting one costs a look at its shards' marks, no more


@dataclass(frozen=True)
class BucketShards:
    """The shards of one bucket at one resolution."""

    bucket: str
    resolution: tuple[int, int]
    shards: tuple[ShardEntry, ...]

    @property
    def size(self) -> int:
        """Samples of the bucket."""
        return sum(shard.count for shard in self.shards)


def group_shards(shards: Sequence[ShardEntry]) -> tuple[BucketShards, ...]:
    """Buckets and their shards in a fixed order, so that every rank means the same by a number."""
    grouped: dict[tuple[tuple[int, int], str], list[ShardEntry]] = {}
    for shard in sorted(shards, key=lambda shard: shard.file):
        grouped.setdefault((shard.resolution, shard.bucket), []).append(shard)
    return tuple(
        BucketShards(bucket, resolution, tuple(found)) for (resolution, bucket), found in sorted(grouped.items())
    )


def new_buffer(nbytes: int) -> Tensor:
    """Memory of its own for one batch."""
    return torch.empty(nbytes, dtype=torch.uint8)


class CachedDataset:
    """A cache as batches, by the picks of an `Order`.

    A shard is hashed when it is first read (see `data.verify`); as many are kept open as the order's windows hold. With
    ``in_memory`` all are read here and now, and worker processes that are forked later share that memory;
    ``processes`` on this machine do the same. ``launched``: this process is one of several of a launcher.
    """

    def __init__(self, store: ShardStore, in_memory: bool = False, processes: int = 1, launched: bool = False) -> None:
        self.store, self.manifest = store, store.manifest
        self.buckets = group_shards(self.manifest.shards)
        self.has_lengths = self.manifest.recipe.get("text_tokens") == "real"
        self.max_open = open_shards(WINDOW, len(self.buckets))
        self._open: OrderedDict[str, ShardReader] = OrderedDict()
        self._ahead: threading.Thread | None = None
        self._verifier: Verifier | None = None
        if not store.verified:
            folder = store.path(self.manifest.empty).parent
            self._verifier = Verifier(folder, self.manifest, launched)
        self._resident = self._read_all(processes) if in_memory else {}

    def __getstate__(self) -> dict[str, Any]:
        # open files and threads do not travel to worker processes
        return {**self.__dict__, "_open": OrderedDict(), "_ahead": None}

    def order(
        self,
        seed: int,
        repeats: Mapping[str, float],
        batch_of: Callable[[tuple[int, int]], int],
        window: int = WINDOW,
        small: str = "pad",
    ) -> Order:
        """The order of this cache: ``repeats`` by directory label, ``batch_of`` a resolution the global batch.

        ``small`` is the config's ``small_buckets``: "drop" leaves out buckets with fewer occurrences than a batch.
        """
        if unknown := sorted({shard.directory for shard in self.manifest.shards} - repeats.keys()):
            raise UserError(
                f"the cache holds samples of {unknown[0]!r}, which the dataset TOML does not have (it has "
                f"{', '.join(map(repr, repeats))}): it is of another data set; run without --trust_cache"
            )
        segment = cache(Segment)  # shards are many, their sizes and repeats are few
        buckets = [
            ([segment(shard.count, repeats[shard.directory]) for shard in bucket.shards], batch_of(bucket.resolution))
            for bucket in self.buckets
        ]
        order = make_order(seed, buckets, window, small == "drop")
        if order.steps_per_epoch == 0:
            raise UserError(
                "every bucket is smaller than a global batch; write small_buckets = 'pad', or lower the batch"
            )
        self.max_open = open_shards(window, len(self.buckets))
        return order

    def empty_text(self) -> CaptionFeatures:
        """The features of the empty caption: tokens [L, W] by encoder name, of a cache of real tokens just its own
        ones, and pooled vectors [W]."""
        return self._readers([self.manifest.empty])[0].caption(0, 0)

    # --- a batch -------------------------------------------------------------------------------

    def read(self, picks: Picks, seed: int, allocate: AllocateBytes = new_buffer) -> CachedBatch:
        """The picked samples as one batch; caption and flip are each sample's own draw (law 1).

        ``mask`` is None where no shard of the batch has one. Text is as long as the longest caption of the batch, zeros
        behind the others, and a cache of real tokens adds ``ENCODER.length``.
        """
        # in the order of the files, so that the disk may read ahead
        order = np.lexsort((picks.index, picks.segment)).tolist()
        tensors = read_batch(self._rows(picks, seed), order, self.has_lengths, allocate)
        epoch = torch.full((len(picks.repeat),), picks.epoch)
        return {"mask": None, **tensors, "epoch": epoch, "repeat": torch.from_numpy(picks.repeat)}

    def _rows(self, picks: Picks, seed: int) -> list[BatchRow]:
        shards, segments = self.buckets[picks.bucket].shards, picks.segment.tolist()
        needed = sorted(set(segments))
        readers = dict(zip(needed, self._readers([shards[at] for at in needed]), strict=True))
        rows = []
        for segment, row, repeat in zip(segments, picks.index.tolist(), picks.repeat.tolist(), strict=True):
            reader = readers[segment]
            occurrence = picks.epoch, repeat, reader.identity(row)
            captions, variants = reader.num_captions(row), reader.num_variants
            caption = _choose(seed, "caption", *occurrence, captions) if captions > 1 else 0
            variant = _choose(seed, "flip", *occurrence, variants) if variants > 1 else 0
            rows.append(BatchRow(reader, reader.locate(row, caption, variant), occurrence[2], variant))
        return rows

    # --- shards --------------------------------------------------------------------------------

    def _readers(self, entries: Sequence[ShardEntry]) -> list[ShardReader]:
        """Readers of verified shards; beyond ``max_open`` those used longest ago are closed when nobody reads them."""
        found = [self._resident.get(entry.file) or self._open.get(entry.file) for entry in entries]
        if None in found and self._verifier is not None:
            missing = [entry for entry, reader in zip(entries, found, strict=True) if reader is None]
            self._verifier.require((entry, self.store.path(entry)) for entry in missing)
        readers = [reader or self._reader(entry) for entry, reader in zip(entries, found, strict=True)]
        for entry in entries:
            if entry.file in self._open:
                self._open.move_to_end(entry.file)
        while len(self._open) > self.max_open:
            self._open.popitem(last=False)
        return readers

    def _reader(self, entry: ShardEntry) -> ShardReader:
        reader = self._open[entry.file] = self._opened(entry)
        return reader

    def _opened(self, entry: ShardEntry, in_memory: bool = False) -> ShardReader:
        return open_shard(self.store, entry, lambda path: ShardReader(path, entry, in_memory))

    def _read_all(self, processes: int) -> dict[str, ShardReader]:
        if problem := too_large(sum(entry.bytes for entry in self.manifest.shards), processes):
            raise UserError(problem)
        found = {}
        for entry in self.manifest.shards:
            if self._verifier is not None:
                self._verifier.require([(entry, self.store.path(entry))])
            found[entry.file] = self._opened(entry, in_memory=True)
        return found

    def prefetch(self, bucket: int, segments: Sequence[int]) -> bool:
        """Fetch and hash in the background what will be read later; False where an earlier such work is under way."""
        if self._resident:
            return True
        if self._ahead is not None and self._ahead.is_alive():
            return False
        entries = [self.buckets[bucket].shards[at] for at in segments]
        if self._verifier is not None:
            entries = [entry for entry in entries if not self._verifier.is_known(entry)]
        if not entries:
            return True
        first = getpid() % len(entries)  # processes begin at different shards
        entries = [*entries[first:], *entries[:first]]
        self._ahead = threading.Thread(target=self._prefetch, args=(entries,), daemon=True)
        self._ahead.start()
        return True

    def _prefetch(self, entries: Sequence[ShardEntry]) -> None:
        for entry in entries:
            try:
                path = self.store.path(entry)
                if self._verifier is not None:
                    self._verifier.prefetch((entry, path))
            except (UserError, OSError):
                return  # it is told when the shard is read


def _choose(seed: int, purpose: str, epoch: int, repeat: int, sample_id: int, count: int) -> int:
    return int(stream(seed, purpose, epoch, repeat, sample_id).integers(count))


class MicroBatches(InPlaceDataset):
    """A rank's micro-batches as a map: item ``step * micro_batches + micro``. Its whole state is that number."""

    def __init__(self, data: CachedDataset, order: Order, rank: int, world: int, micro_batches: int) -> None:
        self.data, self.order = data, order
        self.rank, self.world, self.micro_batches = rank, world, micro_batches
        # the steps of all buckets interleave, and a step asks for what its neighbours asked for
        self._seen_ahead: deque[WindowRange] = deque(maxlen=_SEEN_AHEAD)

    def __getitem__(self, item: int) -> CachedBatch:
        return self.fetch(item, new_buffer)

    def fetch(self, item: int, allocate: AllocateBytes) -> CachedBatch:
        """The micro-batch, its tensors in one piece of ``allocate``'s memory."""
        step, micro = divmod(item, self.micro_batches)
        size = self.order.batch_size(step)
        start, stop = rank_slice(size, self.rank, self.world, micro, self.micro_batches)
        batch = self.data.read(self.order.picks(step, start, stop), self.order.seed, allocate)
        self._look_ahead(step)
        return batch

    def prefetch_step(self, step: int) -> None:
        """Begin to hash, in the background, what ``step`` will read; the trainer may load its model meanwhile."""
        self.data.prefetch(self.order.position(step)[1], self.order.segments_at(step, *self._share(step)).tolist())

    def _share(self, step: int) -> tuple[int, int]:
        """This rank's part of the global batch of ``step``, over all micro-batches."""
        return rank_slice(self.order.batch_size(step), self.rank, self.world, 0, 1)

    def _look_ahead(self, step: int) -> None:
        windows = self.order.next_windows(step, *self._share(step))
        if windows in self._seen_ahead:
            return
        if self.data.prefetch(windows.bucket, self.order.segments_in(windows).tolist()):
            self._seen_ahead.append(windows)
