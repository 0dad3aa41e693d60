"""Means, shares and paired differences of seeds have the errors of repeated experiments."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


def test_differences_of_seeds_have_their_errors(scripts: SimpleNamespace) -> None:
    table = scripts.ablations.differences({1: [True, True], 3: [False, False]}, {3: [True, False], 2: [True, True]})
    assert table.tolist() == [[-1.0, 0.0]]
    assert scripts.ablations.compare(scripts.ablations.differences({1: [True, True]}, {2: [True, True]})) is None
    table = np.array([[1.0, 0.0, 0.0, 0.0]])  # variance 1/4 over 4 prompts
    alone, pooled = scripts.ablations.compare(table), scripts.ablations.compare(table, 0.01)
    assert (alone.mean, alone.error, alone.verdict) == (0.25, None, "undecided")
    assert pooled.error == pytest.approx((0.01 + 0.25 / 4) ** 0.5)
    assert scripts.ablations.compare(np.ones((1, 4)), 0.0).verdict == "undecided"
    table = np.array([[1.0, 0.0, 0.0, 0.0]] * 3)
    assert scripts.ablations.seed_variance(table) == pytest.approx(0.0)
    assert scripts.ablations.compare(table).error == pytest.approx((0.25 / 4) ** 0.5)
    table = np.array([[1.0] * 8, [0.0] * 8])
    assert scripts.ablations.seed_variance(table) == pytest.approx(0.5)
    found = scripts.ablations.compare(table)
    assert (found.mean, found.error, found.seeds) == (0.5, pytest.approx(0.5), 2)
    agreeing, differing = np.array([[1.0, 0.0] * 50] * 2), np.array([[1.0] * 8, [0.0] * 8, [0.0] * 8])
    pooled = scripts.ablations.pooled_seed_variance([agreeing, differing, np.ones((1, 4))])
    assert pooled == pytest.approx((0 * 1 + 1 / 3 * 2) / 3)
    assert scripts.ablations.compare(agreeing).verdict == "better"
    assert scripts.ablations.compare(agreeing, pooled).verdict == "undecided"
    assert scripts.ablations.pooled_seed_variance([np.ones((1, 4))]) is None


@pytest.mark.parametrize(
    ("mean", "error", "seeds", "verdict"),
    [
        (0.20, 0.1, 2, "better"),
        (-0.20, 0.1, 2, "worse"),
        (0.19, 0.1, 2, "undecided"),
        (0.9, 0.1, 1, "undecided"),
        (0.0, 0.0, 3, "undecided"),
        (0.9, None, 2, "undecided"),
    ],
)
def test_a_verdict_needs_two_seeds(scripts: Any, mean: float, error: float | None, seeds: int, verdict: str) -> None:
    assert scripts.ablations.Difference(mean, error, seeds).verdict == verdict


def test_the_error_is_the_spread_of_repeated_experiments(scripts: SimpleNamespace) -> None:
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        seeds, prompts = rng.normal(0, 0.05, (4, 1)), rng.normal(0, 0.3, (1, 100))
        found = scripts.ablations.compare(seeds + prompts + rng.normal(0, 0.4, (4, 100)))
        means.append(found.mean)
        errors.append(found.error**2)
    assert np.mean(errors) == pytest.approx(np.var(means), rel=0.15)
    assert np.mean(errors) == pytest.approx(0.05**2 / 4 + 0.3**2 / 100 + 0.4**2 / 400, rel=0.1)


def test_means_shares_and_steps(scripts: SimpleNamespace) -> None:
    assert scripts.basics.spread([0.5, 0.7], 2) == "0.60 ±0.10"
    assert scripts.basics.spread([1.0], 3) == "1.000"
    assert scripts.basics.percent([0.5, 0.7], 100) == "60.0 ± 10.0"
    assert scripts.basics.percent([0.5], 100) == "50.0 ± 5.0"
    fit = scripts.basics.steps_that_fit
    assert fit(lambda steps: 5 + 0.5 * steps, (4, 20), 1.0) == 120
    assert fit(lambda steps: 5 + 0.5 * steps, (4, 20), 0.0) == 20, "those that were run"
