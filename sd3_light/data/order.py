"""Law 2: order is arithmetic, with locality.

``(seed, epoch, shard sizes, global batch) -> the sequence of global batches`` is a pure function. A rank computes its
slice of one step and nothing else, and the only state is the number of the step. An epoch of a bucket is made so:

1. Its blocks, one for each shard and round of its repeats, are put in a random order.
2. The row of places so made is cut into windows, each as long as ``window`` of the bucket's largest shards.
3. Inside a window a keyed bijection (a Feistel network, cycle-walked into range) mixes all places.
4. Batches are taken from the row in sequence; batches of several buckets interleave evenly over the epoch.

So a step reads from about ``window`` shards a bucket, which the next steps read too, however large the data set is.
The randomness given up: two samples of one shard fall into one window of an epoch (or two neighbouring ones), so they
are seen within some ``window`` shards' worth of steps of each other. Which shards share a window is drawn anew every
epoch, and a window as long as the epoch is a shuffle of the whole bucket.

Only tables of a shard a row are built, for the epochs at hand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

WINDOW = 16
_ROUNDS = 8  # with fewer, orders of 3 to 10 are not quite evenly drawn
_UNIT_BITS = 24  # a batch number plus a fraction of so many bits is exact in a double
_SHARE = 1 << 30  # fractional repeats are counted in this part of an occurrence: integers add up in any order
_STEP = 0x9E3779B97F4A7C15  # splitmix64's: odd, so that its multiples are all different


def permute(places: Indices, sizes: Indices, keys: Words) -> Indices:
    """What stands at each place of a pseudo-random order of ``range(size)``, each with its own size and key.

    For one size and key this is a bijection, evaluated at any places without the others.
    """
    values, bounds = places.astype(np.uint64), sizes.astype(np.uint64)
    side = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    round_keys = _hash(keys, np.arange(_ROUNDS)[:, None])
    values = _network(values, side, round_keys)
    # the network permutes a square number; values outside the range walk on until they fall inside
    while len(outside := np.flatnonzero(values >= bounds)):
        values[outside] = _network(values[outside], side[outside], round_keys[:, outside])
    return values.astype(np.int64)


def _network(values: Words, side: Words, round_keys: Words) -> Words:
    """A Feistel network over pairs of numbers below ``side``."""
    left, right = np.divmod(values, side)
    for key in round_keys:
        left, right = right, (left + _mix(right ^ key) % side) % side
    return left * side + right


def _mix(x: Words) -> Words:
    """The finaliser of splitmix64: every input bit changes every output bit with probability about one half."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(key: Words, *numbers: Indices) -> Words:
    """A word from a key and whole numbers, elementwise."""
    for number in numbers:
        key = _mix(key + (number.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP))
    return key


def _key(*words: int | str) -> Words:
    digest = blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


@dataclass(frozen=True, slots=True)
class Segment:
    """Samples of one bucket that lie together and share a repeat count: ``size`` samples, each ``repeats`` times an
    epoch. In a cache it is a shard."""

    size: int
    repeats: float = 1.0


@dataclass(frozen=True)
class BucketOrder:
    """One bucket: its segments, how many samples a global batch of it has, and how many segments a window mixes.

    With ``drop_small`` a bucket that has fewer occurrences than a batch has no batches at all.
    """

    segments: tuple[Segment, ...]
    batch: int
    window: int = WINDOW
    drop_small: bool = False

    @cached_property
    def sizes(self) -> Indices:
        """Samples of each segment."""
        return np.array([segment.size for segment in self.segments], dtype=np.int64)

    @cached_property
    def _repeats(self) -> tuple[Indices, Indices]:
        """Whole repeats of each segment, and what is left in parts of ``_SHARE``."""
        repeats = np.array([segment.repeats for segment in self.segments])
        whole = np.floor(repeats)
        return whole.astype(np.int64), np.rint((repeats - whole) * _SHARE).astype(np.int64)

    @cached_property
    def length(self) -> int:
        """Occurrences in an epoch, padding not counted; fractions are rounded over the whole bucket."""
        whole, share = self._repeats
        parts = (int((share * self.sizes).sum()) + _SHARE // 2) // _SHARE
        return max(1, int((whole * self.sizes).sum()) + parts)

    @property
    def dropped(self) -> bool:
        """Whether the bucket is left out because it is too small."""
        return self.drop_small and self.length < self.batch

    @property
    def num_batches(self) -> int:
        """Global batches in an epoch; the last is padded by occurrences from the epoch's beginning."""
        return 0 if self.dropped else -(-self.length // self.batch)

    @property
    def padding(self) -> int:
        """Occurrences repeated to fill the last batch."""
        return 0 if self.dropped else self.num_batches * self.batch - self.length

    @cached_property
    def span(self) -> int:
        """Places of a window."""
        return self.window * int(self.sizes.max())

    def within(self, first: int, last: int) -> tuple[int, int]:
        """The places ``first`` to ``last`` up to the epoch's end; those that begin after it are from its beginning."""
        laps = first // self.length * self.length
        return first - laps, min(last - laps, self.length)

    @cached_property
    def most_repeats(self) -> int:
        """How often a sample comes in an epoch at most, padding not counted."""
        whole, share = self._repeats
        return int((whole + (share > 0)).max())

    def table(self, key: Words) -> "_Table":
        """The blocks of one epoch in their order."""
        whole, _ = self._repeats
        parts = self._parts(_hash(key, np.array([0])))
        some = np.flatnonzero(parts)
        segment = np.concatenate([np.repeat(np.arange(len(whole)), whole), some])
        rounds = np.concatenate([np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole), whole[some]])
        size = np.concatenate([self.sizes[segment[: len(segment) - len(some)]], parts[some]])
        at = np.argsort(_hash(_hash(key, np.array([1])), segment, rounds), kind="stable")
        return _Table(np.concatenate([[0], np.cumsum(size[at])]), segment[at], rounds[at])

    def _parts(self, key: Words) -> Indices:
        """Samples that the fractional round takes of each segment.

        Rounding runs on over a random sequence of the segments: the sum is the same in every epoch, and a segment
        whose own share is below one sample has its turn in some.
        """
        whole, share = self._repeats
        order = np.argsort(_hash(key, np.arange(len(share))), kind="stable")
        ends = (np.cumsum((share * self.sizes)[order]) + _SHARE // 2) // _SHARE
        if ends[-1] == 0 and not whole.any():
            ends[:] = 1  # an epoch of nothing is none: one sample of the first
        parts = np.empty_like(ends)
        parts[order] = np.diff(ends, prepend=0)
        return parts


@dataclass(frozen=True)
class _Table:
    """One epoch of one bucket: block i has the places ``starts[i]`` to ``starts[i + 1]``, a segment and a round."""

    starts: Indices
    segment: Indices
    rounds: Indices


@dataclass(frozen=True)
class Picks:
    """Which samples make a batch: bucket, then for each sample its segment, its index there and its occurrence."""

    epoch: int
    bucket: int
    segment: Indices
    index: Indices
    repeat: Indices

    def part(self, start: int, stop: int) -> "Picks":
        """A contiguous slice, such as a rank's share."""
        cut = slice(start, stop)
        return Picks(self.epoch, self.bucket, self.segment[cut], self.index[cut], self.repeat[cut])


@dataclass(frozen=True)
class WindowRange:
    """Windows ``first`` to ``last`` of a bucket in an epoch."""

    epoch: int
    bucket: int
    first: int
    last: int


@dataclass(frozen=True)
class Order:
    """The sequence of global batches of a data set, for every epoch."""

    seed: int
    buckets: tuple[BucketOrder, ...]
    _tables: dict[tuple[int, int], _Table] = field(default_factory=dict, compare=False, repr=False)
    _last_place: dict[int, tuple[int, int, int]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def _counts(self) -> Indices:
        return np.array([bucket.num_batches for bucket in self.buckets], dtype=np.int64)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch, the same in every epoch."""
        return int(self._counts.sum())

    @property
    def dropped(self) -> tuple[int, ...]:
        """Numbers of the buckets that are left out because they are smaller than a batch."""
        return tuple(number for number, bucket in enumerate(self.buckets) if bucket.dropped)

    def position(self, step: int) -> tuple[int, int, int]:
        """(epoch, bucket, batch within the bucket) of the global batch that step ``step`` trains on.

        Batch j of a bucket's n has the time (j + u) / n with its own random u in [0, 1), and steps follow time. So of
        each bucket about ``time * n`` batches lie before any time, give or take one, and the batch of a step is found
        among a few candidates of each bucket: all that come before them are before the step, whatever their u.
        """
        found = self._last_place.get(step)
        if found is None:
            self._last_place.clear()
            found = self._last_place[step] = self._find_place(step)
        return found

    def _find_place(self, step: int) -> tuple[int, int, int]:
        epoch, at = divmod(step, self.steps_per_epoch)
        if len(self.buckets) == 1:
            return epoch, 0, at
        counts, slack = self._counts, len(self._counts) + 1
        pace = counts / self.steps_per_epoch
        low = np.clip(np.floor((at - slack) * pace).astype(np.int64) - 1, 0, counts)
        high = np.clip(np.ceil((at + slack) * pace).astype(np.int64) + 1, 0, counts)
        width = high - low
        bucket = np.repeat(np.arange(len(counts)), width)
        batch = np.arange(len(bucket)) + np.repeat(low - np.cumsum(width) + width, width)
        unit = _hash(_key(self.seed, "batches", epoch), bucket, batch) >> np.uint64(64 - _UNIT_BITS)
        time = (batch + unit / (1 << _UNIT_BITS)) / counts[bucket]
        chosen = np.lexsort((batch, bucket, time))[at - int(low.sum())]
        return epoch, int(bucket[chosen]), int(batch[chosen])

    def batch_size(self, step: int) -> int:
        """Samples in the global batch of ``step``."""
        return self.buckets[self.position(step)[1]].batch

    def picks(self, step: int, start: int = 0, stop: int | None = None) -> Picks:
        """The samples ``start`` to ``stop`` of the global batch of ``step``."""
        epoch, bucket, batch = self.position(step)
        plan, table = self.buckets[bucket], self._table(epoch, bucket)
        places = batch * plan.batch + np.arange(start, plan.batch if stop is None else stop, dtype=np.int64)
        lap, places = np.divmod(places, plan.length)  # lap > 0: padding
        key = _key(self.seed, "samples", epoch, bucket)
        window, offset = np.divmod(places, plan.span)
        mixed = permute(offset, np.minimum(plan.span, plan.length - window * plan.span), _hash(key, window))
        places = window * plan.span + mixed
        block = np.searchsorted(table.starts, places, side="right") - 1
        segment, rounds = table.segment[block], table.rounds[block]
        # rows are shuffled too: a fractional round takes others each epoch, and a window's edge parts a shard by chance
        index = permute(places - table.starts[block], plan.sizes[segment], _hash(key, segment, rounds))
        return Picks(epoch, bucket, segment, index, rounds + lap * plan.most_repeats)

    def segments_at(self, step: int, start: int = 0, stop: int | None = None) -> Indices:
        """The segments of the windows that the samples ``start`` to ``stop`` of ``step`` come from."""
        epoch, bucket, batch = self.position(step)
        plan = self.buckets[bucket]
        first, last = plan.within(batch * plan.batch + start, batch * plan.batch + (stop or plan.batch))
        return self._in_windows(epoch, bucket, first, last)

    def next_windows(self, step: int, start: int = 0, stop: int | None = None) -> WindowRange:
        """What the bucket of ``step`` reads after that step: a window ahead or, where a batch is longer than that, what
        the samples ``start`` to ``stop`` of the next batch come from. Whoever reads a share of a long batch has no use
        for the others' windows."""
        epoch, bucket, batch = self.position(step)
        plan = self.buckets[bucket]
        first = (batch + 1) * plan.batch
        if first >= plan.length:
            epoch, first = epoch + 1, 0
        own = plan.batch > plan.span
        first, last = plan.within(first + own * start, first + (stop or plan.batch if own else plan.span))
        return WindowRange(epoch, bucket, first // plan.span, (last - 1) // plan.span)

    def segments_in(self, windows: WindowRange) -> Indices:
        """The segments of some windows."""
        span = self.buckets[windows.bucket].span
        return self._in_windows(windows.epoch, windows.bucket, windows.first * span, windows.last * span + 1)

    def _in_windows(self, epoch: int, bucket: int, first: int, last: int) -> Indices:
        """The segments of the windows that hold the places ``first`` to ``last``."""
        table, span = self._table(epoch, bucket), self.buckets[bucket].span
        edges = [first // span * span, -(-last // span) * span - 1]
        start, stop = np.searchsorted(table.starts[:-1], edges, side="right") - 1
        return np.unique(table.segment[start : stop + 1])

    def _table(self, epoch: int, bucket: int) -> _Table:
        if (epoch, bucket) not in self._tables:
            for old in [key for key in self._tables if abs(key[0] - epoch) > 1]:
                self._tables.pop(old, None)
            key = _key(self.seed, "blocks", epoch, bucket)
            self._tables[epoch, bucket] = self.buckets[bucket].table(key)
        return self._tables[epoch, bucket]


def rank_slice(batch: int, rank: int, world: int, micro: int, micro_batches: int) -> tuple[int, int]:
    """Where rank ``rank``'s micro-batch number ``micro`` lies in a global batch; any world that divides it fits."""
    assert batch % (world * micro_batches) == 0, (batch, world, micro_batches)
    share = batch // world
    size = share // micro_batches
    start = rank * share + micro * size
    return start, start + size


def make_order(
    seed: int, buckets: Sequence[tuple[Sequence[Segment], int]], window: int = WINDOW, drop_small: bool = False
) -> Order:
    """An order over ``(segments, global batch)`` of each bucket."""
    return Order(seed, tuple(BucketOrder(tuple(segments), batch, window, drop_small) for segments, batch in buckets))


def open_shards(window: int, buckets: int) -> int:
    """Shards that a process keeps open: twice the windows of all buckets, as they may straddle two; at most 512."""
    return min(512, max(2, 2 * window * buckets))
