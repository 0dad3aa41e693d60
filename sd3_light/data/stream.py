"""The streaming dataset: batches read from a cache's shards in the sequence of an `Order`, in bounded memory."""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.core.columns import Bucket, Column, named_bucket
from sd3_light.data.batch import BatchRow, read_batch
from sd3_light.data.manifest import ShardEntry
from sd3_light.data.order import (
    WINDOW,
    Indices,
    Order,
    Picks,
    Segment,
    WindowRange,
    build_order,
    open_shards,
    rank_picks,
    rank_slice,
)
from sd3_light.data.reader import ShardReader
from sd3_light.data.shard_prefetch import ShardPrefetcher
from sd3_light.data.shard_table import BucketShards, column, group_shards
from sd3_light.data.shards import CaptionFeatures
from sd3_light.data.sides import Side, side_buckets
from sd3_light.data.slots import AllocateBytes, InPlaceDataset
from sd3_light.data.store import ShardStore, open_shard
from sd3_light.data.verify import Verifier
from sd3_light.randomness import choices, occurrence_words, stream

CachedBatch = dict[str, Any]
_OPEN_TRIES = 8
_MAX_PREFETCHED = 256  # dropping one costs only another check of its shards' markers


def new_buffer(nbytes: int) -> Tensor:
    """Allocate new memory for one batch."""
    return torch.empty(nbytes, dtype=torch.uint8)


def order_of_shards(
    shards: Sequence[BucketShards],
    seed: int,
    repeats: Mapping[str, float],
    batch_of: Callable[[tuple[int, int]], int],
    window: int,
    small: str,
) -> Order:
    """Return the order of the samples in these shards; see `CachedDataset.order`."""
    segment = cache(Segment)  # there are many shards but few different sizes and repeats
    buckets = []
    for bucket in shards:
        pairs = zip(bucket.counts.tolist(), column(bucket.shards, "directory").tolist(), strict=True)
        buckets.append(([segment(count, repeats[label]) for count, label in pairs], batch_of(bucket.resolution)))
    return build_order(seed, buckets, window, small == "drop")


class CachedDataset:
    """A cache read as batches, selected by the picks of an `Order`.

    A shard is hashed before it is first read (see `data.verify`). The number of open shards is bounded by the order's
    windows. ``launched``: this process is one of several that a launcher started. ``caption_weights`` are those of a
    directory's caption columns, by its label. All shards must have the same ``columns``: those that the family declares
    for a bucket, or without a family those of the first shard that is opened. ``side``: only samples of one side.
    """

    def __init__(
        self,
        store: ShardStore,
        launched: bool = False,
        caption_weights: Mapping[str, Sequence[float]] | None = None,
        columns: Callable[[Bucket], Sequence[Column]] | None = None,
        side: Side = "all",
    ) -> None:
        self.store = store
        self.manifest = store.manifest
        self.side: Side = side
        self._declared = columns
        self._columns: dict[str, Sequence[Column]] = {}
        self.caption_weights = {label: weights for label, weights in (caption_weights or {}).items() if weights}
        self.buckets = side_buckets(group_shards(self.manifest.shards), self.manifest.held_out, side)
        self.has_lengths = self.manifest.recipe.get("text_tokens") != "padded"
        self.max_open = open_shards(WINDOW, len(self.buckets))
        self._open: OrderedDict[str, ShardReader] = OrderedDict()
        self._prefetcher = ShardPrefetcher(self._prefetch, store.prefetch_threads)
        folder = store.path(self.manifest.empty).parent
        self._verifier = Verifier(folder, launched, store.keeps_times)
        store.on_hashed = self._verifier.accept

    def __getstate__(self) -> dict[str, Any]:
        # open files cannot be sent to worker processes
        return {**self.__dict__, "_open": OrderedDict()}

    def order(
        self,
        seed: int,
        repeats: Mapping[str, float],
        batch_of: Callable[[tuple[int, int]], int],
        window: int = WINDOW,
        small: str = "pad",
    ) -> Order:
        """Build the order from repeats per directory label, the global batch per resolution and ``small_buckets``."""
        if unknown := sorted(set(column(self.manifest.shards, "directory").tolist()) - repeats.keys()):
            raise UserError(
                f"the cache contains samples of {unknown[0]!r}, which is not in the dataset TOML (it has "
                f"{', '.join(map(repr, repeats))}): the cache belongs to another dataset; run without --trust-cache"
            )
        order = order_of_shards(self.buckets, seed, repeats, batch_of, window, small)
        if order.steps_per_epoch == 0:
            raise UserError(
                "every bucket is smaller than a global batch; set small_buckets = 'pad', or lower the batch size"
            )
        self.max_open = open_shards(window, len(self.buckets))
        return order

    def empty_text(self) -> CaptionFeatures:
        """Return the features of the empty caption, without padding if the cache has real tokens."""
        return self.readers([self.manifest.empty])[0].caption(0, 0)

    # --- batches ------------------------------------------------------------------------------

    def read(self, picks: Picks, seed: int, allocate: AllocateBytes = new_buffer) -> CachedBatch:
        """Read the picked samples as one batch; caption and flip are drawn per sample (law 1).

        ``mask`` is None if no shard of the batch has one. See `read_batch` for the rest; a cache of padded text has no
        lengths.
        """
        # in file order, so that the disk can read ahead
        order = np.lexsort((picks.index, picks.segment)).tolist()
        tensors = read_batch(self._rows(picks, seed), order, self.has_lengths, allocate)
        epoch = torch.full((len(picks.repeat),), picks.epoch)
        return {"mask": None, **tensors, "epoch": epoch, "repeat": torch.from_numpy(picks.repeat)}

    def _rows(self, picks: Picks, seed: int) -> list[BatchRow]:
        shards = self.buckets[picks.bucket].shards
        segments = picks.segment.tolist()
        needed = sorted(set(segments))
        by_segment = dict(zip(needed, self.readers([shards[segment] for segment in needed]), strict=True))
        sources = [
            (reader := by_segment[segment], reader.row(index))
            for segment, index in zip(segments, picks.index.tolist(), strict=True)
        ]
        ids = [reader.identity(row) for reader, row in sources]
        occurrences = occurrence_words(picks.epoch, picks.repeat, ids)
        captions = np.array([reader.num_captions(row) for reader, row in sources])
        variants = np.array([reader.num_variants for reader, _ in sources])
        caption = self.pick_captions(picks, seed, ids, captions).tolist()
        variant = choices(seed, "flip", occurrences, variants).tolist()
        return [
            BatchRow(reader, reader.locate(row, caption[at], variant[at]), ids[at], variant[at])
            for at, (reader, row) in enumerate(sources)
        ]

    def pick_captions(
        self, picks: Picks, seed: int, ids: Sequence[int] | NDArray[np.int64], counts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the number of the caption of each picked sample; ``ids`` and ``counts`` are its id and captions."""
        shards = self.buckets[picks.bucket].shards
        caption = choices(seed, "caption", occurrence_words(picks.epoch, picks.repeat, ids), counts)
        for at, segment in enumerate(picks.segment.tolist() if self.caption_weights else ()):
            if weights := self.caption_weights.get(shards[segment].directory):
                occurrence = picks.epoch, int(picks.repeat[at]), int(ids[at])
                caption[at] = weighted_caption(seed, *occurrence, int(counts[at]), weights)
        return caption

    # --- shards -------------------------------------------------------------------------------

    def readers(self, entries: Sequence[ShardEntry]) -> list[ShardReader]:
        """Return readers of verified shards; beyond ``max_open`` the least recently used ones are closed.

        A deleted or replaced shard is read as long as it is open, as its bytes remain. One that was written to, or that
        must be opened again and is another file now, is verified again.
        """
        for entry in entries:
            reader = self._open.get(entry.file)
            if reader is not None and not self._verifier.is_same(entry, reader.status()):
                del self._open[entry.file]
        missing = [entry for entry in entries if entry.file not in self._open]
        if len(missing) > 1 and self.store.prefetch_threads > 1:
            self._prefetcher.request(missing, first=True)  # a download waits for the network, not for the others
        self._verifier.require((entry, self.store.path(entry)) for entry in missing)
        self._open |= {entry.file: self._new_verified_reader(entry) for entry in missing}
        readers = [self._open[entry.file] for entry in entries]
        for entry in entries:
            self._open.move_to_end(entry.file)
        while len(self._open) > self.max_open:
            self._open.popitem(last=False)
        return readers

    def _new_verified_reader(self, entry: ShardEntry) -> ShardReader:
        """Open a verified shard; verify again what replaced it in between."""
        for _ in range(_OPEN_TRIES):
            reader = self.new_reader(entry)
            if self._verifier.is_same(entry, reader.status()):
                return reader
            self._verifier.require([(entry, self.store.path(entry))])
        raise UserError(f"shard {entry.file} changes while it is read; stop what writes to the cache, then resume")

    def new_reader(self, entry: ShardEntry) -> ShardReader:
        """Open a shard without hashing it. Raises a UserError if its columns are not those of the cache."""
        reader = open_shard(self.store, entry, lambda path: ShardReader(path, entry))
        known = self._columns
        bucket = entry.bucket
        if bucket not in known:
            for columns in list(known.values())[:1]:
                reader.require(columns, same_bucket=False)
            known[bucket] = reader.columns if self._declared is None else self._declared(named_bucket(bucket))
        reader.require(known[bucket])
        if self.manifest.held_out is not None:
            reader.keep(self.manifest.held_out, self.side)
        return reader

    def prefetch(self, bucket: int, segments: Sequence[int]) -> None:
        """Fetch and hash shards in the background, in this order."""
        shards = self.buckets[bucket].shards
        self._prefetcher.request([shards[segment] for segment in segments])

    def _prefetch(self, entry: ShardEntry) -> None:
        if (path := self.store.prefetch(entry)) is not None:
            self._verifier.prefetch((entry, path))


def weighted_caption(seed: int, epoch: int, repeat: int, sample_id: int, count: int, weights: Sequence[float]) -> int:
    """Return the number of the caption for one occurrence of a sample, by the weights of caption columns (law 1).

    Its ``count`` captions are equally many variants of each column, in order.
    """
    variants, rest = divmod(count, len(weights))
    if rest:
        raise UserError(
            f"caption_weights has {len(weights)} weights, and a sample in the cache has {count} captions; run without "
            "--trust_cache"
        )
    draws = stream(seed, "caption", epoch, repeat, sample_id)
    column = int(np.searchsorted(np.cumsum(weights), draws.random() * sum(weights), side="right"))
    return min(column, len(weights) - 1) * variants + int(draws.integers(variants))


class MicroBatches(InPlaceDataset):
    """A rank's micro-batches by number: item ``step * micro_batches + micro``. That number is its whole state.

    ``by_segment`` assigns the samples of a step to ranks by their shards, so that each machine reads few of them.
    """

    def __init__(
        self,
        data: CachedDataset,
        order: Order,
        rank: int,
        world_size: int,
        micro_batches: int,
        by_segment: bool = False,
    ) -> None:
        self.data = data
        self.order = order
        self.rank = rank
        self.world_size = world_size
        self.micro_batches = micro_batches
        self.by_segment = by_segment
        # the steps of all buckets interleave, and neighbouring steps need the same windows
        self._prefetched: deque[WindowRange] = deque(maxlen=_MAX_PREFETCHED)

    def __getitem__(self, item: int) -> CachedBatch:
        return self.fetch(item, new_buffer)

    def fetch(self, item: int, allocate: AllocateBytes) -> CachedBatch:
        """Read a micro-batch; its tensors share one block of memory from ``allocate``."""
        step, micro = divmod(item, self.micro_batches)
        share = self.rank, self.world_size, micro, self.micro_batches
        picks = rank_picks(self.order, step, *share, self.by_segment)
        ahead = self.order.next_windows(step, *self._rank_share(step))
        if self.data.store.prefetches_early:  # downloads continue while the last shards of this step arrive
            self._prefetch(ahead)
        batch = self.data.read(picks, self.order.seed, allocate)
        self._prefetch(ahead)
        return batch

    def prefetch_step(self, step: int) -> None:
        """Start to hash the shards of ``step`` in the background, for example while the model is loading."""
        self._prefetch(self.order.windows_at(step, *self._rank_share(step)))

    def _rank_share(self, step: int) -> tuple[int, int]:
        """Return this rank's range of the global batch of ``step``, over all micro-batches."""
        return rank_slice(self.order.batch_size(step), self.rank, self.world_size, 0, 1)

    def _prefetch(self, windows: WindowRange) -> None:
        if windows not in self._prefetched:
            self._prefetched.append(windows)
            for number in range(windows.first, windows.last + 1):  # in the order in which they are read
                window = replace(windows, first=number, last=number)
                self.data.prefetch(windows.bucket, self._segments(window).tolist())

    def _segments(self, windows: WindowRange) -> Indices:
        """Return the segments of some windows that this rank will read."""
        if not self.by_segment:
            return self.order.segments_in(windows)
        share = rank_slice(self.order.buckets[windows.bucket].batch, self.rank, self.world_size, 0, 1)
        return self.order.segments_of_share(windows, *share)
