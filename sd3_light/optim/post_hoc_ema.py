"""Averages of any length after training, from snapshots of power-function averages (EDM2, appendix C.2).

A snapshot is an average with a known profile over training time, so a sum of snapshots is an average whose profile is
the sum of theirs. The coefficients are the least-squares fit of such a sum to the wanted profile, in closed form.
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
"""Largest relative rounding error of a snapshot's numbers, by its type."""

# What `Fit.is_good` accepts: a profile about as far from the wanted one as that of a length 10% away, and as much
# noise as saving the result in bfloat16 makes.
MOST_MISMATCH = 0.1
MOST_NOISE = 2.0**-8


@dataclass(frozen=True)
class Snapshot:
    """A track as it was: the last step that it took in, and the exponent of its profile."""

    step: int
    track: str
    time: int
    gamma: float
    dtype: str


@dataclass(frozen=True)
class Fit:
    """How to add up snapshots, and how far the sum is from the wanted average.

    ``mismatch``: distance of the profiles, relative to the wanted one's norm. ``noise``: what the snapshots' rounding
    amounts to in the sum, relative to the weights.
    """

    coefficients: tuple[float, ...]
    mismatch: float
    noise: float

    @property
    def is_good(self) -> bool:
        """Whether the sum may be called the wanted average."""
        return self.mismatch <= MOST_MISMATCH and self.noise <= MOST_NOISE


# --- what training writes ---------------------------------------------------------------------


def snapshot_interval(config: EmaConfig, total_steps: int) -> int | None:
    """Steps between two snapshots in a run of ``total_steps``; None without power-function tracks."""
    if not config.enable or not power_tracks(config):
        return None
    return config.snapshot_every_n_steps or max(1, -(-total_steps // DEFAULT_SNAPSHOTS))


def power_tracks(config: EmaConfig) -> dict[str, float]:
    """Name -> sigma_rel of the tracks that snapshots are taken of."""
    return {track.name: track.power_width for track in config.track if track.power_width is not None}


def snapshot_metadata(config: EmaConfig, step: int) -> dict[str, Any]:
    """What must be written beside the tensors ``ema.TRACK/NAME`` of a snapshot after ``step`` steps."""
    widths = power_tracks(config)
    every = {track.name: track.update_every or config.update_every for track in config.track if track.name in widths}
    return {"step": step, "tracks": widths, "update_every": every, "dtype": config.snapshot_dtype}


def parse_snapshots(facts: Mapping[str, Any]) -> list[Snapshot]:
    """What `snapshot_metadata` told; a track that had taken in nothing yet is left out."""
    found = []
    for track, sigma_rel in facts["tracks"].items():
        time = facts["step"] - facts["step"] % facts["update_every"][track]
        if time > 0:
            found.append(Snapshot(facts["step"], track, time, gamma_from_sigma_rel(sigma_rel), facts["dtype"]))
    return found


# --- the fit ----------------------------------------------------------------------------------


def solve(snapshots: Sequence[Snapshot], time: int, sigma_rel: float) -> Fit:
    """The sum of ``snapshots`` that is nearest to the average of length ``sigma_rel`` over the steps 1 to ``time``."""
    return _fits(snapshots, time, [sigma_rel])[0]


def reachable_widths(snapshots: Sequence[Snapshot], time: int) -> tuple[float, float] | None:
    """The shortest and the longest sigma_rel that can be rebuilt; None where none can."""
    lengths = np.geomspace(2e-3, MAX_SIGMA_REL, 200)
    good = [
        float(length)
        for length, fit in zip(lengths, _fits(snapshots, time, lengths.tolist()), strict=True)
        if fit.is_good
    ]
    return (good[0], good[-1]) if good else None


def _fits(snapshots: Sequence[Snapshot], time: int, lengths: Sequence[float]) -> list[Fit]:
    """Least squares under the condition that coefficients sum to 1, so that what does not move is kept exactly.

    Minimised is (mismatch / most allowed)^2 + (noise / most allowed)^2. Without the second term short lengths, and two
    snapshots of almost one time, have huge coefficients that cancel each other and leave the rounding errors.
    """
    assert snapshots, "nothing to add up"
    assert time > 0, time
    times, gammas = np.array([s.time for s in snapshots]) / time, np.array([s.gamma for s in snapshots])
    wanted = np.array([gamma_from_sigma_rel(length) for length in lengths])
    ones = np.ones_like(wanted)
    products, sides = inner_products(times, gammas, times, gammas), inner_products(times, gammas, ones, wanted)
    rounding = max(ROUNDING[s.dtype] for s in snapshots)
    ridge = (rounding * MOST_MISMATCH / MOST_NOISE) ** 2 * np.eye(len(times))
    fits = []
    for side, gamma in zip(sides.T, wanted, strict=True):
        norm2 = (gamma + 1) ** 2 / (2 * gamma + 1)
        free, drift = np.linalg.solve(products / norm2 + ridge, np.stack([side / norm2, np.ones_like(side)], axis=1)).T
        x = free + drift * (1 - free.sum()) / drift.sum()
        mismatch2 = 1 + (x @ products @ x - 2 * x @ side) / norm2
        noise = rounding * float(np.linalg.norm(x))
        fits.append(Fit(tuple(map(float, x)), float(np.sqrt(max(0.0, mismatch2))), noise))
    return fits


def combine(fit: Fit, readers: Sequence[Callable[[str], Tensor]], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """(NAME, float32 tensor) of the sum, one tensor after the other; ``readers`` read NAME in each snapshot.

    In memory at a time: one tensor in float64, and one of one snapshot.
    """
    for name in names:
        total: Tensor | None = None
        for coefficient, read in zip(fit.coefficients, readers, strict=True):
            term = read(name).to(torch.float64).mul_(coefficient)
            total = term if total is None else total.add_(term)
        assert total is not None
        yield name, total.to(torch.float32)
