"""Post-hoc EMA: averages of any length from snapshots of power-function averages (EDM2, appendix C.2).

A snapshot is an average with a known profile over training time, so a weighted sum of snapshots is an average whose
profile is the weighted sum of theirs. The coefficients are the closed-form least-squares fit to the target profile.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd3_light.config import EmaConfig
from sd3_light.optim.power_function import MAX_SIGMA_REL, gamma_from_sigma_rel, inner_products

DEFAULT_SNAPSHOTS = 32
ROUNDING = {"float16": 2.0**-11, "float32": 2.0**-24}
"""Largest relative rounding error of a snapshot, by its dtype."""

# Limits of `Fit.is_good`: a mismatch as between two lengths 10% apart, and the noise of saving the result in bfloat16.
MAX_MISMATCH = 0.1
MAX_NOISE = 2.0**-8


@dataclass(frozen=True)
class Snapshot:
    """A saved track: ``time`` is the last step that it includes, ``gamma`` the exponent of its profile."""

    step: int
    track: str
    time: int
    gamma: float
    dtype: str


@dataclass(frozen=True)
class Fit:
    """Coefficients of the snapshots, and the error of their sum.

    ``mismatch``: distance of the profiles, relative to the target's norm. ``noise``: the snapshots' rounding errors in
    the sum, relative to the weights.
    """

    coefficients: tuple[float, ...]
    mismatch: float
    noise: float

    @property
    def is_good(self) -> bool:
        """Whether the sum is close enough to the target."""
        return self.mismatch <= MAX_MISMATCH and self.noise <= MAX_NOISE


# --- snapshots ---------------------------------------------------------------------


def snapshot_interval(config: EmaConfig, total_steps: int) -> int | None:
    """Return the steps between two snapshots in a run of ``total_steps``; None without power-function tracks."""
    if not config.enable or not power_tracks(config):
        return None
    return config.snapshot_every_n_steps or max(1, -(-total_steps // DEFAULT_SNAPSHOTS))


def power_tracks(config: EmaConfig) -> dict[str, float]:
    """Return name -> sigma_rel of the power-function tracks, of which snapshots are saved."""
    return {track.name: track.power_width for track in config.track if track.power_width is not None}


def snapshot_metadata(config: EmaConfig, step: int) -> dict[str, Any]:
    """Return the metadata of a snapshot after ``step`` steps, stored beside its tensors ``ema.TRACK/NAME``."""
    widths = power_tracks(config)
    every = {track.name: track.update_every or config.update_every for track in config.track if track.name in widths}
    return {"step": step, "tracks": widths, "update_every": every, "dtype": config.snapshot_dtype}


def parse_snapshots(metadata: Mapping[str, Any]) -> list[Snapshot]:
    """Return the snapshots that `snapshot_metadata` describes, without tracks that were not updated yet."""
    snapshots = []
    for track, sigma_rel in metadata["tracks"].items():
        time = metadata["step"] - metadata["step"] % metadata["update_every"][track]
        if time > 0:
            snapshots.append(
                Snapshot(metadata["step"], track, time, gamma_from_sigma_rel(sigma_rel), metadata["dtype"])
            )
    return snapshots


# --- the fit ----------------------------------------------------------------------------------


def solve(snapshots: Sequence[Snapshot], time: int, sigma_rel: float) -> Fit:
    """Return the fit of ``snapshots`` to the average of width ``sigma_rel`` over the steps 1 to ``time``."""
    return _fits(snapshots, time, [sigma_rel])[0]


def reachable_widths(snapshots: Sequence[Snapshot], time: int) -> tuple[float, float] | None:
    """Return the smallest and largest sigma_rel that can be reconstructed; None if there is none."""
    lengths = np.geomspace(2e-3, MAX_SIGMA_REL, 200)
    good = [
        float(length)
        for length, fit in zip(lengths, _fits(snapshots, time, lengths.tolist()), strict=True)
        if fit.is_good
    ]
    return (good[0], good[-1]) if good else None


def _fits(snapshots: Sequence[Snapshot], time: int, lengths: Sequence[float]) -> list[Fit]:
    """Solve least squares with coefficients that sum to 1, so that constant weights are reproduced exactly.

    The objective is (mismatch / MAX_MISMATCH)^2 + (noise / MAX_NOISE)^2. Without the second term, small widths and
    snapshots of nearly the same time would get huge coefficients that cancel and amplify rounding errors.
    """
    assert snapshots, "no snapshots"
    assert time > 0, time
    times = np.array([s.time for s in snapshots]) / time
    gammas = np.array([s.gamma for s in snapshots])
    targets = np.array([gamma_from_sigma_rel(length) for length in lengths])
    ones = np.ones_like(targets)
    products = inner_products(times, gammas, times, gammas)
    sides = inner_products(times, gammas, ones, targets)
    rounding = max(ROUNDING[s.dtype] for s in snapshots)
    ridge = (rounding * MAX_MISMATCH / MAX_NOISE) ** 2 * np.eye(len(times))
    fits = []
    for side, gamma in zip(sides.T, targets, strict=True):
        norm2 = (gamma + 1) ** 2 / (2 * gamma + 1)
        free, drift = np.linalg.solve(products / norm2 + ridge, np.stack([side / norm2, np.ones_like(side)], axis=1)).T
        x = free + drift * (1 - free.sum()) / drift.sum()
        mismatch2 = 1 + (x @ products @ x - 2 * x @ side) / norm2
        noise = rounding * float(np.linalg.norm(x))
        fits.append(Fit(tuple(map(float, x)), float(np.sqrt(max(0.0, mismatch2))), noise))
    return fits


def combine(fit: Fit, readers: Sequence[Callable[[str], Tensor]], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield (NAME, float32 tensor) of the sum; ``readers`` read NAME from each snapshot.

    Holds one float64 tensor and one tensor of one snapshot at a time.
    """
    for name in names:
        total: Tensor | None = None
        for coefficient, read in zip(fit.coefficients, readers, strict=True):
            term = read(name).to(torch.float64).mul_(coefficient)
            total = term if total is None else total.add_(term)
        assert total is not None
        yield name, total.to(torch.float32)
