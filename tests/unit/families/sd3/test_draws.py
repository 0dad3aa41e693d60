"""Draws per image: tokens, places and dropped texts belong to their sample."""

import numpy as np
import pytest
import torch
from torch import Tensor

from sd3_light.config.schema_blocks import num_kept
from sd3_light.families.sd3.draws import ENCODERS, draw_corners, draw_drops, draw_kept, drop_text
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
    corners = draw_corners(0, occurrence_words(0, 0, np.arange(6000)), (4, 6), 9, 32)
    first = (32 - 9) // 2
    assert set(corners[:, 0]) == set(range(first, first + 6))
    assert set(corners[:, 1]) == set(range(first, first + 4))
    assert abs(np.bincount(corners[:, 1])[first:] - 1500).max() < 200


@pytest.mark.parametrize("side", [1, 4, 5])
def test_a_grid_that_fills_the_square_is_centred_as_in_sampling(side: int) -> None:
    corners = draw_corners(0, occurrence_words(0, 0, IDS), (5, 7), side, 32)
    assert set(map(tuple, corners.tolist())) == {((32 - 5) // 2, (32 - 7) // 2)}


Texts = dict[str, list[Tensor]]

NAMES = ("clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled")
ALL_DROPS = [tuple(bool(bits >> at & 1) for at in range(3)) for bits in range(8)]


def texts(count: int, dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = (4, 4, 6)) -> Texts:
    """Texts without zeros, so that a zero is a drop."""
    shapes: dict[str, tuple[int, ...]] = {"clip_l": (rows[0], 3), "clip_g": (rows[1], 5), "t5": (rows[2], 8)}
    shapes |= {"clip_l.pooled": (3,), "clip_g.pooled": (5,)}
    generator = torch.Generator().manual_seed(0)
    return {
        name: [(1 + torch.rand(shape, generator=generator)).to(dtype) for _ in range(count)]
        for name, shape in shapes.items()
    }


def test_a_joint_draw_drops_all_encoders_or_none() -> None:
    occurrences = occurrence_words(0, 0, range(20_000))
    many = np.array(draw_drops(0, occurrences, 0.1, joint=True))
    assert many.shape == (20_000, len(ENCODERS))
    assert (many == many[:, :1]).all()
    assert abs(many[:, 0].mean() - 0.1) < 0.007
    assert draw_drops(0, occurrences[:9], 1.0, joint=True) == [(True,) * 3] * 9
    occurrences = occurrence_words(2, 1, range(100))
    expected = [stream(3, "text-dropout", 2, 1, sample).random(3) < 0.4 for sample in range(100)]
    assert np.array_equal(draw_drops(3, occurrences, 0.4), expected)


def test_tokens_and_pooled_vector_of_an_encoder_are_dropped_together() -> None:
    features = texts(8)
    result = drop_text(features, ALL_DROPS, None)
    assert set(result) == set(NAMES)
    for row, drops in enumerate(ALL_DROPS):
        for name in NAMES:
            lost = drops[ENCODERS.index(name.removesuffix(".pooled"))]
            expected = torch.zeros_like(features[name][row]) if lost else features[name][row]
            assert torch.equal(result[name][row], expected), (drops, name)
    empty = {name: -values[0] for name, values in texts(1).items()}
    result, zeroed = drop_text(features, ALL_DROPS, empty), drop_text(features, ALL_DROPS, None)
    for row, drops in enumerate(ALL_DROPS):
        for name in NAMES:
            expected = empty[name] if all(drops) else zeroed[name][row]
            assert torch.equal(result[name][row], expected), (drops, name)


def test_inputs_and_dtype_do_not_change() -> None:
    features = texts(2, torch.bfloat16)
    before = {name: [one.clone() for one in values] for name, values in features.items()}
    empty = {name: values[0].float() for name, values in texts(1).items()}
    result = drop_text(features, [(True, True, True), (True, False, False)], empty)
    assert all(torch.equal(one, two) for name in NAMES for one, two in zip(features[name], before[name], strict=True))
    assert {one.dtype for values in result.values() for one in values} == {torch.bfloat16}
    features = texts(1)
    features["t5"][0][:] = float("nan")
    assert not drop_text(features, [(False, False, True)], None)["t5"][0].any()


REAL = (4, 3, 5)


def lengths_of(result: Texts, row: int) -> tuple[int, ...]:
    return tuple(len(result[name][row]) for name in ENCODERS)


def test_dropping_t5_removes_its_tokens_and_dropping_a_clip_zeroes_them() -> None:
    features = texts(8, rows=REAL)
    result = drop_text(features, ALL_DROPS, None, real=True)
    for row, drops in enumerate(ALL_DROPS):
        expected = (1, 1, 0) if all(drops) else (4, 3, 0 if drops[2] else 5)
        assert lengths_of(result, row) == expected, drops
        for name in NAMES:
            lost = drops[ENCODERS.index(name.removesuffix(".pooled"))]
            assert not result[name][row].any() if lost else torch.equal(result[name][row], features[name][row])
    assert all(result[name][7].shape == features[name][7].shape for name in NAMES if name.endswith("pooled"))


@pytest.mark.parametrize("rows", [(2, 2, 1), (6, 7, 9)])
def test_the_empty_caption_has_its_own_lengths(rows: tuple[int, ...]) -> None:
    """Shorter than the other captions, as usual, and longer than all of them."""
    features = texts(8, rows=REAL)
    empty = {name: torch.full_like(values[0], 9.0) for name, values in texts(1, rows=rows).items()}
    result = drop_text(features, ALL_DROPS, empty, real=True)
    zeroed = drop_text(features, ALL_DROPS, None, real=True)
    assert lengths_of(result, 7) == rows
    for name in NAMES:
        assert torch.equal(result[name][7], empty[name])
        assert all(torch.equal(one, two) for one, two in zip(result[name][:7], zeroed[name][:7], strict=True))
