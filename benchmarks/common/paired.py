"""Paired differences between two trainings that drew the same prompts with the same seeds, with their standard error.

An outcome is whether the image of a prompt is right. Seeds and prompts are both samples of many, so the error of the
mean has a part of each: var(seed) / S + var(prompt) / P + var(rest) / (S P), by the mean squares of a two-way table.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ENOUGH = 2.0
"""Standard errors that a difference needs to be called one."""
Outcomes = Mapping[int, Sequence[bool]]
"""Training seed -> whether each prompt is right."""


@dataclass(frozen=True)
class Difference:
    """The mean difference over seeds and prompts, its standard error (None: unknown), and the number of seeds."""

    mean: float
    error: float | None
    seeds: int

    @property
    def verdict(self) -> str:
        """Return `better` or `worse` for at least two seeds and two standard errors, otherwise `undecided`."""
        if self.seeds < 2 or self.error is None or self.mean == 0 or abs(self.mean) < ENOUGH * self.error:
            return "undecided"
        return "better" if self.mean > 0 else "worse"

    def __str__(self) -> str:
        error = "?" if self.error is None else f"{self.error:.3f}"
        return f"{self.mean:+.3f} ± {error}"


def differences(row: Outcomes, base: Outcomes) -> NDArray[np.float64]:
    """Return row - base of the seeds that both have, [seed, prompt]."""
    seeds = sorted(set(row) & set(base))
    pairs = [np.asarray(row[seed], dtype=float) - np.asarray(base[seed], dtype=float) for seed in seeds]
    return np.stack(pairs) if pairs else np.zeros((0, 0))


def seed_variance(table: NDArray[np.float64]) -> float | None:
    """Return the variance between seeds of a table of differences, without that of its prompts; None for one seed."""
    seeds, prompts = table.shape
    if seeds < 2:
        return None
    return float(max(0.0, table.mean(1).var(ddof=1) - _residual(table) / prompts))


def pooled_seed_variance(tables: Iterable[NDArray[np.float64]]) -> float | None:
    """Return the mean variance between seeds of several rows, weighted by their seeds less one; None without any.

    Two or three seeds of one row may agree by chance; those of all rows together say how far seeds usually differ.
    """
    known = [(seed_variance(table), table.shape[0] - 1) for table in tables]
    weights = sum(weight for variance, weight in known if variance is not None)
    return sum(variance * weight for variance, weight in known if variance is not None) / weights if weights else None


def compare(table: NDArray[np.float64], pooled: float | None = None) -> Difference | None:
    """Return the difference of a table, None if it is empty. The seeds' part is at least the ``pooled`` variance."""
    seeds, prompts = table.shape
    if seeds == 0 or prompts < 2:
        return None
    mean = float(table.mean())
    own = seed_variance(table)
    if own is None and pooled is None:
        return Difference(mean, None, seeds)
    between = max(own or 0.0, pooled or 0.0)
    if seeds == 1:
        return Difference(mean, math.sqrt(between + table.var(ddof=1) / prompts), seeds)
    rest = _residual(table)
    of_prompts = max(0.0, table.mean(0).var(ddof=1) - rest / seeds)
    return Difference(mean, math.sqrt(between / seeds + of_prompts / prompts + rest / (seeds * prompts)), seeds)


def _residual(table: NDArray[np.float64]) -> float:
    """Return the variance that neither seeds nor prompts explain."""
    rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    return float((rest**2).sum() / ((table.shape[0] - 1) * (table.shape[1] - 1)))
