"""The arithmetic of power-function averages against numerical integration."""

import numpy as np
import pytest

from sd3_light.optim.power_function import (
    MAX_SIGMA_REL,
    decay_at,
    gamma_from_sigma_rel,
    inner_products,
    ramp_end,
    ramped_decay,
)

WIDTHS = [0.001, 0.02, 0.05, 0.1, 0.2, 0.28, MAX_SIGMA_REL]


def profile(tau: np.ndarray, time: float, gamma: float) -> np.ndarray:
    """p(tau) as in the paper, 0 after its time."""
    return np.where(tau <= time, (gamma + 1) * tau**gamma / time ** (gamma + 1), 0.0)


def integral(values: np.ndarray, tau: np.ndarray) -> float:
    return float(np.trapezoid(values, tau))


@pytest.mark.parametrize("width", WIDTHS)
def test_gamma_gives_the_requested_width(width: float) -> None:
    tau = np.linspace(0, 1, 2_000_001)
    p = profile(tau, 1.0, gamma_from_sigma_rel(width))
    mean = integral(p * tau, tau)
    assert integral(p, tau) == pytest.approx(1, rel=1e-5)
    assert np.sqrt(integral(p * (tau - mean) ** 2, tau)) == pytest.approx(width, rel=1e-4)
    gamma = gamma_from_sigma_rel(width)
    assert np.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2) == pytest.approx(width, rel=1e-9)


def test_figures_of_the_paper_and_one_update_for_several_steps() -> None:
    """sigma_rel 0.05 and 0.10 are gamma 16.97 and 6.94 (section 3.1)."""
    assert gamma_from_sigma_rel(0.05) == pytest.approx(16.97, abs=0.005)
    assert gamma_from_sigma_rel(0.10) == pytest.approx(6.94, abs=0.005)
    assert gamma_from_sigma_rel(MAX_SIGMA_REL) == pytest.approx(0, abs=1e-9)
    gamma = gamma_from_sigma_rel(0.1)
    one_by_one = np.prod([decay_at(step, 1, gamma) for step in range(91, 101)])
    assert decay_at(100, 10, gamma) == pytest.approx(one_by_one, rel=1e-12)
    assert decay_at(1, 1, gamma) == decay_at(10, 10, gamma) == decay_at(3, 10, gamma) == 0.0


def test_inner_products_are_the_integrals() -> None:
    times, gammas = np.array([0.3, 1.0, 1.0, 0.7]), np.array([16.97, 6.94, 0.5, 16.97])
    tau = np.linspace(0, 1, 1_000_001)
    curves = [profile(tau, time, gamma) for time, gamma in zip(times, gammas, strict=True)]
    products = inner_products(times, gammas, times, gammas)
    for i, a in enumerate(curves):
        for j, b in enumerate(curves):
            assert products[i, j] == pytest.approx(integral(a * b, tau), rel=1e-3), (i, j)
    np.testing.assert_allclose(products, products.T, rtol=1e-12)


@pytest.mark.parametrize("interval", [1, 10])
@pytest.mark.parametrize("decay", [0.0, 0.1, 0.5, 0.98, 0.999, 0.9995])
def test_a_ramp_ends_where_the_decay_is_reached(decay: float, interval: int) -> None:
    end = ramp_end(interval, decay)
    assert ramped_decay(end, interval, decay) == pytest.approx(decay)
    assert end == interval or ramped_decay(end - interval, interval, decay) < decay
