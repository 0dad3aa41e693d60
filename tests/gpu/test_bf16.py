"""On a GPU: bf16 compute with fp32 weights, close to fp32 results."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import read_checkpoint
from tests.project import Project


@pytest.fixture
def without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the proof of exports, which runs on the CPU anyway."""
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})


def train(project: Project, name: str, dtype: str, *overrides: str) -> dict[int, float]:
    project.train(f'output_dir="{name}"', f'model.transformer_dtype="{dtype}"', "max_steps=3", *overrides)
    return project.losses(name)  # type: ignore[no-any-return]


def checkpoint(project: Project, name: str, step: int) -> dict[str, torch.Tensor]:
    return read_checkpoint(Path(project.folder / name / "checkpoints" / f"step-{step:08d}"))[0]


@pytest.mark.usefixtures("without_proof")
def test_bf16_steps_are_close_to_fp32_and_weights_stay_fp32(project: Project) -> None:
    torch.cuda.reset_peak_memory_stats()
    exact = train(project, "fp32", "float32")
    rough = train(project, "bf16", "bfloat16")
    assert torch.cuda.max_memory_allocated() > 10e6, "training ran on the GPU"
    assert sorted(rough) == [1, 2, 3]
    # the untrained output is zero in any dtype; bf16 rounding appears from the second step on
    assert rough[1] == pytest.approx(exact[1], rel=1e-3)
    assert list(rough.values()) == pytest.approx(list(exact.values()), rel=2e-2)
    assert rough != exact
    tensors = checkpoint(project, "bf16", 3)
    weights = [tensor for name, tensor in tensors.items() if name.startswith("param/")]
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights), (
        "the weights are finer than bf16"
    )


@pytest.mark.usefixtures("without_proof")
def test_a_gpu_trains_like_a_cpu(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = train(project, "gpu", "float32")
    monkeypatch.setattr("sd3_light.launch.Launch.device", lambda *_: torch.device("cpu"))
    on_cpu = train(project, "cpu", "float32")
    assert list(on_gpu.values()) == pytest.approx(list(on_cpu.values()), rel=1e-3)


def test_an_export_made_on_a_gpu_is_verified(project: Project) -> None:
    train(project, "run", "bfloat16", 'save_dtype="bfloat16"')
    folder = project.run / "exports" / "step-00000003"
    assert (folder / "proof.json").is_file()
    saved = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


@pytest.mark.usefixtures("without_proof")
def test_a_run_on_a_gpu_resumes(project: Project) -> None:
    from sd3_light.train.verb import Resume

    uninterrupted = train(project, "whole", "bfloat16", "checkpoint_every_n_steps=1")
    saved = project.folder / "whole" / "checkpoints" / "step-00000001"
    project.train(
        'output_dir="resumed"', 'model.transformer_dtype="bfloat16"', "max_steps=3", resume=Resume(Path(saved))
    )
    resumed = project.losses("resumed")
    assert [resumed[2], resumed[3]] == pytest.approx([uninterrupted[2], uninterrupted[3]], rel=1e-3)
