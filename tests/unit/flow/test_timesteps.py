"""Timesteps: closed forms, distributions and shifts."""

import math
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from sd3_light.config import ModelConfig
from sd3_light.flow import timesteps
from sd3_light.flow.timesteps import FixedTime, quantile_to_time, resolution_shift, shift_time, times_from_quantiles


def settings(**keys: Any) -> ModelConfig:
    return ModelConfig(diffusers_path=Path("folder"), **keys)


def logit_normal_cdf(t: float, scale: float, mean: float = 0.0) -> float:
    """P(T < t) with logit(T) normal of deviation ``scale``, from the error function alone."""
    return 0.5 * (1 + math.erf((math.log(t / (1 - t)) - mean) / (scale * math.sqrt(2))))


def test_quantiles_have_closed_forms() -> None:
    assert [quantile_to_time(u, "uniform") for u in (0.0, 0.25, 0.9)] == [0.0, 0.25, 0.9]
    assert quantile_to_time(0.5, "logit_normal") == 0.5
    one_sigma = 0.5 * (1 + math.erf(1 / math.sqrt(2)))
    assert quantile_to_time(one_sigma, "logit_normal") == pytest.approx(1 / (1 + math.exp(-1)), abs=1e-9)
    assert quantile_to_time(one_sigma, "logit_normal", 2.0) == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-9)
    for u in (1e-12, 1 - 1e-12):
        assert 0 < quantile_to_time(u, "logit_normal", 1.0) < 1
    with pytest.raises(AssertionError):
        quantile_to_time(0.5, "cosine")


def test_shifts_are_their_definitions() -> None:
    for shift in (0.5, 1.0, 3.0, 6.0):
        for t in np.linspace(0, 1, 11):
            assert shift_time(float(t), shift) == pytest.approx(shift * t / (1 + (shift - 1) * t), abs=1e-12)
    assert shift_time(0.3, 1.0) == 0.3
    assert shift_time(0.5, 3.0) == pytest.approx(0.75)
    assert resolution_shift(256) == pytest.approx(math.exp(0.5))
    assert resolution_shift(4096) == pytest.approx(math.exp(1.15))
    assert resolution_shift(2176) == pytest.approx(math.exp(0.825))
    assert resolution_shift(256) < resolution_shift(1024) < resolution_shift(4096)
    assert timesteps.constant_shift(settings(), 1024) is None
    assert timesteps.constant_shift(settings(flux_shift=True), 1024) is None
    assert timesteps.constant_shift(settings(shift=3.0), 1024) == 3.0


def test_times_apply_the_configured_shift() -> None:
    quantiles = [0.1, 0.5, 0.9]
    raw = [quantile_to_time(u, "logit_normal", 1.3) for u in quantiles]
    assert times_from_quantiles(quantiles, 256, settings(sigmoid_scale=1.3)) == raw
    three = settings(sigmoid_scale=1.3, shift=3.0)
    assert times_from_quantiles(quantiles, 256, three) == [shift_time(t, 3.0) for t in raw]
    flux = [shift_time(t, math.exp(1.15)) for t in raw]
    assert times_from_quantiles(quantiles, 4096, settings(sigmoid_scale=1.3, flux_shift=True)) == pytest.approx(flux)
    uniform = settings(timestep_sample_method="uniform", sigmoid_scale=1.3)
    assert times_from_quantiles(quantiles, 256, uniform) == quantiles
    keys = settings(sqrt_shift=True)
    for tokens, factor in ((64, 0.5), (256, 1.0), (1024, 2.0), (4096, 4.0)):  # the ratio of the sides
        assert timesteps.sqrt_shift(tokens) == timesteps.constant_shift(keys, tokens) == factor
        assert times_from_quantiles([0.3], tokens, keys) == [shift_time(quantile_to_time(0.3, "logit_normal"), factor)]


def test_fixed_times_are_not_quantiles() -> None:
    keys = settings(shift=3.0, logit_mean=1.0, uniform_share=0.2)
    assert times_from_quantiles([FixedTime(0.3), FixedTime(0.9)], 4096, keys) == [0.3, 0.9]
    assert f"{FixedTime(0.3)}" == "0.3"
    # bit for bit: the golden losses depend on it.
    for u in (1e-12, 0.123456789, 0.5, 0.987654321):
        before = 1 / (1 + math.exp(-1.3 * NormalDist().inv_cdf(u)))
        assert times_from_quantiles([u], 256, settings(sigmoid_scale=1.3)) == [before]


@pytest.mark.parametrize(("mean", "scale"), [(0.5, 1.0), (-1.0, 0.7), (0.0, 0.5), (0.0, 1.7)])
def test_the_quantile_function_inverts_the_distribution_function(mean: float, scale: float) -> None:
    for u in np.linspace(0.001, 0.999, 199):
        t = quantile_to_time(float(u), "logit_normal", scale, mean)
        assert logit_normal_cdf(t, scale, mean) == pytest.approx(u, abs=1e-7)
    assert quantile_to_time(0.5, "logit_normal", scale, mean) == pytest.approx(1 / (1 + math.exp(-mean)))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_share_of_the_times_is_uniform(share: float) -> None:
    """The quantile function inverts the distribution function of the mixture, so quantiles stay in order."""
    quantiles = [1e-12, 0.001, 0.1, 0.3, 0.5, 0.9, 0.999, 1 - 1e-12]
    times = [quantile_to_time(u, "logit_normal", 0.8, 0.3, share) for u in quantiles]
    assert all(0 < early < late < 1 for early, late in pairwise(times))
    for u, t in zip(quantiles[1:-1], times[1:-1], strict=True):
        assert share * t + (1 - share) * logit_normal_cdf(t, 0.8, 0.3) == pytest.approx(u, abs=1e-9)
