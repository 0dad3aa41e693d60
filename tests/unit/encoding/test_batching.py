"""Encoder batches: every input once, within the budget, depending on the input list only."""

import random

import numpy as np
import pytest

from sd3_light.encoding import batching
from sd3_light.encoding.batching import LENGTH_MULTIPLE, REFERENCE_PIXELS, image_batches, length_batches, ranges


@pytest.mark.parametrize(("side", "size"), [(64, 32), (256, 32), (512, 8), (1024, 2), (2048, 1), (8192, 1)])
def test_image_batches_are_limited_by_area_and_batch_size(side: int, size: int) -> None:
    batches = image_batches(70, side, side, 32)
    assert [number for rows in batches for number in range(70)[rows]] == list(range(70))
    assert {rows.stop - rows.start for rows in batches[:-1]} == {size}
    assert size == 1 or size * side * side <= 32 * REFERENCE_PIXELS
    assert image_batches(70, side // 2, 2 * side, 32) == batches, "a wide image counts by its area"


def test_padded_captions_keep_their_order() -> None:
    batches = batching.padded_batches([16] * 7, 3)
    assert [batch.members for batch in batches] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert {batch.length for batch in batches} == {16}


@pytest.mark.parametrize("seed", range(20))
def test_every_caption_is_in_one_batch_of_similar_lengths_within_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    longest = draw.choice([16, 77, 256])
    lengths = [draw.randint(1, longest) for _ in range(draw.randint(1, 300))]
    budget = draw.choice([1, 100, 2000, 10**6])
    batches = length_batches(lengths, budget, longest)
    assert sorted(number for batch in batches for number in batch.members) == list(range(len(lengths)))
    for batch in batches:
        most = max(lengths[number] for number in batch.members)
        assert most <= batch.length <= longest
        is_rounded = batch.length % LENGTH_MULTIPLE == 0 and batch.length - most < LENGTH_MULTIPLE
        assert batch.length == longest or is_rounded
        assert len(batch.members) == 1 or len(batch.members) * batch.length <= budget
    ordered = [lengths[number] for batch in batches for number in batch.members]
    assert ordered == sorted(lengths, reverse=True)


def test_few_captions_make_few_batches() -> None:
    """One batch for eight lengths: eight batches would read the weights eight times."""
    assert len(length_batches(list(range(4, 68, 8)), 32 * 256)) == 1


def test_padding_may_exceed_the_longest_caption_without_a_limit() -> None:
    assert [batch.length for batch in length_batches([13], 100)] == [16]
    assert [batch.length for batch in length_batches([13], 100, longest=14)] == [14]


def test_real_rows_are_moved_from_a_batch_to_the_rows_of_all_captions() -> None:
    lengths = [3, 1, 2]
    starts = batching.row_starts(lengths)
    assert starts.tolist() == [0, 3, 4, 6]
    # captions 2 and 0, padded to four tokens; values are caption x 10 + token
    batch = np.array([20, 21, -1, -1, 0, 1, 2, -1])
    rows = np.full(6, -2)
    counts = np.array([2, 3])
    rows[ranges(starts[[2, 0]], counts)] = batch[ranges(np.array([0, 4]), counts)]
    assert rows.tolist() == [0, 1, 2, -2, 20, 21]
