"""The validation loss: fixed noise at fixed quantiles of t, one number each, the same whenever it is computed."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import Dataset

from sd3_light.data.loader import Prepared, PreparesInputs
from sd3_light.data.stream import Batch

QUANTILES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class AtQuantiles(Dataset[tuple[Batch, float]]):
    """Every batch of a data set at every quantile: item ``batch * len(QUANTILES) + quantile``.

    The batch read last is kept, as the items that follow are of the same one.
    """

    def __init__(self, batches: Dataset[Batch], count: int) -> None:
        self.batches, self.count = batches, count
        self._last: tuple[int, Batch] | None = None

    def __len__(self) -> int:
        return self.count * len(QUANTILES)

    def __getitem__(self, item: int) -> tuple[Batch, float]:
        number, quantile = divmod(item, len(QUANTILES))
        if self._last is None or self._last[0] != number:
            self._last = None  # no two at a time
            self._last = (number, self.batches[number])
        return self._last[1], QUANTILES[quantile]


class EvalPreparer:
    """Prepares the items of `AtQuantiles` by a model's own `prepare_inputs`."""

    def __init__(self, model: PreparesInputs) -> None:
        self.model = model

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Prepared:
        """The batch of an item at its quantile."""
        return self.model.prepare_inputs(*batch)


def validate(prepared: Iterable[Prepared], evaluate: Callable[[Prepared], dict[str, float]]) -> dict[str, float]:
    """``flow@Q`` for every quantile and their mean ``flow``, over the prepared items of `AtQuantiles`."""
    totals = [0.0] * len(QUANTILES)
    count = 0
    for item in prepared:
        totals[count % len(QUANTILES)] += evaluate(item)["flow"]
        count += 1
    assert count, "an evaluation set has at least one batch"
    assert count % len(QUANTILES) == 0
    batches = count // len(QUANTILES)
    losses = {f"flow@{quantile}": total / batches for quantile, total in zip(QUANTILES, totals, strict=True)}
    return {**losses, "flow": sum(losses.values()) / len(losses)}
