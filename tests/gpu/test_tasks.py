"""Batches of a task on a GPU: the losses of single samples, and no wait for the device before the backward pass."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.engines.prefetch import pin_host_memory, prefetch_steps
from sd3_light.runlog import read_log
from sd3_light.tasks import ModelLogger, launch_training_task
from sd3_light.tasks.models import UnitModel
from sd3_light.tasks.prepare import rows_of
from tests.unit.tasks.test_process import Texts, processed
from tests.unit.tasks.test_stacking import CASES, losses, micro_batches, samples, unstacked

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("case", CASES)
def test_prefetched_batches_have_the_losses_of_their_samples(case: str) -> None:
    make, new_model = CASES[case]
    model = new_model().to(CUDA)
    expected = losses(model, (unstacked(batch) for batch in micro_batches(model, make)))
    steps: Iterator[Any] = prefetch_steps(micro_batches(model, make, 2, pin_host_memory), 2, CUDA)
    actual = losses(model, (batch for step in steps for batch in step))
    assert len(actual) == 8
    for pair, other in zip(actual, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, other, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_forward_pass_does_not_wait_for_the_device(case: str) -> None:
    make, new_model = CASES[case]
    model = new_model().to(CUDA)
    with model.fixed_units():
        batch = model.preparer(pin=True).prepare_inputs(rows_of(samples(make)))
        trained = UnitModel(model)
        trained(batch)  # the first pass may set up libraries
        torch.cuda.set_sync_debug_mode("error")
        try:
            trained(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("residence", ["auto", "device"])
def test_shards_on_the_device_have_the_losses_of_the_stream(tmp_path: Path, residence: str) -> None:
    data = processed(tmp_path / "cache")

    def losses_of(name: str, where: str) -> list[float]:
        settings: dict[str, Any] = {"engine": "torch", "num_epochs": 2, "batch_size": 3, "cache_residence": where}
        launch_training_task(None, data, Texts(), ModelLogger(tmp_path / name), **settings)
        return [event["loss"] for event in read_log(tmp_path / name / "log.jsonl") if event["event"] == "step"]

    assert losses_of(residence, residence) == pytest.approx(losses_of("stream", "stream"), rel=1e-5)
