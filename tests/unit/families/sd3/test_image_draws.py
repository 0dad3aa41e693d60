"""Draws per image: each belongs to its sample, and covers all tokens and places evenly."""

import numpy as np
import pytest

from sd3_light.config.schema_blocks import num_kept
from sd3_light.families.sd3.image_draws import draw_corners, draw_kept
from sd3_light.randomness import occurrence_words, stream

IDS = np.arange(100, 108)


@pytest.mark.parametrize(("tokens", "share", "count"), [(16, 0.5, 8), (15, 0.5, 8), (6, 0.75, 2), (3, 0.99, 1)])
def test_the_tokens_with_the_lowest_words_are_kept(tokens: int, share: float, count: int) -> None:
    kept = draw_kept(7, occurrence_words(2, np.arange(8), IDS), tokens, share)
    assert kept.shape == (8, count)
    assert count == num_kept(tokens, share)
    for repeat, identity in enumerate(IDS):
        words = stream(7, "token-routing", 2, repeat, int(identity)).bit_generator.random_raw(tokens).tolist()
        lowest = sorted(range(tokens), key=words.__getitem__)[:count]
        assert kept[repeat].tolist() == sorted(lowest)


def test_draws_do_not_depend_on_the_batch_and_change_with_the_epoch() -> None:
    words = occurrence_words(1, 0, IDS)
    for draw in (lambda w: draw_kept(0, w, 64, 0.5), lambda w: draw_corners(0, w, (4, 6), 16, 32)):
        whole = draw(words)
        assert all(np.array_equal(draw(words[at : at + 1])[0], whole[at]) for at in range(8))
        assert not np.array_equal(whole, draw(occurrence_words(2, 0, IDS)))
        assert len({row.tobytes() for row in whole}) > 1


def test_crops_cover_the_central_square_and_nothing_else() -> None:
    corners = draw_corners(0, occurrence_words(0, 0, np.arange(6000)), (4, 6), 9, 32)
    first = (32 - 9) // 2
    assert set(corners[:, 0]) == set(range(first, first + 6))
    assert set(corners[:, 1]) == set(range(first, first + 4))
    assert abs(np.bincount(corners[:, 1])[first:] - 1500).max() < 200


@pytest.mark.parametrize("side", [1, 4, 5])
def test_a_grid_that_fills_the_square_is_centred_as_in_sampling(side: int) -> None:
    corners = draw_corners(0, occurrence_words(0, 0, IDS), (5, 7), side, 32)
    assert set(map(tuple, corners.tolist())) == {((32 - 5) // 2, (32 - 7) // 2)}
