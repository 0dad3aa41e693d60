"""Full and LoRA fine-tuning from a single-file model."""

from pathlib import Path

import pytest

from sd3_light.assets import DEMO
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
