"""The fast blocks with sharded weights (FSDP2): two processes train, accumulate and resume like one."""

from typing import Any

import pytest
import torch

from sd3_light.checkpoint.reading import open_checkpoint
from tests.distributed.test_two_processes import checkpoint, torchrun
from tests.project import Project

STEPS = 4
RESUMED = 2
SHARDED: dict[str, Any] = {"parallel": '"fsdp2"', "fast": "true", "micro_batch_size_per_gpu": 2}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """The reference: one process with the fast blocks, batches of 4."""
    project = cached_project.copy(tmp_path_factory.mktemp("alone") / "project")
    project.train('output_dir="alone"', "fast=true", f"checkpoint_every_n_steps={RESUMED}")
    return project


def curve(project: Project, run: str, first: int = 0) -> list[float]:
    """Return loss and gradient norm of every step after ``first``."""
    events = [event for event in project.events("step", run) if event["step"] > first]
    assert [event["step"] for event in events] == list(range(first + 1, STEPS + 1))
    return [number for event in events for number in (event["loss"], event["grad_norm"])]


def test_two_processes_train_like_one(alone: Project) -> None:
    text = torchrun(alone, output_dir='"sharded"', **SHARDED)
    assert "blocks: fast kernels" in text
    assert curve(alone, "sharded") == pytest.approx(curve(alone, "alone"), rel=1e-4)
    one, two = (open_checkpoint(checkpoint(alone, STEPS, run)) for run in ("alone", "sharded"))
    assert one.shapes == two.shapes
    for name in one.shapes:
        if name.startswith("param/"):
            torch.testing.assert_close(two.tensor(name), one.tensor(name), rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
def test_recomputed_and_accumulated_micro_batches_resume(alone: Project) -> None:
    keys = {**SHARDED, "activation_checkpointing": "true", "micro_batch_size_per_gpu": 1}
    keys["gradient_accumulation_steps"] = 2
    start = str(checkpoint(alone, RESUMED, "alone"))
    torchrun(alone, "--resume_from_checkpoint", start, output_dir='"resumed"', **keys)
    assert curve(alone, "resumed", RESUMED) == pytest.approx(curve(alone, "alone", RESUMED), rel=1e-4)
