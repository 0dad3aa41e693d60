"""Law 2: order is arithmetic.

``(seed, epoch, buckets) -> the sequence of global batches`` as a pure function. Nothing is materialised: a keyed
bijection (a Feistel network, cycle-walked into range) answers "which sample stands at place i" for any i alone, so a
rank computes its own slice of one step and nothing else. The only state is the number of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_ROUNDS = 6


class Permutation:
    """A pseudo-random bijection of ``range(size)`` keyed by ``words``, evaluated at any places without the others."""

    def __init__(self, size: int, *words: int | str) -> None:
        assert size > 0, size
        self.size = size
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        digest = blake2b("/".join(map(str, words)).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype=np.uint64)

    def __call__(self, places: Indices) -> Indices:
        """What stands at the given places."""
        values = self._walk_once(places.astype(np.uint64))
        # the network permutes a power of four; values outside the range walk on until they fall inside
        while (outside := values >= self.size).any():
            values[outside] = self._walk_once(values[outside])
        return values.astype(np.int64)

    def _walk_once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every input bit changes every output bit with probability about one half."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Segment:
    """Samples of one bucket that share a repeat count: ``size`` samples, each ``repeats`` times an epoch."""

    size: int
    repeats: float = 1.0

    @property
    def length(self) -> int:
        """Occurrences in an epoch; a fractional repeat is rounded to whole occurrences."""
        return max(1, round(self.size * self.repeats))


@dataclass(frozen=True)
class BucketOrder:
    """One bucket: its segments, and how many samples one global batch of it has."""

    segments: tuple[Segment, ...]
    batch: int

    @cached_property
    def length(self) -> int:
        """Occurrences in an epoch, padding not counted."""
        return sum(segment.length for segment in self.segments)

    @property
    def num_batches(self) -> int:
        """Global batches in an epoch; the last is padded by occurrences from the epoch's beginning."""
        return -(-self.length // self.batch)

    @property
    def padding(self) -> int:
        """Occurrences repeated to fill the last batch."""
        return self.num_batches * self.batch - self.length


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
class Order:
    """The sequence of global batches of a data set, for every epoch."""

    seed: int
    buckets: tuple[BucketOrder, ...]

    @cached_property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch, the same in every epoch."""
        return sum(bucket.num_batches for bucket in self.buckets)

    @cached_property
    def _first_batch(self) -> Indices:
        return np.cumsum([0, *(bucket.num_batches for bucket in self.buckets)])

    def place(self, step: int) -> tuple[int, int, int]:
        """(epoch, bucket, batch within the bucket) of the global batch that step ``step`` trains on."""
        epoch, at = divmod(step, self.steps_per_epoch)
        shuffled = int(Permutation(self.steps_per_epoch, self.seed, "batches", epoch)(np.array([at]))[0])
        bucket = int(np.searchsorted(self._first_batch, shuffled, side="right")) - 1
        return epoch, bucket, shuffled - int(self._first_batch[bucket])

    def batch_size(self, step: int) -> int:
        """Samples in the global batch of ``step``."""
        return self.buckets[self.place(step)[1]].batch

    def picks(self, step: int, start: int = 0, stop: int | None = None) -> Picks:
        """The samples ``start`` to ``stop`` of the global batch of ``step``."""
        epoch, bucket, batch = self.place(step)
        plan = self.buckets[bucket]
        places = batch * plan.batch + np.arange(start, plan.batch if stop is None else stop, dtype=np.int64)
        lap, places = np.divmod(places, plan.length)  # lap > 0: padding
        virtual = Permutation(plan.length, self.seed, "samples", epoch, bucket)(places)
        return self._locate(epoch, bucket, virtual, lap)

    def _locate(self, epoch: int, bucket: int, virtual: Indices, lap: Indices) -> Picks:
        segments = self.buckets[bucket].segments
        starts = np.cumsum([0, *(segment.length for segment in segments)])
        which = np.searchsorted(starts, virtual, side="right") - 1
        sizes = np.array([segment.size for segment in segments])[which]
        repeat, index = np.divmod(virtual - starts[which], sizes)
        for number in np.unique(which):
            # with a fractional repeat the last round takes a part of the samples, another part each epoch
            own = which == number
            shuffle = Permutation(segments[number].size, self.seed, "round", epoch, bucket, int(number))
            index[own] = shuffle(index[own])
        most = max(-(-segment.length // segment.size) for segment in segments)
        return Picks(epoch, bucket, which.astype(np.int64), index, repeat + lap * most)


def rank_slice(batch: int, rank: int, world: int, micro: int, micro_batches: int) -> tuple[int, int]:
    """Where rank ``rank``'s micro-batch number ``micro`` lies in a global batch; any world that divides it fits."""
    assert batch % (world * micro_batches) == 0, (batch, world, micro_batches)
    share = batch // world
    size = share // micro_batches
    start = rank * share + micro * size
    return start, start + size


def make_order(seed: int, buckets: Sequence[tuple[Sequence[Segment], int]]) -> Order:
    """An order over ``(segments, global batch)`` of each bucket."""
    return Order(seed, tuple(BucketOrder(tuple(segments), batch) for segments, batch in buckets))
