"""Full and LoRA fine-tuning from a single-file model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sd3_light.assets import DEMO
from sd3_light.check import verb as check
from sd3_light.config import ConfigFaults
from sd3_light.core.registry import starting_weights
from sd3_light.families.sd3.single_file import write_single_file
from tests.e2e.test_lora_run import file_of, use_adapter
from tests.project import Project


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_single_file(DEMO, tmp_path / "model.safetensors", vae=False).path


def test_a_single_file_starts_as_its_folder(project: Project, single: Path, unproven: None) -> None:
    use_adapter(project, "rank = 2")
    toml = project.train_toml.read_text()
    project.train_toml.write_text(toml.partition("[adapter]")[0])
    project.train("max_steps=1")
    project.train("max_steps=1", 'output_dir="single"', f'model.init="{single}"')
    assert project.losses("single") == project.losses()
    start = starting_weights(project.load(f'model.init="{single}"').train.model)
    assert (start.kind, start.size.name, start.source) == ("file", "demo", single)


@pytest.mark.slow
def test_a_lora_on_a_single_file_is_proven(project: Project, single: Path) -> None:
    use_adapter(project, "rank = 2").train("max_steps=1", f'model.init="{single}"')
    assert file_of(project, 1).is_file()
    assert not list(file_of(project, 1).parent.glob("tmp*"))


def test_a_file_that_is_not_sd3_is_rejected(project: Project, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    use_adapter(project, "rank = 2")
    for name, words in (("other", "it lacks x_embedder"), ("text", "is not a complete safetensors file")):
        with pytest.raises(ConfigFaults, match=words):
            check.require(project.load(f'model.init="{tmp_path / name}.safetensors"'))
