"""Law 2: the order of global batches is arithmetic, the same in every world, and no sample is lost or doubled."""

import time
import tracemalloc
from collections import Counter
from itertools import product

import numpy as np
import pytest

from sd3_light.data.order import BucketOrder, Order, Permutation, Picks, Segment, make_order, rank_slice

Row = tuple[int, int, int, int]
GOLDEN_PERMUTATION = [82, 550, 825, 38, 86, 29]


def rows(picks: Picks) -> list[Row]:
    """(bucket, segment, index, repeat) of each sample."""
    columns = (picks.segment.tolist(), picks.index.tolist(), picks.repeat.tolist())
    return [(picks.bucket, *row) for row in zip(*columns, strict=True)]


def epoch_rows(order: Order, epoch: int = 0) -> list[Row]:
    first = epoch * order.steps_per_epoch
    return [row for step in range(first, first + order.steps_per_epoch) for row in rows(order.picks(step))]


def samples(found: list[Row]) -> list[tuple[int, int, int]]:
    return [row[:3] for row in found]


def mixed() -> Order:
    """Two buckets, segments with other repeats, nothing divides anything."""
    return make_order(5, [([Segment(37), Segment(11, 2.0)], 8), ([Segment(23, 0.5), Segment(5)], 6)])


# --- the permutation ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 1023, 1025, 4096, 65_537])
def test_permutation_is_a_bijection(size: int) -> None:
    found = Permutation(size, "key", size)(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))


def test_permutation_of_ten_million_takes_no_table() -> None:
    size = 10_000_000
    tracemalloc.start()
    places = np.arange(0, size, 9973)
    found = Permutation(size, "big")(places)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(found.tolist())) == len(places)
    assert (found >= 0).all()
    assert (found < size).all()
    assert peak < 2_000_000, "a table of ten million would take 80 MB"


def test_permutation_answers_any_place_alone_and_leaves_its_input() -> None:
    permutation = Permutation(1000, 1, "a")
    places = np.arange(1000)
    whole = permutation(places)
    assert places.tolist() == list(range(1000))
    for at in (0, 1, 500, 999):
        assert permutation(np.array([at]))[0] == whole[at]


@pytest.mark.parametrize("size", [3, 10, 50, 100])
def test_permutation_is_roughly_uniform(size: int) -> None:
    """Over many keys every value stands at every place about equally often."""
    keys = 1500
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), Permutation(size, "uniform", key)(np.arange(size))] += 1
    expected = keys / size
    dof = (size - 1) ** 2
    chi = ((counts - expected) ** 2 / expected).sum()
    assert chi / dof < 1 + 5 * (2 / dof) ** 0.5


def test_permutation_mixes_neighbours() -> None:
    found = Permutation(100_000, "neighbours")(np.arange(100_000))
    assert abs(float(np.corrcoef(found[:-1], found[1:])[0, 1])) < 0.02
    assert (np.abs(np.diff(found)) == 1).mean() < 0.001
    assert abs(float(np.corrcoef(found, np.arange(100_000))[0, 1])) < 0.02


def test_permutation_depends_on_every_word_of_its_key() -> None:
    results = {
        tuple(Permutation(64, *words)(np.arange(64)).tolist())
        for words in [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]
    }
    assert len(results) == 4


def test_permutation_golden_values() -> None:
    """Written down once: another network would change the order of every run that is to be resumed."""
    assert Permutation(1000, 7, "samples", 2, 0)(np.arange(6)).tolist() == GOLDEN_PERMUTATION


# --- an epoch ----------------------------------------------------------------------------------


def test_an_epoch_sees_each_sample_exactly_once() -> None:
    order = make_order(0, [([Segment(96)], 8), ([Segment(40)], 4)])
    for epoch in range(3):
        assert sorted(samples(epoch_rows(order, epoch))) == [(0, 0, i) for i in range(96)] + [
            (1, 0, i) for i in range(40)
        ]


def test_an_epoch_sees_each_sample_repeats_times_apart_from_the_stated_padding() -> None:
    order = mixed()
    for epoch in range(3):
        found = epoch_rows(order, epoch)
        assert len(found) == sum(bucket.length + bucket.padding for bucket in order.buckets)
        real = _without_padding(order, epoch)
        counts = Counter(samples(real))
        assert {counts[0, 0, index] for index in range(37)} == {1}
        assert {counts[0, 1, index] for index in range(11)} == {2}
        assert {counts[1, 1, index] for index in range(5)} == {1}
        half = [counts[1, 0, index] for index in range(23)]
        assert max(half) == 1
        assert sum(half) == 12  # round(11.5)


def _without_padding(order: Order, epoch: int) -> list[Row]:
    """The rows of an epoch in the buckets' own order, the tail of each bucket's last batch cut off."""
    by_batch = {}
    for step in range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch):
        at, bucket, batch = order.place(step)
        assert at == epoch
        assert (bucket, batch) not in by_batch, "a batch came twice"
        by_batch[bucket, batch] = rows(order.picks(step))
    real = []
    for number, bucket_order in enumerate(order.buckets):
        own = [row for batch in range(bucket_order.num_batches) for row in by_batch[number, batch]]
        real += own[: bucket_order.length]
    return real


def test_no_occurrence_comes_twice_so_no_noise_does() -> None:
    """(sample, repeat) names the randomness: padding and repeats must differ in it."""
    order = make_order(3, [([Segment(3), Segment(2, 2.5)], 16), ([Segment(7, 3.0)], 8)])
    for epoch in range(4):
        found = epoch_rows(order, epoch)
        assert len(found) == len(set(found))


def test_every_epoch_has_another_order() -> None:
    order = make_order(0, [([Segment(64)], 8)])
    epochs = [samples(epoch_rows(order, epoch)) for epoch in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    for one, two in [(0, 1), (1, 2), (2, 3), (0, 3)]:
        same_place = sum(a == b for a, b in zip(epochs[one], epochs[two], strict=True))
        assert same_place < 10
    assert epochs[0] != sorted(epochs[0]), "the first epoch is shuffled too"


def test_every_epoch_mixes_its_segments_anew() -> None:
    """Batch by batch within the bucket: which directory a place is filled from changes too."""
    order = make_order(0, [([Segment(40), Segment(20, 1.5)], 10)])

    def segments(epoch: int) -> list[int]:
        return [segment for _, segment, _, _ in _without_padding(order, epoch)]

    assert segments(0) != segments(1)
    assert sorted(segments(0)) == sorted(segments(1)) == [0] * 40 + [1] * 30


def test_another_seed_has_another_order() -> None:
    buckets = [([Segment(64)], 8)]
    assert epoch_rows(make_order(0, buckets)) != epoch_rows(make_order(1, buckets))
    assert epoch_rows(make_order(1, buckets)) == epoch_rows(make_order(1, buckets))


def test_consecutive_steps_see_different_samples() -> None:
    """The earlier loader began anew each step and trained on one global batch for ever."""
    order = make_order(0, [([Segment(1000)], 10)])
    seen: set[tuple[int, int, int]] = set()
    for step in range(order.steps_per_epoch):
        batch = samples(rows(order.picks(step)))
        assert not seen & set(batch)
        seen |= set(batch)
    assert len(seen) == 1000


def test_a_batch_comes_from_one_bucket_and_buckets_are_mixed() -> None:
    order = make_order(0, [([Segment(80)], 4), ([Segment(80)], 8)])
    order_of_buckets = [order.picks(step).bucket for step in range(order.steps_per_epoch)]
    assert Counter(order_of_buckets) == {0: 20, 1: 10}
    assert order_of_buckets != sorted(order_of_buckets)
    assert [order.batch_size(step) for step in range(30)] == [(4, 8)[bucket] for bucket in order_of_buckets]


# --- repeats and small buckets -----------------------------------------------------------------


def test_fractional_repeats_take_another_part_each_epoch_and_all_in_the_end() -> None:
    order = make_order(0, [([Segment(40, 2.25)], 10)])
    seen_three_times: Counter[int] = Counter()
    for epoch in range(30):
        counts = Counter(index for _, _, index, _ in epoch_rows(order, epoch))
        assert sum(counts.values()) == 90
        assert set(counts.values()) == {2, 3}
        assert len(counts) == 40
        seen_three_times.update(index for index, count in counts.items() if count == 3)
    assert len(seen_three_times) == 40
    assert max(seen_three_times.values()) < 20  # 7.5 each on average


def test_repeats_below_one_take_a_part() -> None:
    order = make_order(0, [([Segment(100, 0.3)], 10)])
    epochs = [{index for _, _, index, _ in epoch_rows(order, epoch)} for epoch in range(40)]
    assert all(len(epoch) == 30 for epoch in epochs)
    assert len(set.union(*epochs)) == 100
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(("size", "batch"), [(1, 8), (3, 8), (5, 64), (7, 8)])
def test_a_bucket_smaller_than_a_batch_is_repeated_evenly_and_never_dropped(size: int, batch: int) -> None:
    order = make_order(0, [([Segment(size)], batch)])
    assert (order.steps_per_epoch, order.buckets[0].padding) == (1, batch - size)
    found = epoch_rows(order)
    counts = Counter(samples(found))
    assert len(counts) == size
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len(set(found)) == batch


def test_numbers_of_a_bucket() -> None:
    bucket = BucketOrder((Segment(10), Segment(3, 1.5)), 8)
    assert (bucket.length, bucket.num_batches, bucket.padding) == (14, 2, 2)
    assert BucketOrder((Segment(16),), 8).padding == 0
    assert Segment(1, 0.1).length == 1


# --- worlds ------------------------------------------------------------------------------------

SHAPES = [
    (world, micro, accumulation)
    for world, micro, accumulation in product((1, 2, 3, 4, 6, 8, 12, 16, 64), (1, 2, 3, 4, 7), (1, 2, 3, 4, 8))
]


def test_there_are_enough_worlds() -> None:
    assert len(set(SHAPES)) >= 200


@pytest.mark.parametrize("world", sorted({world for world, _, _ in SHAPES}))
def test_the_ranks_slices_are_the_global_batch_in_its_order(world: int) -> None:
    for _, micro, accumulation in (shape for shape in SHAPES if shape[0] == world):
        batch = world * micro * accumulation
        order = make_order(1, [([Segment(batch * 2 + 3)], batch)])
        whole = rows(order.picks(1))
        parts = [
            rank_slice(batch, rank, world, at, accumulation) for rank in range(world) for at in range(accumulation)
        ]
        assert [start for start, _ in parts] == list(range(0, batch, micro)), "gaps, overlaps or another order"
        assert all(stop - start == micro for start, stop in parts)
        asked = parts if len(parts) <= 16 else parts[:: len(parts) // 8]
        for start, stop in asked:
            assert rows(order.picks(1, start, stop)) == whole[start:stop]


def test_worlds_of_one_global_batch_see_the_same_steps() -> None:
    order = make_order(9, [([Segment(101)], 24), ([Segment(17, 1.5)], 24)])
    whole = [rows(order.picks(step)) for step in range(2 * order.steps_per_epoch)]
    for world, accumulation in [(1, 1), (1, 24), (2, 3), (3, 4), (4, 6), (8, 3), (12, 2), (24, 1)]:
        for step, expected in enumerate(whole):
            seen: list[Row] = []
            for rank, at in product(range(world), range(accumulation)):
                seen += rows(order.picks(step, *rank_slice(24, rank, world, at, accumulation)))
            assert seen == expected, (world, accumulation, step)


def test_a_world_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(AssertionError):
        rank_slice(24, 0, 5, 0, 1)
    with pytest.raises(AssertionError):
        rank_slice(24, 0, 4, 0, 4)


def test_part_is_a_slice() -> None:
    picks = mixed().picks(0)
    assert rows(picks.part(2, 5)) == rows(picks)[2:5]
    assert (picks.part(2, 5).epoch, picks.part(2, 5).bucket) == (picks.epoch, picks.bucket)


# --- resume and cost ---------------------------------------------------------------------------


def test_starting_at_any_step_is_skipping_to_it() -> None:
    """No state but the step's number: also at the epoch's boundary, where the earlier program was off by one."""
    walked = mixed()
    sequence = [(walked.picks(step).epoch, rows(walked.picks(step))) for step in range(3 * walked.steps_per_epoch)]
    for step in (0, 1, walked.steps_per_epoch - 1, walked.steps_per_epoch, 2 * walked.steps_per_epoch, 25):
        fresh = mixed()
        assert (fresh.picks(step).epoch, rows(fresh.picks(step))) == sequence[step]
    per_epoch = walked.steps_per_epoch
    assert [sequence[step][0] for step in (per_epoch - 1, per_epoch, 2 * per_epoch)] == [0, 1, 2]


def test_a_step_of_ten_million_samples_is_cheap() -> None:
    order = make_order(0, [([Segment(4_000_000), Segment(1_000_000, 1.5)], 1024), ([Segment(5_000_000)], 1024)])
    assert sum(bucket.length for bucket in order.buckets) > 10_000_000
    order.picks(0)
    tracemalloc.start()
    started = time.process_time()  # of this process: the machine may be busy
    for step in (1, 5000, 123_456):
        order.picks(step)
    took = time.process_time() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert took / 3 < 0.1
    assert peak < 2_000_000
