"""Timesteps on the path from data (t = 0) to noise (t = 1).

A quantile u in (0, 1) is mapped through the inverse distribution function, so that training (random u per sample) and
validation (fixed u) share one formula.
"""

import math
import sys
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sd3_light.model.base_values import FLUX_LINE, ShiftLine
from sd3_light.randomness import first_words, uniforms

_NORMAL = NormalDist()


def open_interval(u: float) -> float:
    """Return u, moved inside (0, 1)."""
    return min(max(u, 1e-12), 1 - 1e-12)


def drawn_quantiles(seed: int, words: NDArray[np.int64]) -> list[float]:
    """Return the quantile that each occurrence of a sample draws; ``words`` are `randomness.occurrence_words`."""
    return [open_interval(value) for value in uniforms(first_words(seed, "timestep", words)[0]).tolist()]


class FixedTime(float):
    """A time t in (0, 1) in the place of a quantile: no distribution and no shift applies to it."""


def quantile_to_time(
    u: float, method: str, sigmoid_scale: float = 1.0, logit_mean: float = 0.0, uniform_share: float = 0.0
) -> float:
    """Return t for a quantile of `uniform`, or of `logit_normal` mixed with a share of uniform times.

    The logit of t is normal with mean ``logit_mean`` and deviation ``sigmoid_scale``.
    """
    if method == "uniform":
        return u
    assert method == "logit_normal", method
    if uniform_share:
        return _mixture_time(u, sigmoid_scale, logit_mean, uniform_share)
    return 1 / (1 + math.exp(-(logit_mean + sigmoid_scale * _NORMAL.inv_cdf(u))))


def _mixture_time(u: float, scale: float, mean: float, share: float) -> float:
    """Return t with share * t + (1 - share) * CDF(t) = u, by bisection to the precision of a double."""
    low = 0.0
    high = 1.0
    while low < (t := (low + high) / 2) < high:
        below = share * t + (1 - share) * _NORMAL.cdf((math.log(t / (1 - t)) - mean) / scale)
        low, high = (t, high) if below < u else (low, t)
    return min(high, 1 - sys.float_info.epsilon)


def shift_time(t: float, shift: float) -> float:
    """Return s t / (1 + (s - 1) t); a shift s > 1 trains more on noise (Esser et al. 2024, section 5.3.2)."""
    return shift * t / (1 + (shift - 1) * t)


def resolution_shift(tokens: int, line: ShiftLine = FLUX_LINE) -> float:
    """Return the shift exp(mu), with mu linear in the image tokens: Flux's from 0.5 at 256 to 1.15 at 4096."""
    base_shift, max_shift, base_tokens, max_tokens = line
    return math.exp(base_shift + (max_shift - base_shift) * (tokens - base_tokens) / (max_tokens - base_tokens))


def sqrt_shift(tokens: int) -> float:
    """Return sqrt(tokens / 256): 1 at 256 px, 2 at 512 px, 4 at 1024 px (Esser et al. 2024, equation 23)."""
    return math.sqrt(tokens / 256)


def constant_shift(settings: Any, tokens: int) -> float | None:
    """Return the shift of a sampler for images with ``tokens`` tokens; None without one, or if it is `flux_shift`."""
    shift: float | None = settings.shift
    return sqrt_shift(tokens) if settings.sqrt_shift else shift


def times_from_quantiles(
    quantiles: Sequence[float], tokens: int, settings: Any, line: ShiftLine = FLUX_LINE
) -> list[float]:
    """Return the times of a batch whose images have ``tokens`` tokens.

    ``settings`` has the config's keys of timesteps: `timestep_sample_method`, `sigmoid_scale`, `logit_mean`,
    `uniform_share` and the shifts; ``line`` the numbers of `flux_shift`.
    """
    factor = resolution_shift(tokens, line) if settings.flux_shift else constant_shift(settings, tokens)
    shape = settings.timestep_sample_method, settings.sigmoid_scale, settings.logit_mean, settings.uniform_share

    def time(u: float) -> float:
        if isinstance(u, FixedTime):
            return u
        t = quantile_to_time(u, *shape)
        return t if factor is None else shift_time(t, factor)

    return [time(u) for u in quantiles]
