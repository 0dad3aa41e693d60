"""Scores of sets of images, and the distances and pixels that they are made of: known cases, and intervals."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.evaluate import distances
from sd3_light.evaluate.comparison import DIFFERENCES, Comparison, Estimate
from sd3_light.evaluate.distances import METRICS, finds_own_caption, frechet_distance, precision_recall
from sd3_light.evaluate.pixels import MAX_PSNR, edge_agreement, pixel_scores, psnr
from sd3_light.sources.preprocess import Pixels

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
    assert all(copy.estimates[name] == Estimate(0, 0, 0) for name in DIFFERENCES.values())
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


def vectors(count: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_moments(mean: Tensor, root: Tensor, seed: int, count: int = 400) -> Tensor:
    """Return vectors whose sample mean and covariance are exactly these."""
    raw = vectors(count, len(mean), seed)
    raw = raw - raw.mean(0)
    covariance = raw.T @ raw / (count - 1)
    return raw @ torch.linalg.inv(torch.linalg.cholesky(covariance)).T @ root.T + mean


def test_frechet_distances() -> None:
    """Diagonal covariances commute: |m - n|^2 + sum (s - t)^2."""
    mean, other = torch.tensor([1.0, 2.0, 0.0]).double(), torch.tensor([0.0, 2.0, 3.0]).double()
    s, t = torch.tensor([1.0, 0.5, 2.0]).double(), torch.tensor([3.0, 0.5, 1.0]).double()
    x, y = with_moments(mean, torch.diag(s), 1), with_moments(other, torch.diag(t), 2, count=300)
    assert frechet_distance(x, y) == pytest.approx(10 + 4 + 0 + 1, rel=1e-9)
    a, b = vectors(5, 5, 3), vectors(5, 5, 4)
    zero = torch.zeros(5, dtype=torch.float64)
    first, second = a @ a.T, b @ b.T
    eigenvalues = torch.linalg.eigvals(first @ second).real.clamp(min=0)
    expected = float(first.trace() + second.trace() - 2 * eigenvalues.sqrt().sum())
    assert frechet_distance(with_moments(zero, a, 5), with_moments(zero, b, 6)) == pytest.approx(expected, rel=1e-6)
    x = vectors(10, 40)
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(x, x + 0.5) == pytest.approx(40 * 0.25, rel=1e-9)
    assert frechet_distance(x, 3 * (x - x.mean(0)) + x.mean(0)) == pytest.approx(4 * float(x.var(0).sum()), rel=1e-9)


def test_other_distances_equal_their_definitions() -> None:
    x, y = vectors(5, 3, 1), vectors(4, 3, 2) + 1

    def kernel(a: Tensor, b: Tensor) -> float:
        return (float(a @ b) / 3 + 1) ** 3

    within_x = sum(kernel(x[i], x[j]) for i in range(5) for j in range(5) if i != j) / 20
    within_y = sum(kernel(y[i], y[j]) for i in range(4) for j in range(4) if i != j) / 12
    between = sum(kernel(a, b) for a in x for b in y) / 20
    assert distances.kernel_distance(x, y) == pytest.approx(within_x + within_y - 2 * between, rel=1e-12)
    line = torch.arange(8, dtype=torch.float64)[:, None]
    assert precision_recall(line, line) == (1.0, 1.0)
    assert precision_recall(line, line + 1000) == (0.0, 0.0)
    # all images close to one end of the truth: every one is plausible, and most of the truth is not covered
    assert precision_recall(line, line / 100, neighbours=1) == (1.0, 1 / 8)
    true = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    assert precision_recall(true, torch.tensor([[2.0], [9.5]]).double(), neighbours=1) == (0.5, 1.0)
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    y = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert distances.cosine_distances(x, y).tolist() == [0.0, 1.0, 2.0]


def test_images_find_their_captions_among_a_group() -> None:
    texts, captions = torch.eye(5).double(), list("abcde")
    images = texts[[0, 1, 3, 3, 4]]  # the third image shows what the fourth caption says
    assert finds_own_caption(images, texts, captions).tolist() == [1, 1, 0, 1, 1]
    # among the first three captions its own is the most similar
    images[2, 2] = 0.1
    assert finds_own_caption(images, texts, captions).tolist() == [1, 1, 0, 1, 1]
    assert finds_own_caption(images, texts, captions, group=3).tolist() == [1, 1, 1, 1, 1]
    assert finds_own_caption(images, texts, list("abccd"), group=5).tolist() == [1, 1, 1, 1, 1]
    # of five captions in groups of three, the last two images choose among the last three.
    images = texts.clone()
    images[3, 2] = 2.0  # the fourth image shows what the third caption says
    assert finds_own_caption(images, texts, captions, group=3).tolist() == [1, 1, 1, 0, 1]
    assert finds_own_caption(images[3:], texts[3:], captions[3:], group=3).tolist() == [1, 1], "fewer than a group"


def square(left: int, colour: int = 0, paper: int = 255) -> Pixels:
    image = np.full((64, 64, 3), paper, np.uint8)
    image[20:44, left : left + 24] = colour
    return image


def test_pixel_scores_have_known_values() -> None:
    black = np.zeros((8, 8, 3), np.uint8)
    assert psnr(black, black) == MAX_PSNR
    assert psnr(black, black + 255) == pytest.approx(0)
    assert psnr(black, black + 51) == pytest.approx(20 * np.log10(5))
    truth = square(20)
    assert edge_agreement(truth, truth) == pytest.approx(1)
    assert edge_agreement(square(20, 255, 0), truth) == pytest.approx(1), "an inverted image has the same edges"
    near, far = edge_agreement(square(21), truth), edge_agreement(square(40), truth)
    assert 0.7 < near < 1
    assert far < 0.5 * near
    assert edge_agreement(np.full((64, 64, 3), 7, np.uint8), truth) == 0
    noise = np.random.default_rng(0).permutation(truth.reshape(-1, 3)).reshape(truth.shape)
    assert abs(edge_agreement(noise, truth)) < 0.15
    scores = pixel_scores([square(20)[::2, ::2], square(20)], [square(20), square(20)])
    assert scores["psnr"][0] > 15
    assert scores["psnr"][1] == MAX_PSNR
    assert scores["edges"].min() > 0.8
