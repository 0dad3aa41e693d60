"""Fine-tuning trains, samples and exports with the shift of its model; a resumed run keeps the values it began with."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel

from sd3_light.check import verb as check
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.config import SIZES
from sd3_light.engines import Launch
from sd3_light.evaluate import verb as evaluate
from sd3_light.export.model_facts import ModelFacts
from sd3_light.families.sd3.sampling import SD3Sampling
from sd3_light.train import verb as train
from sd3_light.train.verb import Resume
from sd3_light.world import write_dataset
from tests.project import Project

pytestmark = pytest.mark.usefixtures("unproven")

SAMPLING = '\n[sampling]\nprompts = ["a star"]\nevery_n_steps = 2\nsteps = 1\n'


def set_scheduler(model: Path, **values: Any) -> None:
    path = model / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def tuning(project: Project) -> Project:
    """A project that continues a denoiser whose scheduler has shift 3, and names neither of the values."""
    folder = project.folder / "base"
    shutil.copytree(project.model, folder)
    torch.manual_seed(0)
    SD3Transformer2DModel(**SIZES["tiny2"].transformer_config()).save_pretrained(folder / "transformer")
    set_scheduler(folder, shift=3.0)
    text = project.train_toml.read_text()
    lines = (f'diffusers_path = "{project.model}"', 'init = "random"', 'size = "tiny2"', 'uncond_text = "empty"')
    for line in (*lines, 'train_type = "sd3_light_pretrain"'):
        assert line in text
        text = text.replace(f"{line}\n", "")
    text = text.replace("[model]\n", f'[model]\ndiffusers_path = "{folder}"\n')
    project.train_toml.write_text(text + SAMPLING)
    project.model = folder
    project.build_cache()
    return project


def model_table(project: Project) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((project.run / "config.toml").read_text())["model"]
    return table


def exported(project: Project, step: int) -> tuple[dict[str, Any], str]:
    """Return the scheduler and `uncond_text` of an export."""
    folder = project.run / "exports" / f"step-{step:08d}"
    scheduler = json.loads((folder / "scheduler/scheduler_config.json").read_text())
    return scheduler, json.loads((folder / "sd3_light.json").read_text())["text"]["uncond_text"]


def shift_line(project: Project, *keys: str) -> str | None:
    loaded = project.load(*keys)
    return dict(check.conclude(loaded.train, check.run(loaded), check.Target(on_cpu=True))).get("shift")


def test_fine_tuning_has_the_shift_of_its_model(tuning: Project, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    drawn: list[float] = []
    make = SD3Sampling.scheduler

    def spy(*arguments: Any) -> Any:
        scheduler = make(*arguments)
        drawn.append(scheduler.config.shift)
        return scheduler

    monkeypatch.setattr(SD3Sampling, "scheduler", spy)
    assert shift_line(tuning) is None
    train.run(tuning.load("max_steps=2"))
    assert "shift:" not in capfd.readouterr().err
    assert (model_table(tuning)["shift"], model_table(tuning)["uncond_text"]) == (3.0, "empty")
    scheduler, text = exported(tuning, 2)
    assert (scheduler["shift"], scheduler["use_dynamic_shifting"], text) == (3.0, False, "empty")
    assert set(drawn) == {3.0}
    given = tuning.copy(tuning.folder.with_name("given"), without=["run"])
    train.run(given.load("max_steps=2", "model.shift=3.0", "model.uncond_text='empty'"))
    assert given.losses() == tuning.losses()


def test_another_shift_is_named(tuning: Project, capfd: pytest.CaptureFixture[str]) -> None:
    line = f"model.shift = 1, but the scheduler of {tuning.model} has shift 3; leave it out to train and sample with 3"
    assert shift_line(tuning, "model.shift=1.0") == line
    train.run(tuning.load("max_steps=1", "model.shift=1.0"))
    assert f"shift: {line}" in capfd.readouterr().err.splitlines()
    assert exported(tuning, 1)[0]["shift"] == 1.0
    write_dataset(tuning.folder / "held_out", 4, seed=2)
    (tuning.folder / "eval.toml").write_text('size_buckets = [[64, 64]]\n[[directory]]\npath = "held_out"\n')
    keys = ("eval_datasets=['eval.toml']", "eval_micro_batch_size_per_gpu=8")
    tuning.build_cache(*keys)
    losses = evaluate.validation_losses(tuning.load(*keys), tuning.model, Launch())
    given = evaluate.validation_losses(tuning.load(*keys, "model.shift=3.0"), tuning.model, Launch())
    other = evaluate.validation_losses(tuning.load(*keys, "model.shift=1.0"), tuning.model, Launch())
    assert losses == given != other


def test_a_dynamic_scheduler_is_exported_as_it_is(tuning: Project) -> None:
    set_scheduler(tuning.model, use_dynamic_shifting=True, base_shift=0.25)
    train.run(tuning.load("max_steps=1"))
    scheduler, _ = exported(tuning, 1)
    assert (scheduler["use_dynamic_shifting"], scheduler["base_shift"], scheduler["shift"]) == (True, 0.25, 3.0)
    assert "shift" not in model_table(tuning)


def test_a_resumed_run_keeps_its_values(tuning: Project, capfd: pytest.CaptureFixture[str]) -> None:
    train.run(tuning.load("max_steps=1"))
    set_scheduler(tuning.model, shift=5.0)
    capfd.readouterr()
    train.run(tuning.load("max_steps=2"), resume=Resume())
    assert "using the checkpoint's model.shift = 3: a run keeps the values that it began with" in capfd.readouterr().err
    assert exported(tuning, 2)[0]["shift"] == 3.0
    train.run(tuning.load("max_steps=3", "model.shift=2.0"), resume=Resume())
    assert exported(tuning, 3)[0]["shift"] == 2.0, "a given value is taken"
    facts = ModelFacts.of(open_checkpoint(tuning.run / "checkpoints" / "step-00000003"))
    assert (facts.shift, facts.uncond_text) == (2.0, "empty")


@pytest.mark.parametrize("key", ["flux_shift", "sqrt_shift"])
def test_a_resumed_run_keeps_its_kind_of_shift(tuning: Project, key: str, capfd: pytest.CaptureFixture[str]) -> None:
    train.run(tuning.load("max_steps=2", f"model.{key}=true"))
    whole = tuning.copy(tuning.folder.with_name("whole"), without=["run"])
    train.run(whole.load("max_steps=4", f"model.{key}=true"))
    capfd.readouterr()
    train.run(tuning.load("max_steps=4"), resume=Resume())
    assert f"using the checkpoint's model.{key} = true: a run keeps the values" in capfd.readouterr().err
    assert tuning.losses() == whole.losses()
