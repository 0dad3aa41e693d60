"""Whole runs of stock families with another shift than their base: grids, exports and `sample` draw with it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.export import lora
from sd3_light.export.diffusers_folder import read_facts
from sd3_light.export.lora_stack import Lora
from sd3_light.export.open_pipeline import adapter_shift, open_pipeline, open_policy
from sd3_light.flow.scheduler import shift_of
from sd3_light.sample import verb as sample
from sd3_light.sample.image_requests import PromptRow
from sd3_light.sample.png import read_png_facts
from sd3_light.sample.verb import SampleOptions
from tests.stock import save_stock
from tests.stock_project import LORA, write_project

pytestmark = pytest.mark.usefixtures("unproven")

PROMPT = "a red fox"
SAMPLING = f"""
[sampling]
prompts = ["{PROMPT}"]
seeds = [5]
every_n_steps = 4
steps = 3
"""
GUIDANCE = {"flux": 3.5, "wan": 5.0}
DRAWN = {"width": 64, "height": 64, "frames": 1, "steps": 3, "grid": False}


def train(name: str, folder: Path, more: str = "") -> Path:
    """Train with shift 2 on a base with another one; return the run's folder."""
    project = write_project(folder, save_stock(name, folder / "model"))
    project.train_toml.write_text(project.train_toml.read_text(encoding="utf-8") + SAMPLING + more, encoding="utf-8")
    project.train("model.shift=2.0", "sampling.size=[64, 64]")
    return project.run


def draw(model: Path, out: Path, **options: Any) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
    """Return an image of `sample` and its settings."""
    sample.run(model, [PromptRow(PROMPT)], [5], out, SampleOptions(**DRAWN, **options))
    return np.asarray(Image.open(out / "00000.png")).astype(int), read_png_facts(out / "00000.png")


def grid_image(run: Path) -> np.ndarray[Any, Any]:
    """Return the image of the last grid, at its own size."""
    grid = Image.open(run / "samples" / "step-00000004.png")
    (box,) = json.loads(grid.text["cells"])  # type: ignore[attr-defined]
    return np.asarray(grid.crop(tuple(box)).resize((64, 64), Image.Resampling.NEAREST)).astype(int)


@pytest.mark.parametrize("name", ["flux", pytest.param("wan", marks=pytest.mark.slow)])
def test_a_run_draws_with_its_shift_and_the_guidance_of_its_family(name: str, tmp_path: Path) -> None:
    run = train(name, tmp_path)
    image, facts = draw(run, tmp_path / "own")
    assert (facts["shift"], facts["guidance"]) == (2.0, GUIDANCE[name])
    assert np.abs(image - grid_image(run)).max() <= 1
    (export,) = (run / "exports").glob("step-*")
    _, policy = open_policy(export)
    assert policy.default_size(None) == (64, 64), "as it was trained"
    step = 16
    wide = policy.drawn_at((10 * step, 5 * step))
    assert wide.default_size(None) == (7 * step, 7 * step), "the square of about this area"
    untrained = policy.drawn_at(None)
    assert untrained.default_size(SimpleNamespace(default_sample_size=12)) == (96, 96), "the stock pipeline's"
    other, _ = draw(run, tmp_path / "other", guidance=GUIDANCE[name] + 4)
    assert np.abs(other - image).max() > 1, "the guidance shows"
    stored = json.loads(next((run / "exports").glob("*/scheduler/scheduler_config.json")).read_text())
    key = "flow_shift" if name == "wan" else "shift"
    assert (stored[key], stored["use_dynamic_shifting"]) == (2.0, False)


@pytest.mark.parametrize("name", ["flux", pytest.param("wan", marks=pytest.mark.slow)])
def test_an_adapter_draws_with_its_trained_shift(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(name, tmp_path, LORA)
    (export,) = (run / "exports").glob("step-*")
    assert read_facts(export)["shift"] == 2.0
    base = tmp_path / "model"
    assert open_policy(base, export)[1].default_size(None) == (64, 64)
    _, facts = draw(base, tmp_path / "plain")
    assert facts["shift"] == ("dynamic" if name == "flux" else 3.0)
    capsys.readouterr()
    image, facts = draw(run, tmp_path / "own")
    assert facts["shift"] == 2.0
    assert np.abs(image - grid_image(run)).max() <= 1
    line = f"images have the shift that {export} was trained with: 2.0"
    assert line in " ".join(capsys.readouterr().err.split())
    given, facts = draw(base, tmp_path / "given", loras=(Lora.parse(str(run)),))
    assert facts["shift"] == 2.0
    assert np.array_equal(given, image)
    assert line in " ".join(capsys.readouterr().err.split())
    merged = lora.merge(base, [Lora.parse(str(export))], tmp_path / "merged")
    assert shift_of(open_pipeline(merged, torch.device("cpu"))[0].scheduler) == 2.0
    assert np.abs(draw(merged, tmp_path / "of_merged")[0] - image).max() <= 1
    card = (export / "README.md").read_text(encoding="utf-8")
    assert "| schedule | shift 2 |" in card
    (code,) = [line for line in card.splitlines() if line.startswith("pipe.scheduler = ")]
    pipe = DiffusionPipeline.from_pretrained(base)
    exec(code, {"pipe": pipe})
    assert shift_of(pipe.scheduler) == 2.0


def test_an_adapter_with_the_shift_of_its_base_states_none(tmp_path: Path) -> None:
    project = write_project(tmp_path, save_stock("flux", tmp_path / "model"))
    project.train_toml.write_text(project.train_toml.read_text(encoding="utf-8") + LORA, encoding="utf-8")
    project.train()
    (export,) = (project.run / "exports").glob("step-*")
    assert "shift" not in read_facts(export)
    assert "schedule" not in (export / "README.md").read_text(encoding="utf-8")
    assert adapter_shift(export) is None


@pytest.mark.parametrize("shift", [True, "big", -1, 0, [2.0]])
def test_a_shift_that_is_none_is_refused(tmp_path: Path, shift: Any) -> None:
    (tmp_path / "sd3_light.json").write_text(json.dumps({"shift": shift}), encoding="utf-8")
    with pytest.raises(UserError, match=r"sd3_light\.json: shift has the invalid value .*; export the folder again"):
        adapter_shift(tmp_path)
