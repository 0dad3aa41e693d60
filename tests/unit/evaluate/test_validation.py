"""The validation loss: every sample of every set counts once, at every quantile and fixed time, for any workers."""

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from sd3_light.core.batch import Batch
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.engines import Launch
from sd3_light.engines.protocol import loss_sums
from sd3_light.evaluate.validation import FIXED_TIMES, QUANTILES, EvalPreparer, QuantileBatches, validate
from sd3_light.evaluate.validation_loss import Evaluator
from sd3_light.flow.timesteps import FixedTime
from tests.project import NUM_IMAGES, Project

pytestmark = pytest.mark.usefixtures("one_thread")


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
    def prepare_into(self, batch: Any, empty: Any, timestep_quantile: float | None = None) -> Any:
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
    fixed = {"fixed", "fixed_se", *(f"fixed@{time}" for time in QUANTILES)}
    assert {name for name in losses if name not in quantiles} == fixed
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


class Bare:
    """Prepares nothing but the ids of the samples, and the quantile or time of the batch."""

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        point = torch.tensor([isinstance(timestep_quantile, FixedTime), timestep_quantile])
        return Batch(len(batch["sample_id"]), {"ids": batch["sample_id"], "point": point})

    def prepare_into(self, batch: Any, empty: Any, timestep_quantile: float | None = None) -> Any:
        return self.prepare_inputs(batch, timestep_quantile)


def test_small_buckets_and_fixed_times_are_evaluated(cached_project: Project) -> None:
    loaded = cached_project.load("small_buckets='drop'", "eval_micro_batch_size_per_gpu=32")
    loaded = replace(loaded, eval_datasets={"held out": loaded.dataset})
    engine: Any = None
    ids: list[int] = []
    for batch in Evaluator(loaded, Launch(), engine, Bare())._loader("held out"):
        ids += batch["ids"][batch["weight"].bool()].tolist()
    assert torch.unique(torch.tensor(ids)).numel() == NUM_IMAGES
    assert len(ids) == NUM_IMAGES * len(QUANTILES)
    loaded = cached_project.load("eval_at_fixed_t=true", "eval_micro_batch_size_per_gpu=40")
    loaded = replace(loaded, eval_datasets={"held out": loaded.dataset})
    evaluator = Evaluator(loaded, Launch(), engine, Bare())
    points = [batch["point"].tolist() for batch in evaluator._loader("held out")]
    both = [pytest.approx([0.0, u]) for u in QUANTILES] + [pytest.approx([1.0, t]) for t in FIXED_TIMES]
    assert points == both * 3, "every batch at each of them"
