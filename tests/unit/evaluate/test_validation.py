"""The validation loss: every batch at every quantile, read once, independent of the number of workers."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from sd3_light.core.batch import Batch
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.engines.protocol import loss_sums
from sd3_light.evaluate.validation import FIXED_TIMES, QUANTILES, EvalPreparer, QuantileBatches, validate


class Numbered(Dataset[Any]):
    """Batches that contain their number; records how often each is read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        self.read.append(item)
        repeat = torch.tensor([0, 1]) if item == 2 else torch.tensor([0, 0])
        return {"number": torch.tensor([float(item), 50.0 if item == 2 else float(item)]), "repeat": repeat}


class Model:
    def prepare_inputs(self, batch: dict[str, torch.Tensor], timestep_quantile: float | None = None) -> Any:
        number = batch["number"]
        return Batch(len(number), {"number": number, "quantile": torch.tensor([timestep_quantile])})


class InPlace(Model):
    """Prepares into given memory."""

    def prepare_into(
        self, batch: Any, empty: Callable[..., torch.Tensor], timestep_quantile: float | None = None
    ) -> Any:
        prepared = self.prepare_inputs(batch, timestep_quantile)
        number = prepared["number"]
        return prepared.with_values({"number": empty(tuple(number.shape), number.dtype).copy_(number)})


def loss(prepared: Any) -> torch.Tensor:
    number, weight = prepared["number"], prepared["weight"]
    return loss_sums(number + 10 * prepared["quantile"], weight)


@pytest.mark.parametrize(("workers", "in_place"), [(0, False), (2, False), (2, True)])
def test_every_quantile_is_the_mean_over_all_samples(workers: int, in_place: bool) -> None:
    """A repeated sample fills the last batch and is not counted."""
    batches, preparer = QuantileBatches(Numbered(), 3), EvalPreparer(InPlace())
    keys: dict[str, Any] = {"prepare_into": preparer.prepare_into} if in_place else {}
    loader = PipelineDataLoader(batches, None, 1, preparer, num_dataloader_workers=workers, **keys)
    losses = validate(loader, loss)
    assert set(losses) == {"flow", "flow_se", *(f"flow@{quantile}" for quantile in QUANTILES)}
    for quantile in QUANTILES:
        assert losses[f"flow@{quantile}"] == pytest.approx((0 + 0 + 1 + 1 + 2) / 5 + 10 * quantile)
    assert losses["flow"] == pytest.approx(5.8)
    assert losses["flow_se"] == pytest.approx(statistics.stdev([0, 0, 1, 1, 2]) / 5**0.5)


def test_fixed_times_have_their_own_names_and_mean() -> None:
    points = (*QUANTILES, *FIXED_TIMES)
    batches = QuantileBatches(Numbered(), 3, points)
    losses = validate(PipelineDataLoader(batches, None, 1, EvalPreparer(InPlace())), loss, points=points)
    quantiles = validate(PipelineDataLoader(QuantileBatches(Numbered(), 3), None, 1, EvalPreparer(InPlace())), loss)
    assert {name: value for name, value in losses.items() if name.startswith("flow")} == quantiles
    assert {name for name in losses if name not in quantiles} == {
        "fixed",
        "fixed_se",
        *(f"fixed@{time}" for time in QUANTILES),
    }
    assert losses["fixed@0.3"] == losses["flow@0.3"], "this model does not tell them apart"
    assert losses["fixed"] == losses["flow"]


def test_ranks_are_summed_and_batches_read_once() -> None:
    values = {"number": torch.zeros(1), "quantile": torch.zeros(1), "weight": torch.ones(1)}
    items = [Batch(1, values)] * len(QUANTILES)
    other_rank = torch.tensor([6.0, 2.0, 18.0])
    losses = validate(items, loss, lambda sums: sums + other_rank)
    assert losses["flow"] == pytest.approx(2.0), "6 over 3 samples, not the mean of 0 and 3"
    assert losses["flow_se"] == pytest.approx(statistics.stdev([0, 3, 3]) / 3**0.5)
    numbered = Numbered()
    list(PipelineDataLoader(QuantileBatches(numbered, 3), None, 1, EvalPreparer(InPlace())))
    assert numbered.read == [0, 1, 2]
    with pytest.raises(AssertionError):
        validate([], loss)
    values = {"number": torch.ones(1), "quantile": torch.zeros(1), "weight": torch.ones(1)}
    assert math.isnan(validate([Batch(1, values)] * len(QUANTILES), loss)["flow_se"])
