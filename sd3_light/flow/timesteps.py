"""Timesteps on the path from data (t = 0) to noise (t = 1).

A quantile u in (0, 1) is mapped through the inverse distribution function, so that training (random u per sample) and
validation (fixed u) share one formula.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

_NORMAL = NormalDist()


def open_interval(u: float) -> float:
    """Return u, moved inside (0, 1)."""
    return min(max(u, 1e-12), 1 - 1e-12)


def quantile_to_time(u: float, method: str, sigmoid_scale: float = 1.0) -> float:
    """Return t for a quantile: `uniform`, or `logit_normal` with mean 0 and deviation ``sigmoid_scale``."""
    if method == "uniform":
        return u
    assert method == "logit_normal", method
    return 1 / (1 + math.exp(-sigmoid_scale * _NORMAL.inv_cdf(u)))


def shift_time(t: float, shift: float) -> float:
    """Return s t / (1 + (s - 1) t); a shift s > 1 trains more on noise (Esser et al. 2024, section 5.3.2)."""
    return shift * t / (1 + (shift - 1) * t)


def resolution_shift(tokens: int) -> float:
    """Return Flux's shift exp(mu), with mu linear in the image tokens from 0.5 at 256 to 1.15 at 4096."""
    return math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))


def times_from_quantiles(
    quantiles: Sequence[float], tokens: int, method: str, sigmoid_scale: float, shift: float | None, flux_shift: bool
) -> list[float]:
    """Return the times of a batch whose images have ``tokens`` tokens."""
    factor = resolution_shift(tokens) if flux_shift else shift
    raw = [quantile_to_time(u, method, sigmoid_scale) for u in quantiles]
    return raw if factor is None else [shift_time(t, factor) for t in raw]
