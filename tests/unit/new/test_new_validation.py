"""`new` holds out a part of the images, for every kind and family."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sd3_light.assets import DEMO
from sd3_light.check import verb as check
from sd3_light.cli import app
from sd3_light.config import load_config
from sd3_light.data.split import expected_split
from sd3_light.evaluate.validation import eval_points
from sd3_light.new import verb as new
from sd3_light.new.kinds import KINDS
from sd3_light.new.memory_choice import MemoryChoice
from sd3_light.new.project_text import TextValues, data_toml, train_toml
from tests.project import Project


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("images", [20, 5000])
def test_every_kind_has_validation(name: str, images: int) -> None:
    kind = KINDS[name]
    memory = MemoryChoice(8, 4, False)
    values = TextValues(name, "images", "owner/model", 256, memory, 77, epoch_steps=100, images=images)
    train, data = (tomllib.loads(text(kind, values)) for text in (train_toml, data_toml))
    assert data["validation"] is True
    assert ("eval_every_n_steps" in train) != ("eval_every_n_epochs" in train)
    assert train.get("eval_at_fixed_t", False) == (images < 50)
    saves = train.get("save_every_n_steps", 0) % train.get("eval_every_n_steps", 1)
    assert saves == 0, "every export is evaluated, so that --best can choose"
    assert train.get("save_every_n_epochs") == train.get("eval_every_n_epochs")
    without = replace(values, validation=False)
    assert "validation" not in data_toml(kind, without)
    assert "eval_" not in train_toml(kind, without)


@pytest.mark.parametrize(
    ("name", "samples", "images", "saves", "evaluations"),
    [
        ("lora", 4, 20, 200, 100),
        ("lora", 4, 5000, 1000, 1000),
        ("finetune", 32, 3000, 232, 116),
        ("finetune", 32, 20_000, 1000, 500),
        ("finetune", 1, 20_000, 32_000, 16_000),
    ],
)
def test_evaluations_take_little_time(name: str, samples: int, images: int, saves: int, evaluations: int) -> None:
    """Every export is evaluated; intervals count samples, so a smaller batch has longer ones."""
    memory = MemoryChoice(samples, 1, False)
    values = TextValues(name, "i", "m", 256, memory, 77, epoch_steps=images // samples, images=images)
    train = tomllib.loads(train_toml(KINDS[name], values))
    assert (train["save_every_n_steps"], train["eval_every_n_steps"]) == (saves, evaluations)
    points = eval_points(images < 50)
    forward = 2 * len(points) * expected_split(images)
    assert forward <= 0.15 * 3 * samples * (evaluations + 1)


def test_the_project_says_how_many_images_are_held_out(tmp_path: Path, raw_project: Project) -> None:
    arguments = ["new", "lora", "--data", str(raw_project.images), "--model", str(DEMO), "--out", str(tmp_path / "a")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "validation: about 2 of them are held out; --no-validation trains on all" in " ".join(result.output.split())
    loaded = load_config(tmp_path / "a" / "lora.toml")
    assert loaded.dataset.is_divided
    assert loaded.evaluates
    assert loaded.train.eval_at_fixed_t
    estimate = check.run(loaded)
    assert (estimate.data.samples, estimate.data.held_out) == (40, 2)
    lines = dict(check.conclude(loaded.train, estimate, check.Target(on_cpu=True)))
    assert lines["validation"] == "about 2 of 40 images are held out and not trained on"
    arguments[-1] = str(tmp_path / "b")
    result = CliRunner().invoke(app, [*arguments, "--no-validation"])
    assert result.exit_code == 0
    assert "held out" not in result.output
    assert not load_config(tmp_path / "b" / "lora.toml").evaluates


def test_new_decodes_no_image(tmp_path: Path, raw_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thumbnails are for the cache stage."""
    monkeypatch.setattr("sd3_light.sources.decode.make_thumbnail", lambda *_: pytest.fail("an image is decoded"))
    assert new.run("lora", str(raw_project.images), str(DEMO), tmp_path).train_toml.is_file()
