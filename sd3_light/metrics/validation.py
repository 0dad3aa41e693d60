"""The validation loss: fixed noise at fixed quantiles of t, so that it is comparable across a run."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sd3_light.data.loader import PreparedBatch, PreparesInPlace
from sd3_light.data.slots import AllocateTensor
from sd3_light.data.stream import CachedBatch

QUANTILES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class QuantileBatches(Dataset[tuple[CachedBatch, float]]):
    """Every batch at every quantile: item ``batch * len(QUANTILES) + quantile``. Keeps the last batch for reuse."""

    def __init__(self, batches: Dataset[CachedBatch], count: int) -> None:
        self.batches, self.count = batches, count
        self._last: tuple[int, CachedBatch] | None = None

    def __len__(self) -> int:
        return self.count * len(QUANTILES)

    def __getitem__(self, item: int) -> tuple[CachedBatch, float]:
        number, quantile = divmod(item, len(QUANTILES))
        if self._last is None or self._last[0] != number:
            self._last = None  # never hold two batches
            self._last = (number, self.batches[number])
        return self._last[1], QUANTILES[quantile]


class EvalPreparer:
    """Prepares the items of `QuantileBatches` with a model, and marks padding."""

    def __init__(self, model: PreparesInPlace) -> None:
        self.model = model

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> PreparedBatch:
        """Return the batch of an item at its quantile; the label's last tensor weighs samples, 0 for padding.

        Evaluation uses each sample once, so a repeated sample only fills the last batch.
        """
        return _with_weights(batch, self.model.prepare_inputs(*batch))

    def prepare_into(self, batch: Any, empty: AllocateTensor, timestep_quantile: float | None = None) -> PreparedBatch:
        """Like `prepare_inputs`, with large tensors in memory from ``empty``."""
        return _with_weights(batch, self.model.prepare_into(batch[0], empty, batch[1]))


def _with_weights(batch: Any, prepared: PreparedBatch) -> PreparedBatch:
    features, label = prepared
    return features, (*label, (batch[0]["repeat"] == 0).float())


def validate(
    prepared: Iterable[PreparedBatch],
    evaluate: Callable[[PreparedBatch], Tensor],
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda numbers: numbers,
) -> dict[str, float]:
    """Return ``flow@Q`` for every quantile and their mean ``flow``, over the prepared items of `QuantileBatches`.

    ``evaluate`` returns [sum of losses, number of samples] of an item; they are summed on the device and read once.
    """
    totals: list[Tensor] = []
    count = 0
    for count, item in enumerate(prepared, start=1):
        index, sums = (count - 1) % len(QUANTILES), evaluate(item)
        if count <= len(QUANTILES):
            totals.append(sums)
        else:
            totals[index] = totals[index] + sums
    assert count, "an evaluation set has at least one batch"
    assert count % len(QUANTILES) == 0
    all_sums = sum_over_ranks(torch.stack(totals)).tolist()
    losses = {f"flow@{quantile}": loss / number for quantile, (loss, number) in zip(QUANTILES, all_sums, strict=True)}
    return {**losses, "flow": sum(losses.values()) / len(losses)}
