"""Distances of feature sets, against values that are known by other means."""

import pytest
import torch
from torch import Tensor

from sd3_light.evaluate.distances import (
    cosine_distances,
    finds_own_caption,
    frechet_distance,
    kernel_distance,
    precision_recall,
)


def draw(count: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_moments(mean: Tensor, root: Tensor, seed: int, count: int = 400) -> Tensor:
    """Return vectors whose sample mean and covariance are exactly these."""
    raw = draw(count, len(mean), seed)
    raw = raw - raw.mean(0)
    covariance = raw.T @ raw / (count - 1)
    return raw @ torch.linalg.inv(torch.linalg.cholesky(covariance)).T @ root.T + mean


def test_frechet_distances() -> None:
    """Diagonal covariances commute: |m - n|^2 + sum (s - t)^2."""
    mean, other = torch.tensor([1.0, 2.0, 0.0]).double(), torch.tensor([0.0, 2.0, 3.0]).double()
    s, t = torch.tensor([1.0, 0.5, 2.0]).double(), torch.tensor([3.0, 0.5, 1.0]).double()
    x, y = with_moments(mean, torch.diag(s), 1), with_moments(other, torch.diag(t), 2, count=300)
    assert frechet_distance(x, y) == pytest.approx(10 + 4 + 0 + 1, rel=1e-9)
    a, b = draw(5, 5, 3), draw(5, 5, 4)
    zero = torch.zeros(5, dtype=torch.float64)
    first, second = a @ a.T, b @ b.T
    eigenvalues = torch.linalg.eigvals(first @ second).real.clamp(min=0)
    expected = float(first.trace() + second.trace() - 2 * eigenvalues.sqrt().sum())
    assert frechet_distance(with_moments(zero, a, 5), with_moments(zero, b, 6)) == pytest.approx(expected, rel=1e-6)
    x = draw(10, 40)
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(x, x + 0.5) == pytest.approx(40 * 0.25, rel=1e-9)
    assert frechet_distance(x, 3 * (x - x.mean(0)) + x.mean(0)) == pytest.approx(4 * float(x.var(0).sum()), rel=1e-9)


def test_other_distances_equal_their_definitions() -> None:
    x, y = draw(5, 3, 1), draw(4, 3, 2) + 1

    def kernel(a: Tensor, b: Tensor) -> float:
        return (float(a @ b) / 3 + 1) ** 3

    within_x = sum(kernel(x[i], x[j]) for i in range(5) for j in range(5) if i != j) / 20
    within_y = sum(kernel(y[i], y[j]) for i in range(4) for j in range(4) if i != j) / 12
    between = sum(kernel(a, b) for a in x for b in y) / 20
    assert kernel_distance(x, y) == pytest.approx(within_x + within_y - 2 * between, rel=1e-12)
    line = torch.arange(8, dtype=torch.float64)[:, None]
    assert precision_recall(line, line) == (1.0, 1.0)
    assert precision_recall(line, line + 1000) == (0.0, 0.0)
    # all images close to one end of the truth: every one is plausible, and most of the truth is not covered
    assert precision_recall(line, line / 100, neighbours=1) == (1.0, 1 / 8)
    true = torch.tensor([[0.0], [1.0], [5.0]], dtype=torch.float64)
    assert precision_recall(true, torch.tensor([[2.0], [9.5]]).double(), neighbours=1) == (0.5, 1.0)
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    y = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert cosine_distances(x, y).tolist() == [0.0, 1.0, 2.0]


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
