"""The validation loss: fixed noise at fixed quantiles of t, so that it is comparable across a run.

The quantiles are those of the run's own distribution of t. Fixed times compare runs with different distributions.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sd3_light.core.batch import Batch
from sd3_light.data.loader import PreparesInPlace
from sd3_light.data.slots import AllocateTensor
from sd3_light.data.stream import CachedBatch
from sd3_light.flow.timesteps import FixedTime

QUANTILES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FIXED_TIMES = tuple(FixedTime(quantile) for quantile in QUANTILES)


def eval_points(at_fixed_t: bool) -> tuple[float, ...]:
    """Return the points at which every sample is evaluated: quantiles of t, and fixed times if requested."""
    return (*QUANTILES, *(FIXED_TIMES if at_fixed_t else ()))


class QuantileBatches(Dataset[tuple[CachedBatch, float]]):
    """Every batch at every point, a quantile or fixed time: item ``batch * len(points) + point``.

    Keeps the last batch for reuse.
    """

    def __init__(self, batches: Dataset[CachedBatch], count: int, points: Sequence[float] = QUANTILES) -> None:
        self.batches = batches
        self.count = count
        self.points = points
        self._last: tuple[int, CachedBatch] | None = None

    def __len__(self) -> int:
        return self.count * len(self.points)

    def __getitem__(self, item: int) -> tuple[CachedBatch, float]:
        number, point = divmod(item, len(self.points))
        if self._last is None or self._last[0] != number:
            self._last = None  # never hold two batches
            self._last = (number, self.batches[number])
        return self._last[1], self.points[point]


@dataclass
class EvalPreparer:
    """Prepares the items of `QuantileBatches` with a model, and marks padding."""

    model: PreparesInPlace

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Batch:
        """Return the batch of an item at its quantile; its ``weight`` is 0 for padding.

        Evaluation uses each sample once, so a repeated sample only fills the last batch.
        """
        return _with_weights(batch, self.model.prepare_inputs(*batch))

    def prepare_into(self, batch: Any, empty: AllocateTensor, timestep_quantile: float | None = None) -> Batch:
        """Like `prepare_inputs`, with large tensors in memory from ``empty``."""
        return _with_weights(batch, self.model.prepare_into(batch[0], empty, batch[1]))


def _with_weights(batch: Any, prepared: Batch) -> Batch:
    return prepared.with_values({"weight": (batch[0]["repeat"] == 0).float()})


def validate(
    prepared: Iterable[Batch],
    evaluate: Callable[[Batch], Tensor],
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda numbers: numbers,
    points: Sequence[float] = QUANTILES,
) -> dict[str, float]:
    """Return ``flow@Q`` for every quantile and their mean ``flow``, over the prepared items of `QuantileBatches`.

    Fixed times among the points give ``fixed@T`` and their mean ``fixed``. ``evaluate`` returns [sum of losses, number
    of samples, sum of squared losses] of an item; they are summed on the device and read once. ``flow_se`` and
    ``fixed_se`` are standard errors: the mean over the points of the standard error at each. That is the largest that
    the mean can have, and nearly its own, because a sample's losses at all points are high or low together.
    """
    totals: list[Tensor] = []
    count = 0
    for count, item in enumerate(prepared, start=1):
        index = (count - 1) % len(points)
        sums = evaluate(item)
        if count <= len(points):
            totals.append(sums)
        else:
            totals[index] = totals[index] + sums
    assert count, "an evaluation set has at least one batch"
    assert count % len(points) == 0
    rows = sum_over_ranks(torch.stack(totals)).tolist()
    losses: dict[str, float] = {}
    for name, is_fixed in (("flow", False), ("fixed", True)):
        pairs = zip(points, rows, strict=True)
        of_points = {point: row for point, row in pairs if isinstance(point, FixedTime) is is_fixed}
        if of_points:
            group = {f"{name}@{point}": loss / number for point, (loss, number, _) in of_points.items()}
            errors = [_standard_error(*row) for row in of_points.values()]
            losses |= {**group, name: sum(group.values()) / len(group), f"{name}_se": sum(errors) / len(errors)}
    return losses


def _standard_error(total: float, number: float, squares: float) -> float:
    """Return the standard error of a mean; nan for a single value."""
    if number < 2:
        return math.nan
    return math.sqrt(max(0.0, squares - total * total / number) / (number - 1) / number)
