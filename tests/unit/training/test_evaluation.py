"""Evaluation sets: every sample counts once."""

from dataclasses import replace
from typing import Any

import torch

from sd3_light.engines import Launch
from sd3_light.metrics.validation import QUANTILES
from sd3_light.training.evaluation import Evaluator
from tests.project import NUM_IMAGES, Project


class Bare:
    """Prepares nothing but the ids of the samples."""

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        return (batch["sample_id"],), (None, None)

    def prepare_into(self, batch: Any, empty: Any, timestep_quantile: float | None = None) -> Any:
        return self.prepare_inputs(batch)


def test_small_buckets_are_evaluated_even_if_training_drops_them(cached_project: Project) -> None:
    loaded = cached_project.load("small_buckets='drop'", "eval_micro_batch_size_per_gpu=32")
    loaded = replace(loaded, eval_datasets={"held out": loaded.dataset})
    engine: Any = None
    ids: list[int] = []
    for (numbers,), (*_, weights) in Evaluator(loaded, Launch(), engine, Bare())._loader("held out"):
        ids += numbers[weights.bool()].tolist()
    assert torch.unique(torch.tensor(ids)).numel() == NUM_IMAGES
    assert len(ids) == NUM_IMAGES * len(QUANTILES)
