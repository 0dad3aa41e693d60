"""The order of training samples as pure arithmetic, with locality (law 2).

``(seed, epoch, shard sizes, global batch) -> the sequence of global batches`` is a pure function. A rank computes its
slice of one step only, and the only state is the step number. An epoch of a bucket is built as follows:

1. Its blocks, one per shard and repeat, are put in random order. Together they are a sequence of positions.
2. The sequence is cut into windows, each as long as ``window`` of the bucket's largest shards.
3. Inside a window a keyed bijection (a Feistel network, cycle-walked into range) shuffles all positions.
4. Consecutive positions form batches; batches of several buckets interleave evenly over the epoch.

A step therefore reads from about ``window`` shards per bucket, which the next steps read too, however large the dataset
is. The cost is some randomness: two samples of one shard are in the same window of an epoch (or in neighbouring ones),
so they are seen within about ``window`` shards of each other. Each epoch draws again which shards share a window. A
window as long as the epoch shuffles the whole bucket.

The only tables have one row per block, for the current and the neighbouring epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

WINDOW = 16
_ROUNDS = 8  # with fewer, permutations of 3 to 10 items are not uniform
_UNIT_BITS = 24  # a batch number plus a fraction of this many bits is exact in a double
_SHARE = 1 << 30  # fractional repeats are counted in units of 1 / _SHARE: integer sums do not depend on the order
_STEP = 0x9E3779B97F4A7C15  # of splitmix64; odd, so that its multiples are all different


def permute(positions: Indices, sizes: Indices, keys: Words) -> Indices:
    """Return the items at some positions of keyed permutations of ``range(size)``, without computing the others."""
    values = positions.astype(np.uint64)
    bounds = sizes.astype(np.uint64)
    side = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    round_keys = _hash(keys, np.arange(_ROUNDS)[:, None])
    values = _network(values, side, round_keys)
    # the network permutes a square number; values outside the range are permuted again until they are inside
    while len(outside := np.flatnonzero(values >= bounds)):
        values[outside] = _network(values[outside], side[outside], round_keys[:, outside])
    return values.astype(np.int64)


def _network(values: Words, side: Words, round_keys: Words) -> Words:
    """Apply a Feistel network to pairs of numbers below ``side``."""
    left, right = np.divmod(values, side)
    for key in round_keys:
        left, right = right, (left + _mix(right ^ key) % side) % side
    return left * side + right


def _mix(x: Words) -> Words:
    """Apply the finalizer of splitmix64: every input bit changes every output bit with probability about one half."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(key: Words, *numbers: Indices) -> Words:
    """Hash a key and integers to a word, elementwise."""
    for number in numbers:
        key = _mix(key + (number.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP))
    return key


def _key(*words: int | str) -> Words:
    digest = blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive samples of one bucket, in a cache one shard: ``size`` samples, each ``repeats`` times per epoch."""

    size: int
    repeats: float = 1.0


@dataclass(frozen=True)
class BucketOrder:
    """The order of one bucket. With ``drop_small`` a bucket with fewer occurrences than a batch has no batches."""

    segments: tuple[Segment, ...]
    batch: int  # samples per global batch
    window: int = WINDOW  # segments per window
    drop_small: bool = False

    @cached_property
    def sizes(self) -> Indices:
        """Samples per segment."""
        return np.array([segment.size for segment in self.segments], dtype=np.int64)

    @cached_property
    def _repeats(self) -> tuple[Indices, Indices]:
        """Whole repeats per segment, and the remaining fraction in units of 1 / ``_SHARE``."""
        repeats = np.array([segment.repeats for segment in self.segments])
        whole = np.floor(repeats)
        return whole.astype(np.int64), np.rint((repeats - whole) * _SHARE).astype(np.int64)

    @cached_property
    def length(self) -> int:
        """Occurrences per epoch without padding; fractions are rounded over the whole bucket."""
        whole, share = self._repeats
        parts = (int((share * self.sizes).sum()) + _SHARE // 2) // _SHARE
        return max(1, int((whole * self.sizes).sum()) + parts)

    @property
    def dropped(self) -> bool:
        """Whether the bucket is left out because it is too small."""
        return self.drop_small and self.length < self.batch

    @property
    def num_batches(self) -> int:
        """Global batches per epoch; the last is padded with occurrences from the start of the epoch."""
        return 0 if self.dropped else -(-self.length // self.batch)

    @property
    def padding(self) -> int:
        """Occurrences repeated to fill the last batch."""
        return 0 if self.dropped else self.num_batches * self.batch - self.length

    @cached_property
    def span(self) -> int:
        """Positions per window."""
        return self.window * int(self.sizes.max())

    def window_edges(self, position: int) -> tuple[int, int]:
        """Return the range of positions of the window that contains one; positions of padding are beyond ``length``."""
        lap = position // self.length * self.length
        first = lap + (position - lap) // self.span * self.span
        return first, min(first + self.span, lap + self.length)

    @cached_property
    def most_repeats(self) -> int:
        """The largest number of occurrences of a sample per epoch, without padding."""
        whole, share = self._repeats
        return int((whole + (share > 0)).max())

    def table(self, key: Words) -> "_BlockTable":
        """Build the block table of one epoch."""
        whole, _ = self._repeats
        parts = self._parts(_hash(key, np.array([0])))
        partial = np.flatnonzero(parts)
        segment = np.concatenate([np.repeat(np.arange(len(whole)), whole), partial])
        rounds = np.concatenate([np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole), whole[partial]])
        size = np.concatenate([self.sizes[segment[: len(segment) - len(partial)]], parts[partial]])
        order = np.argsort(_hash(_hash(key, np.array([1])), segment, rounds), kind="stable")
        return _BlockTable(np.concatenate([[0], np.cumsum(size[order])]), segment[order], rounds[order])

    def _parts(self, key: Words) -> Indices:
        """Return the number of samples that the fractional repeat takes from each segment.

        Rounding accumulates over a random sequence of the segments: the sum is the same in every epoch, and a segment
        with less than one sample is used in some epochs.
        """
        whole, share = self._repeats
        order = np.argsort(_hash(key, np.arange(len(share))), kind="stable")
        ends = (np.cumsum((share * self.sizes)[order]) + _SHARE // 2) // _SHARE
        if ends[-1] == 0 and not whole.any():
            ends[:] = 1  # an epoch has at least one sample
        parts = np.empty_like(ends)
        parts[order] = np.diff(ends, prepend=0)
        return parts


@dataclass(frozen=True)
class _BlockTable:
    """One epoch of one bucket: block i has the positions ``starts[i]`` to ``starts[i + 1]``, a segment and a round."""

    starts: Indices
    segment: Indices
    rounds: Indices


@dataclass(frozen=True)
class Picks:
    """The samples of a batch: the bucket, then segment, index in the segment and occurrence per sample."""

    epoch: int
    bucket: int
    segment: Indices
    index: Indices
    repeat: Indices


@dataclass(frozen=True)
class WindowRange:
    """The windows ``first`` to ``last`` of a bucket in an epoch. ``origin`` is the position of the batch that asked."""

    epoch: int
    bucket: int
    first: int
    last: int
    origin: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Order:
    """The sequence of global batches of a dataset, for every epoch."""

    seed: int
    buckets: tuple[BucketOrder, ...]
    _tables: dict[tuple[int, int], _BlockTable] = field(default_factory=dict, compare=False, repr=False)
    _last_position: dict[int, tuple[int, int, int]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def _counts(self) -> Indices:
        return np.array([bucket.num_batches for bucket in self.buckets], dtype=np.int64)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Global batches per epoch, the same in every epoch."""
        return int(self._counts.sum())

    @property
    def dropped(self) -> tuple[int, ...]:
        """Numbers of the buckets that are left out because they are too small."""
        return tuple(number for number, bucket in enumerate(self.buckets) if bucket.dropped)

    def position(self, step: int) -> tuple[int, int, int]:
        """Return (epoch, bucket, batch within the bucket) of the global batch of ``step``.

        Batch j of the n batches of a bucket gets the time (j + u) / n with its own random u in [0, 1), and steps are
        sorted by time. About ``time * n`` batches of each bucket, plus or minus one, precede any time. The batch of a
        step is therefore one of a few candidates per bucket; all batches before them precede the step, whatever u.
        """
        position = self._last_position.get(step)
        if position is None:
            self._last_position.clear()
            position = self._last_position[step] = self._find_position(step)
        return position

    def _find_position(self, step: int) -> tuple[int, int, int]:
        epoch, number = divmod(step, self.steps_per_epoch)
        if len(self.buckets) == 1:
            return epoch, 0, number
        counts = self._counts
        slack = len(self._counts) + 1
        pace = counts / self.steps_per_epoch
        low = np.clip(np.floor((number - slack) * pace).astype(np.int64) - 1, 0, counts)
        high = np.clip(np.ceil((number + slack) * pace).astype(np.int64) + 1, 0, counts)
        width = high - low
        bucket = np.repeat(np.arange(len(counts)), width)
        batch = np.arange(len(bucket)) + np.repeat(low - np.cumsum(width) + width, width)
        unit = _hash(_key(self.seed, "batches", epoch), bucket, batch) >> np.uint64(64 - _UNIT_BITS)
        time = (batch + unit / (1 << _UNIT_BITS)) / counts[bucket]
        chosen = np.lexsort((batch, bucket, time))[number - int(low.sum())]
        return epoch, int(bucket[chosen]), int(batch[chosen])

    def batch_size(self, step: int) -> int:
        """Return the number of samples in the global batch of ``step``."""
        return self.buckets[self.position(step)[1]].batch

    def picks(self, step: int, start: int = 0, stop: int | None = None) -> Picks:
        """Return the samples ``start`` to ``stop`` of the global batch of ``step``."""
        epoch, bucket, batch = self.position(step)
        bucket_order = self.buckets[bucket]
        table = self._table(epoch, bucket)
        positions = batch * bucket_order.batch + np.arange(
            start, bucket_order.batch if stop is None else stop, dtype=np.int64
        )
        lap, positions = np.divmod(positions, bucket_order.length)  # lap > 0: padding
        key = _key(self.seed, "samples", epoch, bucket)
        window, offset = np.divmod(positions, bucket_order.span)
        shuffled = permute(
            offset, np.minimum(bucket_order.span, bucket_order.length - window * bucket_order.span), _hash(key, window)
        )
        positions = window * bucket_order.span + shuffled
        block = np.searchsorted(table.starts, positions, side="right") - 1
        segment = table.segment[block]
        rounds = table.rounds[block]
        # rows are shuffled too: a fractional repeat takes other rows each epoch, and a window's edge splits a shard at
        # random
        index = permute(positions - table.starts[block], bucket_order.sizes[segment], _hash(key, segment, rounds))
        return Picks(epoch, bucket, segment, index, rounds + lap * bucket_order.most_repeats)

    def picks_by_segment(self, step: int, start: int, stop: int) -> Picks:
        """Return the samples ``start`` to ``stop`` of the global batch of ``step``, sorted by segment in each window.

        The set of a step's samples is that of `picks`. A range of them is in few segments, and equal ranges of the
        steps of a window are in about the same ones. Only the windows of the range are computed.
        """
        _, bucket, batch = self.position(step)
        bucket_order = self.buckets[bucket]
        origin = batch * bucket_order.batch
        first = max(0, bucket_order.window_edges(origin + start)[0] - origin)
        last = min(bucket_order.batch, bucket_order.window_edges(origin + stop - 1)[1] - origin)
        picks = self.picks(step, first, last)
        lap, position = np.divmod(origin + np.arange(first, last, dtype=np.int64), bucket_order.length)
        rows = np.lexsort((picks.segment, position // bucket_order.span, lap))[start - first : stop - first]
        return Picks(picks.epoch, picks.bucket, picks.segment[rows], picks.index[rows], picks.repeat[rows])

    def segments_of_share(self, windows: WindowRange, start: int, stop: int) -> Indices:
        """Return the segments in which `picks_by_segment` finds the samples ``start`` to ``stop`` in some windows.

        Exact where the batch contains a whole window. Where it is a part of the window, the share of its samples that
        precede a segment varies; the result covers two standard deviations.
        """
        bucket_order = self.buckets[windows.bucket]
        lap = (windows.origin + start) // bucket_order.length * bucket_order.length
        parts = []
        for number in range(windows.first, windows.last + 1):
            low = start / bucket_order.batch
            high = stop / bucket_order.batch
            margin = bucket_order.batch**-0.5
            if bucket_order.batch > bucket_order.span:
                edges = bucket_order.window_edges(lap + number * bucket_order.span)
                first = max(edges[0], windows.origin)
                last = min(edges[1], windows.origin + bucket_order.batch)
                low, high = ((windows.origin + at - first) / (last - first) for at in (start, stop))
                margin = 0.0 if (first, last) == edges else (last - first) ** -0.5
            parts.append(self._segments_between(windows, number, low - margin, high + margin))
        return np.unique(np.concatenate(parts))

    def _segments_between(self, windows: WindowRange, number: int, low: float, high: float) -> Indices:
        """Return the segments between two shares of a window's samples, sorted by segment."""
        table = self._table(windows.epoch, windows.bucket)
        bucket_order = self.buckets[windows.bucket]
        edges = bucket_order.window_edges(number * bucket_order.span)
        first = int(np.searchsorted(table.starts, edges[0], side="right")) - 1
        last = int(np.searchsorted(table.starts, edges[1], side="left"))
        order = np.argsort(table.segment[first:last], kind="stable")
        ends = np.cumsum(np.diff(np.clip(table.starts[first : last + 1], *edges))[order])
        start = np.searchsorted(ends, max(0.0, low) * ends[-1], side="right")
        stop = np.searchsorted(ends, min(1.0, high) * ends[-1], side="left")
        return table.segment[first:last][order][start : stop + 1]

    def windows_at(self, step: int, start: int = 0, stop: int | None = None) -> WindowRange:
        """Return the windows that contain the samples ``start`` to ``stop`` of ``step``."""
        epoch, bucket, batch = self.position(step)
        size = self.buckets[bucket].batch
        windows = self._windows(epoch, bucket, batch * size + start, batch * size + (stop or size))
        return replace(windows, origin=batch * size)

    def next_windows(self, step: int, start: int = 0, stop: int | None = None) -> WindowRange:
        """Return the windows that the bucket of ``step`` reads after that step.

        That is one window or, if a batch is longer than a window, the windows of the samples ``start`` to ``stop`` of
        the next batch, because a rank does not need the windows of the other ranks.
        """
        epoch, bucket, batch = self.position(step)
        bucket_order = self.buckets[bucket]
        first = (batch + 1) * bucket_order.batch
        if first >= bucket_order.length:
            epoch = epoch + 1
            first = 0
        is_long = bucket_order.batch > bucket_order.span
        last = first + (stop or bucket_order.batch if is_long else bucket_order.span)
        return replace(self._windows(epoch, bucket, first + is_long * start, last), origin=first)

    def _windows(self, epoch: int, bucket: int, first: int, last: int) -> WindowRange:
        """Return the windows of the positions ``first`` to ``last``; padding starts again at the epoch's beginning."""
        length = self.buckets[bucket].length
        span = self.buckets[bucket].span
        start = first // length * length
        return WindowRange(epoch, bucket, (first - start) // span, (min(last - start, length) - 1) // span)

    def segments_in(self, windows: WindowRange) -> Indices:
        """Return the segments of a range of windows."""
        table = self._table(windows.epoch, windows.bucket)
        span = self.buckets[windows.bucket].span
        edges = [windows.first * span, (windows.last + 1) * span - 1]
        start, stop = np.searchsorted(table.starts[:-1], edges, side="right") - 1
        return np.unique(table.segment[start : stop + 1])

    def _table(self, epoch: int, bucket: int) -> _BlockTable:
        if (epoch, bucket) not in self._tables:
            for old in [key for key in self._tables if abs(key[0] - epoch) > 1]:
                self._tables.pop(old, None)
            key = _key(self.seed, "blocks", epoch, bucket)
            self._tables[epoch, bucket] = self.buckets[bucket].table(key)
        return self._tables[epoch, bucket]


def rank_slice(batch: int, rank: int, world_size: int, micro: int, micro_batches: int) -> tuple[int, int]:
    """Return the range of a rank's micro-batch in a global batch, which the world size must divide."""
    assert batch % (world_size * micro_batches) == 0, (batch, world_size, micro_batches)
    share = batch // world_size
    size = share // micro_batches
    start = rank * share + micro * size
    return start, start + size


def rank_picks(
    order: Order, step: int, rank: int, world_size: int, micro: int, micro_batches: int, by_segment: bool = False
) -> Picks:
    """Return the samples of a rank's micro-batch; ``by_segment`` assigns those of a step to ranks by their segments."""
    part = rank_slice(order.batch_size(step), rank, world_size, micro, micro_batches)
    return order.picks_by_segment(step, *part) if by_segment else order.picks(step, *part)


def build_order(
    seed: int, buckets: Sequence[tuple[Sequence[Segment], int]], window: int = WINDOW, drop_small: bool = False
) -> Order:
    """Build an order from ``(segments, global batch)`` per bucket."""
    return Order(seed, tuple(BucketOrder(tuple(segments), batch, window, drop_small) for segments, batch in buckets))


def open_shards(window: int, buckets: int) -> int:
    """Return the number of shards that a process keeps open: twice the windows of all buckets, at most 512."""
    return min(512, max(2, 2 * window * buckets))
