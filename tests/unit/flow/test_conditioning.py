"""Text dropout: one draw an encoder, tokens and pooled together, 10% without any text."""

import numpy as np
import pytest
import torch
from torch import Tensor

from sd3_light.flow.conditioning import ENCODERS, draw_drops, drop_text

Texts = dict[str, list[Tensor]]

NAMES = ("clip_l", "clip_g", "t5", "clip_l.pooled", "clip_g.pooled")
ALL_DROPS = [tuple(bool(bits >> at & 1) for at in range(3)) for bits in range(8)]


def texts(count: int, dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = (4, 4, 6)) -> Texts:
    """No zero anywhere, so that a zero is a drop."""
    shapes: dict[str, tuple[int, ...]] = {"clip_l": (rows[0], 3), "clip_g": (rows[1], 5), "t5": (rows[2], 8)}
    shapes |= {"clip_l.pooled": (3,), "clip_g.pooled": (5,)}
    generator = torch.Generator().manual_seed(0)
    return {
        name: [(1 + torch.rand(shape, generator=generator)).to(dtype) for _ in range(count)]
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def many() -> np.ndarray:
    return np.array([draw_drops(0, 0, 0, sample, 0.464) for sample in range(100_000)])


def test_ten_percent_of_samples_have_no_text(many: np.ndarray) -> None:
    """Five draws, tokens and pooled apart, gave 2%."""
    assert abs(many.all(axis=1).mean() - 0.1) < 0.003


def test_each_encoder_is_dropped_with_the_given_probability(many: np.ndarray) -> None:
    assert np.abs(many.mean(axis=0) - 0.464).max() < 0.006


def test_encoders_are_dropped_independently(many: np.ndarray) -> None:
    for one, two in [(0, 1), (0, 2), (1, 2)]:
        assert abs((many[:, one] & many[:, two]).mean() - 0.464**2) < 0.006
    for pattern in ALL_DROPS:
        expected = np.prod([0.464 if dropped else 0.536 for dropped in pattern])
        assert abs((many == pattern).all(axis=1).mean() - expected) < 0.006


def test_drops_of_two_encoders_do_not_go_together(many: np.ndarray) -> None:
    apart = np.corrcoef(many.T.astype(float)) - np.eye(3)
    assert np.abs(apart).max() < 4 / np.sqrt(len(many))


def test_a_draw_belongs_to_the_occurrence_of_the_sample() -> None:
    def drops(seed: int, epoch: int, repeat: int) -> list[tuple[bool, ...]]:
        return [draw_drops(seed, epoch, repeat, sample, 0.464) for sample in range(50)]

    assert drops(0, 0, 0) == drops(0, 0, 0)
    others = [drops(1, 0, 0), drops(0, 1, 0), drops(0, 0, 1)]
    assert all(other != drops(0, 0, 0) for other in others)


def test_the_ends_of_the_probability() -> None:
    assert all(draw_drops(0, 0, 0, sample, 0.0) == (False,) * 3 for sample in range(200))
    assert all(draw_drops(0, 0, 0, sample, 1.0) == (True,) * 3 for sample in range(200))


def test_tokens_and_pooled_of_an_encoder_go_together_and_nothing_else_does() -> None:
    given = texts(8)
    result = drop_text(given, ALL_DROPS, None)
    assert set(result) == set(NAMES)
    for row, drops in enumerate(ALL_DROPS):
        for name in NAMES:
            lost = drops[ENCODERS.index(name.removesuffix(".pooled"))]
            expected = torch.zeros_like(given[name][row]) if lost else given[name][row]
            assert torch.equal(result[name][row], expected), (drops, name)


def test_the_empty_caption_stands_exactly_where_all_were_dropped() -> None:
    given = texts(8)
    empty = {name: -values[0] for name, values in texts(1).items()}
    result, zeroed = drop_text(given, ALL_DROPS, empty), drop_text(given, ALL_DROPS, None)
    for row, drops in enumerate(ALL_DROPS):
        for name in NAMES:
            expected = empty[name] if all(drops) else zeroed[name][row]
            assert torch.equal(result[name][row], expected), (drops, name)


def test_a_fully_dropped_sample_is_zero_without_an_empty_caption() -> None:
    result = drop_text(texts(1), [(True, True, True)], None)
    assert all(not values[0].any() for values in result.values())


def test_even_a_feature_that_is_not_a_number_is_dropped() -> None:
    given = texts(1)
    given["t5"][0][:] = float("nan")
    assert not drop_text(given, [(False, False, True)], None)["t5"][0].any()


def test_the_input_is_left_alone_and_the_type_is_kept() -> None:
    given = texts(2, torch.bfloat16)
    before = {name: [one.clone() for one in values] for name, values in given.items()}
    empty = {name: values[0].float() for name, values in texts(1).items()}
    result = drop_text(given, [(True, True, True), (True, False, False)], empty)
    assert all(torch.equal(one, two) for name in NAMES for one, two in zip(given[name], before[name], strict=True))
    assert {one.dtype for values in result.values() for one in values} == {torch.bfloat16}


# --- real tokens -------------------------------------------------------------------------------

REAL = (4, 3, 5)


def lengths_of(result: Texts, row: int) -> tuple[int, ...]:
    return tuple(len(result[name][row]) for name in ENCODERS)


def test_dropping_t5_takes_its_tokens_and_dropping_a_clip_leaves_zeros() -> None:
    given = texts(8, rows=REAL)
    result = drop_text(given, ALL_DROPS, None, real=True)
    for row, drops in enumerate(ALL_DROPS):
        expected = (1, 1, 0) if all(drops) else (4, 3, 0 if drops[2] else 5)
        assert lengths_of(result, row) == expected, drops
        for name in NAMES:
            lost = drops[ENCODERS.index(name.removesuffix(".pooled"))]
            assert not result[name][row].any() if lost else torch.equal(result[name][row], given[name][row])
    assert all(result[name][7].shape == given[name][7].shape for name in NAMES if name.endswith("pooled"))


@pytest.mark.parametrize("rows", [(2, 2, 1), (6, 7, 9)])
def test_the_empty_caption_brings_its_own_lengths(rows: tuple[int, ...]) -> None:
    """Shorter than those beside it, as it always is; and longer, where all captions of a batch are."""
    given = texts(8, rows=REAL)
    empty = {name: torch.full_like(values[0], 9.0) for name, values in texts(1, rows=rows).items()}
    result = drop_text(given, ALL_DROPS, empty, real=True)
    zeroed = drop_text(given, ALL_DROPS, None, real=True)
    assert lengths_of(result, 7) == rows
    for name in NAMES:
        assert torch.equal(result[name][7], empty[name])
        assert all(torch.equal(one, two) for one, two in zip(result[name][:7], zeroed[name][:7], strict=True))
