"""The arithmetic of averages: a decay that ramps up, and EDM2's power functions.

At time t a power function (Karras et al. 2024, section 3.1 and appendix C) weighs the weights of time tau by
p(tau) = (gamma + 1) tau^gamma / t^(gamma + 1), a profile that grows with training. It is named by its width sigma_rel:
the profile's standard deviation as a share of t.
"""

import math

import numpy as np

MAX_SIGMA_REL = 1 / 12**0.5
"""sigma_rel of the plain mean over all of training (gamma = 0), the widest profile with gamma >= 0."""


def gamma_from_sigma_rel(sigma_rel: float) -> float:
    """Return the exponent for the width ``sigma_rel``: the root of (gamma+2)^2 (gamma+3) sigma^2 = gamma+1."""
    assert 0 < sigma_rel <= MAX_SIGMA_REL, sigma_rel
    inverse = sigma_rel**-2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return max(0.0, float(roots.real.max()))


def decay_at(step: int, update_every: int, gamma: float) -> float:
    """Return the decay of the update at ``step``, which represents ``update_every`` steps; 0 for the first update.

    The values of steps u, 2u, ..., t then weigh ((k u)^(gamma+1) - ((k-1) u)^(gamma+1)) / t^(gamma+1): the profile's
    integral over the steps that each represents, with sum 1.
    """
    return float(max(0.0, 1.0 - update_every / step) ** (gamma + 1)) if step > 0 else 0.0


def ramped_decay(step: int, update_every: int, decay: float) -> float:
    """Return the decay of the update at ``step`` of an average that ramps up to ``decay``."""
    done = max(0, step // update_every - 1)  # updates before this one
    return min(decay, (1 + done) / (10 + done))


def ramp_end(update_every: int, decay: float) -> int:
    """Return the step from which on `ramped_decay` is ``decay``."""
    done = max(0, math.ceil((10 * decay - 1) / (1 - decay) - 1e-6))
    return (done + 1) * update_every


def inner_products(times_a: np.ndarray, gammas_a: np.ndarray, times_b: np.ndarray, gammas_b: np.ndarray) -> np.ndarray:
    """Return the integrals of p_a p_b over time, [A, B], in closed form: both are powers up to their earlier time."""
    t_a = times_a[:, None]
    g_a = gammas_a[:, None]
    t_b = times_b[None, :]
    g_b = gammas_b[None, :]
    early = np.minimum(t_a, t_b)
    late = np.maximum(t_a, t_b)
    power = np.where(t_a < t_b, g_b, g_a)
    return np.asarray((g_a + 1) * (g_b + 1) / (g_a + g_b + 1) * (early / late) ** power / late)
