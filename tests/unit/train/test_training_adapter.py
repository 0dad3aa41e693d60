"""A training adapter: in the loss and in validation, not in samples, exports and checkpoints; resumed; its faults."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd3_light.check import verb as check
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config import SIZES
from sd3_light.model.lora_layers import LoraModule
from sd3_light.model.training_adapter import TrainingAdapter
from tests.cases import combinations
from tests.checkpoints import tensors
from tests.project import Project
from tests.unit.train.test_train_preferences import assert_resumes, start_from_weights, the_fault

pytestmark = pytest.mark.usefixtures("unproven")

FILE = "undo.safetensors"
KEYS = (f'model.training_adapter="{FILE}"', "ema.enable=false")
EVAL = ("eval_every_n_steps=2", 'eval_datasets=["eval.toml"]')
LAYER = "transformer_blocks.0.attn.to_v"


def write_adapter(folder: Path, width: int, layer: str = LAYER, size: float = 3.0) -> Path:
    """Write a LoRA of rank 2 of one layer."""
    generator = torch.Generator().manual_seed(4)
    down, up = (size * torch.randn(shape, generator=generator) for shape in ((2, width), (width, 2)))
    name = f"transformer.{layer}"
    save_file({f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}, folder / FILE)
    return folder / FILE


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Project:
    project = start_from_weights(raw_project, tmp_path_factory.mktemp("undo"))
    write_adapter(project.folder, SIZES["tiny2"].width)
    project.build_cache(*EVAL)
    return project


@pytest.fixture
def project(tmp_path: Path, started: Project) -> Project:
    return started.copy(tmp_path / "project")


KINDS: dict[str, tuple[str, ...]] = {
    "lora": ("adapter.rank=2",),
    "all weights": (),
    "quantized": ("adapter.rank=2", "adapter.base_bits=8"),
    "swapped": ("adapter.rank=2", 'swap_blocks="all"'),
    "recomputed": ("adapter.rank=2", "activation_checkpointing=true"),
}


@pytest.mark.parametrize("kind", combinations(KINDS, fast=[("lora",), ("all weights",)]))
def test_it_changes_training_alone_and_resumes_exactly(project: Project, kind: str) -> None:
    keys = (*EVAL, *KINDS[kind])
    project.train(*keys, "ema.enable=false", 'output_dir="without"')
    assert_resumes(project, *keys, *KEYS)
    with_it, without = project.events("step"), project.events("step", "without")
    assert with_it[0]["loss"] != pytest.approx(without[0]["loss"], rel=1e-5), "it is in the loss"
    losses = [project.events("eval", run)[0]["flow"] for run in ("run", "without")]
    assert losses[0] != pytest.approx(losses[1], rel=1e-5), "and in validation"
    names = [tensors(project.folder / run / "checkpoints" / checkpoint_name(4)).keys() for run in ("run", "without")]
    assert names[0] == names[1], "it is in no checkpoint"


@pytest.mark.parametrize("keys", [(), ("adapter.rank=2",)], ids=["all weights", "lora"])
def test_samples_and_exports_do_not_have_it(project: Project, keys: tuple[str, ...]) -> None:
    """Without training (the rate is tiny) samples and weights are those of a run without it."""
    prompts = ('sampling.prompts=["a red circle"]', "sampling.every_n_steps=4", "sampling.steps=2", "sampling.size=64")
    shared = (*keys, *prompts, "optimizer.lr=1e-12", "ema.enable=false")
    project.train(*shared, 'output_dir="without"')
    project.train(*shared, *KEYS, 'output_dir="run"')
    files = [sorted((project.folder / run / "samples").rglob("*.png")) for run in ("run", "without")]
    assert len(files[0]) == len(files[1]) > 0
    for ours, theirs in zip(*files, strict=True):
        assert ours.read_bytes() == theirs.read_bytes(), ours.name
    exports = [project.folder / run / "exports" / checkpoint_name(4) for run in ("run", "without")]
    ours, theirs = (load_file(min(export.rglob("*.safetensors"))) for export in exports)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6)


def test_check_counts_it_and_names_its_faults(project: Project) -> None:
    def faults(*keys: str) -> str:
        return the_fault(lambda: check.run(project.load(*keys)))

    plain, counted = (check.run(project.load("adapter.rank=2", *keys)).setup for keys in ((), KEYS[:1]))
    size = sum(tensor.numel() for tensor in load_file(project.folder / FILE).values())
    assert counted.other_models - plain.other_models == 4 * size
    assert "no such file or folder" in faults('model.training_adapter="nothing.safetensors"')
    assert "weights start at random" in faults(*KEYS, 'model.init="random"')
    assert "pipeline stages run the model without it" in faults(*KEYS, "pipeline_stages=2")
    distil = ("objective.distill.guidance=3.0", "model.uncond_text='empty'")
    assert "has no use with [objective.distill], which follows a teacher" in faults(*KEYS, *distil)
    write_adapter(project.folder, 24)
    assert f"{LAYER} has shape [24, 24], and the model's layer" in faults(*KEYS)
    write_adapter(project.folder, 24, "transformer_blocks.9.attn.to_v")
    assert "transformer_blocks.9.attn.to_v is not a linear layer of the model" in faults(*KEYS)
    name = f"transformer.{LAYER}"
    dora: Any = {"lora_A.weight": (2, 24), "lora_B.weight": (24, 2), "lora_magnitude_vector": (24,)}
    save_file({f"{name}.{key}": torch.ones(shape) for key, shape in dora.items()}, project.folder / FILE)
    assert "is not a plain LoRA of a linear layer; merge it" in faults(*KEYS)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 3))
    rows = torch.randn(5, 4)
    plain = layer(rows)
    module = LoraModule(torch.randn(2, 4), torch.randn(3, 2), scale=0.5)
    adapter = TrainingAdapter(layer, {"0": module}, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(layer(rows), plain + rows @ module.delta().T)
    with adapter.off():
        assert torch.equal(layer(rows), plain)
    assert not torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(rows), plain)
