"""Training a stock family towards a score: all weights and a LoRA, resumed inside a window."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.check import verb as check
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.core.registry import family_named
from sd3_light.tasks import launch_reward_task
from sd3_light.train.verb import Resume
from tests.checkpoints import same, tensors
from tests.families import TinyFolder
from tests.project import Project
from tests.stock_project import LORA, write_project

pytestmark = pytest.mark.usefixtures("unproven")

REWARD = """
[reward]
score = "python"
prompts = "prompts.txt"
prompts_per_draw = 2
images_per_prompt = 2
every_n_steps = 3
steps = 2
"""
FAMILIES = ["flux", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen_image", "sana", "z_image"))]


@pytest.fixture(params=FAMILIES)
def project(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> Project:
    monkeypatch.setattr(type(family_named(request.param)), "packages", ())
    monkeypatch.setattr(type(family_named(request.param)), "loads_adapters", True)
    project = write_project(tmp_path, tiny_folder(request.param))
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n", encoding="utf-8")
    return project


def brightness(images: Any, prompts: Sequence[str]) -> Any:
    return images.mean((1, 2, 3))


@pytest.mark.parametrize("tables", ["", LORA], ids=["full", "lora"])
def test_a_resumed_run_equals_the_whole(project: Project, tables: str) -> None:
    project.train_toml.write_text(project.train_toml.read_text() + tables + REWARD)

    def run(name: str, resume: Resume | None = None) -> dict[str, torch.Tensor]:
        keys = [f'output_dir="{name}"', "checkpoint_every_n_steps=1", "micro_batch_size_per_gpu=2"]
        launch_reward_task(project.train_toml, brightness, keys, resume)
        return tensors(project.folder / name / "checkpoints" / checkpoint_name(4))

    whole = run("whole")
    resumed = run("again", Resume(project.folder / "whole" / "checkpoints" / checkpoint_name(2)))
    assert same(whole, resumed)
    events = project.events("reward", "whole")
    assert [event["step"] for event in events] == [0, 3]
    assert all(event["diversity"] > 0.3 for event in events)
    assert ("distance" in events[1]) == bool(tables)
    assert [event["flow"] > 0 for event in project.events("eval", "whole")], "the evaluation set has its flow loss"


def test_check_states_what_drawing_takes(project: Project) -> None:
    plain = check.run(check.load(project.train_toml))
    project.train_toml.write_text(project.train_toml.read_text() + REWARD)
    drawn = check.run(check.load(project.train_toml))
    assert plain.drawing is None
    assert drawn.drawing.startswith("4 images of 64x64 every 3 steps in 2 sampler steps, ")
    rows = [estimate.data.rows[0].step_flops.value for estimate in (plain, drawn)]
    assert rows[1] > rows[0], "the teacher's pass and drawing"
    assert drawn.setup.other_models > plain.setup.other_models, "the VAE is on the device while images are decoded"
