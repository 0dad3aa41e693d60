"""The order of global batches is arithmetic, the same for every world size, without lost or duplicate samples."""

import tracemalloc
from collections import Counter
from hashlib import sha256
from itertools import product
from typing import Any

import numpy as np
import pytest

from sd3_light.data import order as order_module
from sd3_light.data.order import BucketOrder, Order, Picks, Segment, build_order, permute, rank_picks, rank_slice
from tests.cases import combinations

Row = tuple[int, int, int, int]
GOLDEN_PERMUTATION = [38, 933, 224, 936, 607, 803]
GOLDEN_POSITIONS = [(0, 0), (1, 0), (0, 1), (0, 2), (0, 3), (1, 1)]
GOLDEN_EPOCHS = "fd2b5bb22cc80966b02f24975e2f98c3302e413164a29fb05a81aedeee01d472"
GOLDEN_ROWS = [(0, 0, 14, 0), (0, 0, 7, 0), (0, 0, 35, 0), (0, 0, 29, 0)]


def rows(picks: Picks) -> list[Row]:
    """Return (bucket, segment, index, repeat) of each sample."""
    columns = (picks.segment.tolist(), picks.index.tolist(), picks.repeat.tolist())
    return [(picks.bucket, *row) for row in zip(*columns, strict=True)]


def epoch_rows(order: Order, epoch: int = 0) -> list[Row]:
    first = epoch * order.steps_per_epoch
    return [row for step in range(first, first + order.steps_per_epoch) for row in rows(order.picks(step))]


def samples(rows: list[Row]) -> list[tuple[int, int, int]]:
    return [row[:3] for row in rows]


def mixed() -> Order:
    """Two buckets and segments with different repeats; no size divides another."""
    return build_order(5, [([Segment(37), Segment(11, 2.0)], 8), ([Segment(23, 0.5), Segment(5)], 6)])


def permuted(size: int, key: int, positions: order_module.Indices | None = None) -> order_module.Indices:
    """Return a permutation of ``range(size)`` at all or some positions."""
    positions = np.arange(size) if positions is None else positions
    return permute(positions, np.full(len(positions), size), np.full(len(positions), key, dtype=np.uint64))


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 1023, 1025, 4096, 65_537])
def test_permutation_is_a_bijection(size: int) -> None:
    assert sorted(permuted(size, size).tolist()) == list(range(size))


def test_permutations_of_several_sizes_and_keys_at_once() -> None:
    sizes, keys = np.array([5, 1000, 5, 77, 1]), np.array([1, 2, 3, 1, 9], dtype=np.uint64)
    positions = np.array([4, 900, 4, 5, 0])
    each = zip(sizes, keys, positions, strict=True)
    alone = [permuted(int(size), int(key), np.array([at]))[0] for size, key, at in each]
    assert permute(positions, sizes, keys).tolist() == alone


def test_golden_values() -> None:
    """Fixed values: another network or hash would change the order of every resumed run."""
    assert permuted(1000, 7)[:6].tolist() == GOLDEN_PERMUTATION
    assert [mixed().position(step)[1:] for step in range(6)] == GOLDEN_POSITIONS
    assert rows(mixed().picks(13, 0, 4)) == GOLDEN_ROWS
    shards = [Segment(3, 0.4), Segment(5, 1.7), Segment(2), Segment(7, 0.1), Segment(1, 2.5), *[Segment(1, 0.25)] * 20]
    windowed = build_order(0, [(shards, 4), ([Segment(8)] * 40, 8)], window=4)
    whole = [epoch_rows(order, epoch) for order in (mixed(), windowed) for epoch in range(3)]
    assert sha256(repr(whole).encode()).hexdigest() == GOLDEN_EPOCHS


def test_an_epoch_sees_each_sample_repeats_times_apart_from_the_stated_padding() -> None:
    order = mixed()
    for epoch in range(3):
        result = epoch_rows(order, epoch)
        assert len(result) == sum(bucket.length + bucket.padding for bucket in order.buckets)
        real = _without_padding(order, epoch)
        counts = Counter(samples(real))
        assert {counts[0, 0, index] for index in range(37)} == {1}
        assert {counts[0, 1, index] for index in range(11)} == {2}
        assert {counts[1, 1, index] for index in range(5)} == {1}
        half = [counts[1, 0, index] for index in range(23)]
        assert max(half) == 1
        assert sum(half) == 12  # 11.5, rounded


def _without_padding(order: Order, epoch: int) -> list[Row]:
    """Return the rows of an epoch per bucket, without the padding of the last batches."""
    by_batch = {}
    for step in range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch):
        at, bucket, batch = order.position(step)
        assert at == epoch
        assert (bucket, batch) not in by_batch, "duplicate batch"
        by_batch[bucket, batch] = rows(order.picks(step))
    real = []
    for number, bucket_order in enumerate(order.buckets):
        own = [row for batch in range(bucket_order.num_batches) for row in by_batch[number, batch]]
        real += own[: bucket_order.length]
    return real


def test_numbers_of_a_bucket() -> None:
    bucket = BucketOrder((Segment(10), Segment(3, 1.5)), 8)
    assert (bucket.length, bucket.num_batches, bucket.padding) == (15, 2, 1), "14.5, rounded"
    assert BucketOrder((Segment(16),), 8).padding == 0
    assert BucketOrder((Segment(1, 0.1),), 8).length == 1, "at least one"
    assert BucketOrder((Segment(1, 0.1),) * 20, 8).length == 2, "rounded over the bucket, not shard by shard"


LAYOUTS: dict[str, list[list[Segment]]] = {
    "one shard": [[Segment(61)]],
    "three buckets": [[Segment(40), Segment(9)], [Segment(17)], [Segment(3)]],
    "repeats": [[Segment(12, 2.0), Segment(7, 0.5), Segment(5, 1.25)], [Segment(11, 1.5), Segment(2, 0.3)]],
}
SHAPES = list(product((1, 2, 3, 4, 8), (1, 2, 5), (1, 2, 3), LAYOUTS, (1, 2)))
"""(ranks, micro-batch, accumulation, layout, workers)"""


def seen_by_world(order: Order, first: int, last: int, ranks: int, accumulation: int, workers: int) -> list[Row]:
    """Return what all ranks read in some steps, in the order of the global batches; each worker has its own order."""
    seen: dict[tuple[int, int, int], list[Row]] = {}
    for worker in range(workers):
        own = Order(order.seed, order.buckets)
        for step in range(first, last):
            micros = [micro for micro in range(accumulation) if (step * accumulation + micro) % workers == worker]
            whole = rows(own.picks(step)) if micros else []
            for rank, micro in product(range(ranks), micros):
                part = rank_slice(own.batch_size(step), rank, ranks, micro, accumulation)
                seen[step, rank, micro] = whole[slice(*part)]
    return [row for key in sorted(seen) for row in seen[key]]


def check_coverage(order: Order, result: list[Row]) -> None:
    """Assert that every sample occurs as often as its repeats say, plus the stated padding."""
    assert len(result) == len(set(result)), "duplicate occurrence"
    for number, plan in enumerate(order.buckets):
        own = [row for row in result if row[0] == number]
        assert len(own) == plan.length + plan.padding
        counts = Counter((segment, index) for _, segment, index, repeat in own if repeat < plan.most_repeats)
        assert sum(counts.values()) == plan.length
        for at, segment in enumerate(plan.segments):
            times = [counts[at, index] for index in range(segment.size)]
            assert min(times) >= int(segment.repeats)
            assert max(times) <= -(-segment.repeats // 1)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    combinations(
        (1, 2, 3, 4, 8),
        LAYOUTS,
        fast=[
            (1, "repeats"),
            (2, "three buckets"),
            (3, "one shard"),
            (3, "repeats"),
            (8, "three buckets"),
            (8, "repeats"),
        ],
    ),
)
def test_epoch_coverage_and_resume_with_another_world(ranks: int, layout: str) -> None:
    """For every world size an epoch covers the data, and resuming with other processes and workers changes nothing."""
    for _, micro, accumulation, _, workers in (shape for shape in SHAPES if (shape[0], shape[3]) == (ranks, layout)):
        batch = ranks * micro * accumulation
        order = build_order(4, [(segments, batch) for segments in LAYOUTS[layout]], window=2)
        steps = order.steps_per_epoch
        whole = seen_by_world(order, steps, 2 * steps, ranks, accumulation, workers)
        check_coverage(order, whole)
        stop = steps + steps // 2
        # the same global batch in one process, or on as many processes as it has samples
        for other, pieces in ((1, 1), (batch, 1), (1, batch)):
            before = seen_by_world(order, steps, stop, ranks, accumulation, workers)
            after = seen_by_world(order, stop, 2 * steps, other, pieces, 3 - workers)
            assert before + after == whole


def test_a_world_size_that_does_not_divide_the_batch_is_rejected() -> None:
    with pytest.raises(AssertionError):
        rank_slice(24, 0, 5, 0, 1)
    with pytest.raises(AssertionError):
        rank_slice(24, 0, 4, 0, 4)


def test_ten_million_samples_and_512_ranks_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, micro, hashed = 512, 64, 0
    real = order_module._hash

    def counted(*args: Any) -> Any:
        nonlocal hashed
        numbers = real(*args)
        hashed += numbers.size
        return numbers

    monkeypatch.setattr(order_module, "_hash", counted)
    tracemalloc.start()
    sizes = [(10_000, 1.0), (6_000, 1.0), (4_000, 1.5)]  # ten million samples in 20,000 shards and three buckets
    order = build_order(0, [([Segment(500, repeats)] * count, ranks * micro) for count, repeats in sizes])
    assert sum(bucket.length for bucket in order.buckets) == 11_000_000
    for step in (0, 5, 100, order.steps_per_epoch + 7):
        for rank in (0, 255, 511):
            assert len(order.picks(step, *rank_slice(ranks * micro, rank, ranks, 0, 1)).index) == micro
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 10_000 < hashed < 100_000, "a few numbers per shard, not per sample"
    assert peak < 12_000_000, "one row per shard, not per sample"


def test_only_the_tables_of_neighbouring_epochs_are_kept() -> None:
    order = mixed()
    for step in range(6 * order.steps_per_epoch):
        order.picks(step)
    assert {epoch for epoch, _ in order._tables} == {4, 5}
    order.picks(0)
    assert {epoch for epoch, _ in order._tables} == {0}


def test_consecutive_steps_read_few_shards() -> None:
    """The steps of two windows of samples read the shards of at most three windows, however many shards exist."""
    window, size, batch = 4, 32, 16
    order = build_order(2, [([Segment(size)] * 200, batch)], window)
    stretch = 2 * window * size // batch
    for first in range(0, order.steps_per_epoch - stretch, 7):
        touched = {segment for step in range(first, first + stretch) for segment in order.picks(step).segment.tolist()}
        assert len(touched) <= 3 * window + 1
    assert len({segment for step in range(stretch) for segment in order.picks(step).segment.tolist()}) >= 2 * window


@pytest.mark.parametrize("batch", [4, 10, 35, 100])
def test_next_windows_contain_the_shards_of_the_next_steps(batch: int) -> None:
    """For batches shorter and longer than a window, a step reads only predicted shards, which are not all shards."""
    order = build_order(1, [([Segment(10)] * 30, batch), ([Segment(7)] * 9, batch)], window=3)
    predicted: dict[int, set[int]] = {}
    for step in range(3 * order.steps_per_epoch):
        picks = order.picks(step)
        read = set(picks.segment.tolist())
        reading = set(order.segments_in(order.windows_at(step)).tolist())
        if picks.repeat.max() == 0:  # padding repeats the epoch's beginning
            assert read <= reading
            assert read <= predicted.get(picks.bucket, read)
        windows = order.next_windows(step)
        assert windows.bucket == picks.bucket
        assert windows.epoch - picks.epoch in (0, 1)
        segments = order.segments_in(windows)
        predicted[windows.bucket] = set(segments.tolist())
        assert len(segments) <= 2 * 3 + batch / 7 + 4


def test_open_shards_follow_the_window() -> None:
    assert [order_module.open_shards(*numbers) for numbers in [(16, 1), (4, 3), (16, 100)]] == [32, 24, 512]


COUNTS = [(1,), (7,), (1, 1), (1, 500), (3, 5, 7), (100, 1, 1, 40), (2,) * 30, tuple(range(1, 25)), (0, 4, 9)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_batch_has_one_step_and_batches_of_a_bucket_come_in_sequence(counts: tuple[int, ...]) -> None:
    order = build_order(3, [([Segment(max(1, 2 * count))], 2 if count else 4) for count in counts], drop_small=True)
    assert [bucket.num_batches for bucket in order.buckets] == list(counts)
    for epoch in range(3):
        first = epoch * order.steps_per_epoch
        positions = [order.position(step) for step in range(first, first + order.steps_per_epoch)]
        assert {at for at, _, _ in positions} == {epoch}
        for bucket, count in enumerate(counts):
            assert [batch for _, number, batch in positions if number == bucket] == list(range(count))


def test_position_agrees_with_sorting_all_batches() -> None:
    """The few candidates contain the right batch: sorting the whole list by time gives the same result."""
    bits, order = order_module._UNIT_BITS, build_order(9, [([Segment(size)], 3) for size in (300, 31, 2, 90, 600)])
    for epoch in range(3):
        timed = []
        for bucket, plan in enumerate(order.buckets):
            batches = np.arange(plan.num_batches)
            key = order_module._key(9, "batches", epoch)
            words = order_module._hash(key, np.full(len(batches), bucket), batches)
            times = (batches + (words >> np.uint64(64 - bits)) / 2**bits) / plan.num_batches
            timed += [(time, bucket, batch) for batch, time in enumerate(times.tolist())]
        first = epoch * order.steps_per_epoch
        positions = [order.position(step)[1:] for step in range(first, first + order.steps_per_epoch)]
        assert positions == [(bucket, batch) for _, bucket, batch in sorted(timed)]


def test_small_buckets_can_be_dropped_and_are_listed() -> None:
    buckets = [([Segment(7)], 8), ([Segment(20)], 8), ([Segment(3, 2.0)], 8), ([Segment(4, 2.0)], 8)]
    order = build_order(0, buckets, drop_small=True)
    assert order.dropped == (0, 2)
    assert [bucket.num_batches for bucket in order.buckets] == [0, 3, 0, 1]
    assert [bucket.padding for bucket in order.buckets] == [0, 4, 0, 0]
    assert {bucket for bucket, *_ in epoch_rows(order)} == {1, 3}
    assert build_order(0, buckets).dropped == ()


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [1, 2, 16])
def test_ranks_by_segment_share_the_samples_of_each_step(layout: str, world: int, window: int) -> None:
    order = build_order(4, [(segments, 16) for segments in LAYOUTS[layout]], window)
    for step in range(2 * order.steps_per_epoch):
        parts = [rank_picks(order, step, rank, world, micro, 2, True) for rank in range(world) for micro in (0, 1)]
        joined = [np.concatenate([getattr(part, name) for part in parts]) for name in ("segment", "index", "repeat")]
        whole = order.picks(step)
        expected = zip(whole.segment.tolist(), whole.index.tolist(), whole.repeat.tolist(), strict=True)
        assert sorted(zip(*(column.tolist() for column in joined), strict=True)) == sorted(expected)
        assert {part.epoch for part in parts} == {whole.epoch}


def reading(order: Order, world: int, by_segment: bool) -> tuple[float, float]:
    """Return the samples in the shards that a rank reads or prefetches, per sample that it uses, and the share
    of its reads that were prefetched."""
    plan, rank = order.buckets[0], world // 2
    share = rank_slice(plan.batch, rank, world, 0, 1)
    known, read, hits = set[int](), set[int](), []
    for step in range(order.steps_per_epoch):
        segments = set(rank_picks(order, step, rank, world, 0, 1, by_segment).segment.tolist())
        hits += [segment in known for segment in segments if step]
        read |= segments
        ahead = order.next_windows(step, *share)
        known |= set((order.segments_of_share(ahead, *share) if by_segment else order.segments_in(ahead)).tolist())
    used = order.steps_per_epoch * (share[1] - share[0])
    return len(read | known) * int(plan.sizes[0]) / used, float(np.mean(hits))


@pytest.mark.parametrize(("world", "batch"), [(8, 1024), (64, 16384)], ids=["window", "batch longer than a window"])
def test_a_rank_by_segment_reads_few_shards_and_prefetches_them(world: int, batch: int) -> None:
    order = build_order(7, [([Segment(256)] * 640, batch)], window=16)
    plain, by_segment = (reading(order, world, way) for way in (False, True))
    assert plain[0] > 7
    assert by_segment[0] < 3
    assert by_segment[1] > 0.95
