"""Two processes, replicated or sharded, train the same LoRA as one, and resume its checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.export.lora_file import read_lora
from tests.distributed.test_two_processes import torchrun
from tests.e2e.test_lora_run import STEPS, use_adapter
from tests.project import Project

RESUMED = 2


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """The reference: one process, batches of 4, without dropout (law 1 exempts it)."""
    project = use_adapter(
        cached_project.copy(tmp_path_factory.mktemp("alone") / "project"), "rank = 3\nuse_dora = true"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.adapter_folder.prove_adapter", lambda *_: {})
        project.train('output_dir="alone"')
    return project


def numbers(project: Project, run: str, first: int = 0) -> list[float]:
    events = [event for event in project.events("step", run) if event["step"] > first]
    assert [event["step"] for event in events] == list(range(first + 1, STEPS + 1))
    return [number for event in events for number in (event["loss"], event["grad_norm"])]


def tensors(project: Project, run: str) -> dict[str, torch.Tensor]:
    saved = open_checkpoint(project.folder / run / "checkpoints" / checkpoint_name(STEPS))
    return {name: saved.tensor(name) for name in saved.shapes}


LAYOUTS = {
    "fsdp2": {"parallel": '"fsdp2"', "micro_batch_size_per_gpu": 2},
    "ddp": {"micro_batch_size_per_gpu": 2},
    "deepspeed pp2 zero1": {"pipeline_stages": 2},
    "deepspeed zero3": {"zero_stage": 3, "micro_batch_size_per_gpu": 2},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "fsdp2")) for name in LAYOUTS])
def test_two_processes_train_the_same_lora(alone: Project, name: str) -> None:
    """From one process's checkpoint at step 2 to the end; rank 3 cannot be split evenly."""
    flags = ["--deepspeed"] if name.startswith("deepspeed") else []
    if flags:
        pytest.importorskip("deepspeed")
    start = str(alone.folder / "alone" / "checkpoints" / checkpoint_name(RESUMED))
    run = name.replace(" ", "_")
    torchrun(alone, *flags, "--resume_from_checkpoint", start, output_dir=f'"{run}"', **LAYOUTS[name])
    assert numbers(alone, run, RESUMED) == pytest.approx(numbers(alone, "alone", RESUMED), rel=2e-5)
    ours, theirs = tensors(alone, run), tensors(alone, "alone")
    assert set(ours) == set(theirs)
    assert len(ours) == 5 * 3 * 31, "weight, two moments, count and average of A, B and magnitude per layer"
    assert all(torch.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-6) for name in ours)
    one, two = (read_lora(_file(alone, name)).modules for name in ("alone", run))
    assert all(torch.allclose(one[name].delta(), two[name].delta(), atol=1e-5) for name in one)


@pytest.mark.slow
def test_dropout_in_a_pipeline_resumes_exactly(cached_project: Project, tmp_path: Path) -> None:
    """Two stages with interleaved micro-batches; evaluation between steps uses no dropout and changes nothing."""
    pytest.importorskip("deepspeed")
    project = use_adapter(cached_project.copy(tmp_path / "project"), "rank = 3\ndropout = 0.4")
    settings: dict[str, Any] = {"pipeline_stages": 2, "micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    torchrun(project, "--deepspeed", output_dir='"full"', **settings)
    start = str(project.folder / "full" / "checkpoints" / checkpoint_name(RESUMED))
    torchrun(project, "--deepspeed", "--resume_from_checkpoint", start, output_dir='"resumed"', **settings)
    assert numbers(project, "resumed", RESUMED) == numbers(project, "full", RESUMED)
    plain = [*settings.items(), ("adapter.dropout", 0.0)]
    torchrun(project, "--deepspeed", output_dir='"plain"', **dict(plain))
    assert numbers(project, "plain") != numbers(project, "full"), "dropout has an effect"


def _file(project: Project, run: str) -> Path:
    return Path(project.folder / run / "exports" / checkpoint_name(STEPS) / "pytorch_lora_weights.safetensors")
