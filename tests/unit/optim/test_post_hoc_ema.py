"""Averages of any length from snapshots of two tracks, against averages from every step and integrals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sd3_light.config import EmaConfig
from sd3_light.optim import post_hoc_ema, power_function
from sd3_light.optim.ema import Averages
from sd3_light.optim.post_hoc_ema import MAX_MISMATCH, Snapshot, combine, parse_snapshots, snapshot_interval, solve
from sd3_light.optim.power_function import MAX_SIGMA_REL, decay_at, gamma_from_sigma_rel, inner_products, ramped_decay

WIDTHS = [0.001, 0.02, 0.05, 0.1, 0.2, 0.28, MAX_SIGMA_REL]
STEPS, SIZE = 1920, 64
TRACKS = ({"name": "short", "power_width": 0.05}, {"name": "long", "power_width": 0.10})


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
    end = power_function.ramp_end(interval, decay)
    assert ramped_decay(end, interval, decay) == pytest.approx(decay)
    assert end == interval or ramped_decay(end - interval, interval, decay) < decay


def config(**keys: Any) -> EmaConfig:
    return EmaConfig(**{"enable": True, "update_every": 1, "track": TRACKS, **keys})


def walk() -> np.ndarray:
    """[STEPS, SIZE] weights that drift away from 1 with noise, as in training."""
    random = np.random.default_rng(0)
    drift = np.cumsum(random.normal(size=(STEPS, SIZE)) / STEPS**0.5, axis=0)
    return 1 + 0.2 * drift + 0.05 * random.normal(size=(STEPS, SIZE))


class Trained:
    """A toy run: its weights at every step, and snapshots of its two power-function tracks."""

    def __init__(self, count: int, every: int = 1, dtype: str = "float32") -> None:
        self.path, self.every = walk(), every
        settings = config(update_every=every, snapshot_dtype=dtype, snapshot_every_n_steps=STEPS // count)
        live = {"w": torch.ones(SIZE)}
        averages = Averages(live, settings)
        self.snapshots: list[Snapshot] = []
        self.readers: list[Callable[[str], Tensor]] = []
        for step in range(1, STEPS + 1):
            live["w"].copy_(torch.from_numpy(self.path[step - 1]))
            averages.update(live, step)
            if step % (STEPS // count) == 0:
                for snapshot in parse_snapshots(post_hoc_ema.snapshot_metadata(settings, step)):
                    self.snapshots.append(snapshot)
                    saved = averages.tracks[snapshot.track].shadow["w"].to(getattr(torch, dtype), copy=True)
                    self.readers.append(lambda name, saved=saved: {"w": saved}[name])

    def directly(self, length: float, time: int = STEPS) -> np.ndarray:
        """The running average of a length, from the whole history in float64."""
        exponent, steps = gamma_from_sigma_rel(length) + 1, np.arange(self.every, time + 1, self.every)
        weights = (steps / time) ** exponent - ((steps - self.every) / time) ** exponent
        return np.asarray(weights @ self.path[steps - 1])

    def rebuilt(self, length: float, time: int = STEPS) -> np.ndarray:
        used = [(s, read) for s, read in zip(self.snapshots, self.readers, strict=True) if s.time <= time]
        fit = solve([snapshot for snapshot, _ in used], time, length)
        ((_, tensor),) = combine(fit, [read for _, read in used], ["w"])
        assert tensor.dtype == torch.float32
        return tensor.double().numpy()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Root mean square, relative to how far the weights move (about 0.2 in this toy)."""
    return float(np.sqrt(np.mean((a - b) ** 2)) / 0.2)


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained(count=8)


@pytest.mark.parametrize(
    ("length", "close"),
    [(0.03, 0.02), (0.04, 5e-3), (0.05, 1e-5), (0.07, 2e-3), (0.10, 1e-5), (0.15, 3e-3), (0.2, 0.01)],
)
def test_a_rebuilt_average_matches_the_direct_one(trained: Trained, length: float, close: float) -> None:
    direct = trained.directly(length)
    error = distance(trained.rebuilt(length), direct)
    assert error < close
    if close > 1e-3:
        nearest = min(distance(trained.directly(width), direct) for width in (0.05, 0.10))
        assert error < nearest / 5, "far better than the track that comes nearest"


def test_float16_snapshots_stay_within_the_fits_error() -> None:
    half, direct = Trained(count=32, dtype="float16"), Trained(count=32).directly
    for length in (0.03, 0.07, 0.2):
        fit = solve(half.snapshots, STEPS, length)
        assert fit.is_good
        assert distance(half.rebuilt(length), direct(length)) < fit.mismatch + 5 * fit.noise


def test_updates_every_few_steps_and_averages_of_earlier_ones(trained: Trained) -> None:
    """With 7 steps per update, the snapshot at step 240 ends at step 238."""
    assert distance(trained.rebuilt(0.07, 1440), trained.directly(0.07, 1440)) < 0.01
    coarse = Trained(count=8, every=7)
    assert [s.time for s in coarse.snapshots[:4]] == [238, 238, 476, 476]
    last = STEPS - STEPS % 7
    assert distance(coarse.rebuilt(0.07, last), coarse.directly(0.07, last)) < 0.01


def snapshots(count: int, widths: tuple[float, ...] = (0.05, 0.10), dtype: str = "float16") -> list[Snapshot]:
    steps = [1000 * number for number in range(1, count + 1)]
    return [Snapshot(step, f"{width}", step, gamma_from_sigma_rel(width), dtype) for step in steps for width in widths]


@pytest.mark.parametrize("length", [0.03, 0.05, 0.08, 0.2])
def test_coefficients_sum_to_1_and_keep_constant_weights(length: float) -> None:
    fit = solve(snapshots(8), 8000, length)
    assert sum(fit.coefficients) == pytest.approx(1, abs=1e-9)
    constant = torch.linspace(-3, 3, 10)
    ((_, tensor),) = combine(fit, [lambda _: constant] * 16, ["w"])
    torch.testing.assert_close(tensor, constant, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [0.02, 0.07, 0.25])
def test_mismatch_is_the_distance_of_the_profiles(length: float) -> None:
    saved = snapshots(6)
    fit, tau = solve(saved, 6000, length), np.linspace(0, 6000, 600_001)

    def profile(time: float, gamma: float) -> np.ndarray:
        return np.where(tau <= time, (gamma + 1) * (tau / time) ** gamma / time, 0.0)

    fitted = sum(x * profile(s.time, s.gamma) for x, s in zip(fit.coefficients, saved, strict=True))
    target = profile(6000, gamma_from_sigma_rel(length))
    distance = np.sqrt(np.trapezoid((fitted - target) ** 2, tau) / np.trapezoid(target**2, tau))
    assert fit.mismatch == pytest.approx(distance, rel=1e-2)


def test_reachable_widths() -> None:
    """The figures in the documentation for tracks of 0.05 and 0.10."""
    half, whole = (post_hoc_ema.reachable_widths(snapshots(32, dtype=f"float{bits}"), 32000) for bits in (16, 32))
    assert half == pytest.approx((0.022, 0.268), abs=0.002)
    assert whole == pytest.approx((0.0137, 0.268), abs=0.001)
    few = post_hoc_ema.reachable_widths(snapshots(8), 8000)
    assert few == pytest.approx((0.030, 0.214), abs=0.002)
    for length in few:
        assert solve(snapshots(8), 8000, length).is_good
    assert not solve(snapshots(8), 8000, few[0] * 0.9).is_good
    assert solve(snapshots(8), 8000, few[1] * 1.1).mismatch > MAX_MISMATCH
    # snapshots of nearly the same time are stable
    twins = [*snapshots(8), *(Snapshot(7999, s.track, 7999, s.gamma, s.dtype) for s in snapshots(8)[-2:])]
    same = [*snapshots(8), *snapshots(8)[-2:]]
    for saved in (twins, same):
        fit = solve(saved, 8000, 0.07)
        assert fit.is_good
        assert max(map(abs, fit.coefficients)) < 2


def test_combine_holds_one_tensor_of_one_snapshot_at_a_time() -> None:
    reads: list[tuple[int, str]] = []

    def reader(number: int) -> Callable[[str], Tensor]:
        def read(name: str) -> Tensor:
            reads.append((number, name))
            return torch.full((2,), float(number), dtype=torch.float16)

        return read

    stream = combine(post_hoc_ema.Fit((0.5, 2.0), 0.0, 0.0), [reader(1), reader(3)], ["a", "b"])
    assert reads == []
    name, tensor = next(stream)
    assert (name, tensor.tolist(), reads) == ("a", [6.5, 6.5], [(1, "a"), (3, "a")])
    next(stream)
    assert [name for _, name in reads] == ["a", "a", "b", "b"]


def test_snapshots_are_of_power_functions_only() -> None:
    assert snapshot_interval(EmaConfig(enable=True), 1000) is None
    assert snapshot_interval(config(enable=False), 1000) is None
    assert snapshot_interval(config(track=({"name": "a", "decay": 0.9},)), 1000) is None
    mixed = config(track=({"name": "a", "decay": 0.9}, *TRACKS))
    assert post_hoc_ema.power_tracks(mixed) == {"short": 0.05, "long": 0.10}
    for total, interval in ((1, 1), (31, 1), (32, 1), (33, 2), (100_000, 3125)):  # at most 32 by default
        assert snapshot_interval(config(), total) == interval
        assert snapshot_interval(config(snapshot_every_n_steps=7), total) == 7


def test_metadata_records_the_last_update_of_each_track() -> None:
    tracks = ({"name": "a", "power_width": 0.1, "update_every": 30}, {"name": "b", "power_width": 0.05})
    metadata = post_hoc_ema.snapshot_metadata(config(track=tracks, update_every=100), 250)
    expected = {"step": 250, "tracks": {"a": 0.1, "b": 0.05}, "update_every": {"a": 30, "b": 100}, "dtype": "float16"}
    assert metadata == expected
    parsed = parse_snapshots(metadata)
    assert [(s.track, s.step, s.time) for s in parsed] == [("a", 250, 240), ("b", 250, 200)]
    assert parsed[0].gamma == gamma_from_sigma_rel(0.1)
    early = parse_snapshots(post_hoc_ema.snapshot_metadata(config(track=tracks, update_every=100), 50))
    assert [s.track for s in early] == ["a"], "b was not updated yet"
