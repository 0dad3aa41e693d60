"""Where on the path from data (t = 0) to noise (t = 1) a sample trains.

A draw is a quantile u in (0, 1) sent through the inverse distribution function, so that training (u drawn per sample)
and validation (u fixed) share one formula.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

_NORMAL = NormalDist()


def quantile_to_time(u: float, method: str, sigmoid_scale: float = 1.0) -> float:
    """Inverse distribution function of t: `uniform`, or `logit_normal` with mean 0 and deviation ``sigmoid_scale``."""
    if method == "uniform":
        return u
    assert method == "logit_normal", method
    return 1 / (1 + math.exp(-sigmoid_scale * _NORMAL.inv_cdf(u)))


def shift_time(t: float, shift: float) -> float:
    """t' = s t / (1 + (s - 1) t): shift > 1 trains more on noise (Esser et al. 2024, section 5.3.2)."""
    return shift * t / (1 + (shift - 1) * t)


def resolution_shift(tokens: int) -> float:
    """Flux's shift: exp(mu), mu linear in the number of image tokens from 0.5 at 256 to 1.15 at 4096."""
    return math.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))


def times_from_quantiles(
    quantiles: Sequence[float], tokens: int, method: str, sigmoid_scale: float, shift: float | None, flux_shift: bool
) -> list[float]:
    """The times of a batch whose pictures have ``tokens`` image tokens."""
    by = resolution_shift(tokens) if flux_shift else shift
    raw = [quantile_to_time(u, method, sigmoid_scale) for u in quantiles]
    return raw if by is None else [shift_time(t, by) for t in raw]
