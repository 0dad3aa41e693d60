"""Scores of sets of images: known cases, and their intervals."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.evaluate.comparison import DIFFERENCES, Comparison, Estimate
from sd3_light.evaluate.distances import METRICS
from sd3_light.evaluate.pixels import MAX_PSNR

COUNT = 120


def draw(seed: int, count: int = COUNT) -> Tensor:
    noise = torch.randn(count, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(noise, dim=1)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    truths = draw(0)
    return Comparison(truths, truths, [f"caption {number}" for number in range(COUNT)])


def value(scores: object, metric: str) -> float:
    estimate = scores.estimates[metric]  # type: ignore[attr-defined]
    assert estimate.low <= estimate.value <= estimate.high
    return float(estimate.value)


def test_scores_of_true_other_and_shuffled_images(comparison: Comparison) -> None:
    truth, copy = comparison.of_truths(), comparison.of_images(comparison.truths)
    for metric in METRICS[:5]:
        assert truth.estimates[metric] == copy.estimates[metric]
    assert value(truth, "retrieval") == 1
    assert truth.estimates["distance"] is None
    assert value(copy, "distance") == pytest.approx(0, abs=1e-12)
    assert abs(value(truth, "kid")) < 0.02
    assert value(truth, "precision") > 0.8
    assert value(truth, "recall") > 0.8
    truth = comparison.of_truths()
    other = comparison.of_images(torch.nn.functional.normalize(draw(1) + 2, dim=1))
    for metric in ("frechet", "kid"):
        assert truth.estimates[metric].high < other.estimates[metric].low  # type: ignore[union-attr]
    assert value(other, "recall") < 0.2
    assert value(other, "retrieval") < 0.1
    assert value(other, "distance") > 0.5
    shuffled = comparison.of_shuffled_truths()
    assert value(shuffled, "retrieval") < 0.1
    assert value(shuffled, "distance") == pytest.approx(1, abs=0.1)
    assert all(shuffled.estimates[metric] is None for metric in METRICS[:4])
    rows = list(range(0, COUNT, 2))
    some = comparison.of_images(comparison.truths[rows], rows)
    assert some.count == len(rows)
    assert value(some, "retrieval") == 1
    assert some.estimates["frechet"] is not None
    assert comparison.of_images(comparison.truths[:5], range(5)).estimates["frechet"] is None


def test_scores_are_reproducible_and_depend_on_the_seed(comparison: Comparison) -> None:
    again = Comparison(comparison.truths, comparison.texts, comparison.captions)
    other = Comparison(comparison.truths, comparison.texts, comparison.captions, seed=1)
    images = draw(3)
    assert again.of_images(images).as_dict() == comparison.of_images(images).as_dict()
    assert other.of_images(images).as_dict() != comparison.of_images(images).as_dict()
    assert json.loads(json.dumps(again.of_images(images).as_dict()))["kid"].keys() == {"value", "low", "high"}
    blind = Comparison(comparison.truths, None, comparison.captions)
    assert blind.of_truths().estimates["retrieval"] is None
    assert "retrieval" not in blind.of_shuffled_truths().each
    assert value(blind.of_images(draw(4)), "distance") > 0


def test_an_interval_reaches_from_2_5_to_97_5_percent() -> None:
    """1.96 standard errors to each side of the mean of normal values; one seed's resamples are off by up to 0.2."""
    values = torch.randn(COUNT, generator=torch.Generator().manual_seed(0)).double()
    estimates = [Comparison(draw(0), None, ["a"] * COUNT, seed)._mean(values) for seed in range(10)]
    error = values.std().item() / COUNT**0.5
    low, high = (sum(getattr(estimate, side) for estimate in estimates) / 10 for side in ("low", "high"))
    assert estimates[0].value == pytest.approx(values.mean().item())
    assert (low - values.mean().item()) / error == pytest.approx(-1.96, abs=0.1)
    assert (high - values.mean().item()) / error == pytest.approx(1.96, abs=0.1)
    with pytest.raises(UserError, match="7 images are too few to compare; give at least 8"):
        Comparison(draw(0, 7), None, ["a"] * 7)


@pytest.fixture(scope="module")
def pixels() -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (COUNT, 8, 8, 3), np.uint8))


def test_differences_to_the_true_images_are_paired(pixels: list[np.ndarray]) -> None:
    """Equal images differ by exactly nothing; the interval of others is narrower than that of their distance."""
    truths = draw(0)
    comparison = Comparison(truths, truths, ["a"] * COUNT, pixels=pixels)
    copy = comparison.of_images(truths, images=pixels)
    assert {name: copy.estimates[name] for name in DIFFERENCES.values()} == dict.fromkeys(
        DIFFERENCES.values(), Estimate(0, 0, 0)
    )
    near = torch.nn.functional.normalize(truths + 0.1 * draw(1), dim=1)
    scores, true = comparison.of_images(near), comparison.of_truths()
    for metric, name in DIFFERENCES.items():
        difference, plain = scores.estimates[name], scores.estimates[metric]
        assert difference.value == pytest.approx(plain.value - true.estimates[metric].value)  # type: ignore[union-attr]
        assert difference.high - difference.low < plain.high - plain.low  # type: ignore[union-attr]
        assert true.estimates[name] is None
    far = comparison.of_images(torch.nn.functional.normalize(draw(1) + 2, dim=1))
    assert all(value(far, name) > 0 and far.estimates[name].low > 0 for name in DIFFERENCES.values())  # type: ignore[union-attr]


def test_pixels_of_some_captions(pixels: list[np.ndarray]) -> None:
    comparison = Comparison(draw(0), None, ["a"] * COUNT, pixels=pixels)
    rows = [3, 5, 8, 13]
    some = comparison.of_images(comparison.truths[rows], rows, [pixels[row] for row in rows])
    assert value(some, "psnr") == MAX_PSNR
    assert value(some, "edges") == pytest.approx(1)
    assert some.rows == tuple(rows)
    shuffled = comparison.of_shuffled_truths()
    assert value(shuffled, "psnr") < 12
    assert len(shuffled.each["edges"]) == COUNT
    assert comparison.of_images(draw(3)).estimates.get("psnr") is None
