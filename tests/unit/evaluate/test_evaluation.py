"""Evaluation sets: every sample counts once."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sd3_light.core.batch import Batch
from sd3_light.engines import Launch
from sd3_light.evaluate.validation import FIXED_TIMES, QUANTILES
from sd3_light.evaluate.validation_loss import Evaluator
from sd3_light.flow.timesteps import FixedTime
from tests.project import NUM_IMAGES, Project

pytestmark = pytest.mark.usefixtures("one_thread")


class Bare:
    """Prepares nothing but the ids of the samples."""

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        return Batch(len(batch["sample_id"]), {"ids": batch["sample_id"]})

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
    evaluator = Evaluator(loaded, Launch(), engine, Times())
    points = [batch["point"].tolist() for batch in evaluator._loader("held out")]
    both = [pytest.approx([0.0, u]) for u in QUANTILES] + [pytest.approx([1.0, t]) for t in FIXED_TIMES]
    assert points == both * 3, "every batch at each of them"


class Times(Bare):
    """Prepares the quantile or time of the batch."""

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        point = torch.tensor([isinstance(timestep_quantile, FixedTime), timestep_quantile])
        return Batch(len(batch["sample_id"]), {"point": point})
