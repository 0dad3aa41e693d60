"""Steps and guidance by default: those that the configs of a distilled model tell, or the usual ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd3_light.assets import DEMO
from sd3_light.config import TrainConfig
from sd3_light.core.registry import family_named, family_of_folder
from sd3_light.core.sampling import ImageRequest
from sd3_light.engines import Launch
from sd3_light.evaluate import against
from sd3_light.evaluate.composition import ScoreOptions, score
from sd3_light.export import lora
from sd3_light.export.chosen import choose_model
from sd3_light.export.lora_file import write_lora
from sd3_light.export.lora_stack import Lora
from sd3_light.export.open_pipeline import open_policy
from sd3_light.model.lora_layers import LoraModule
from sd3_light.sample import verb as sample
from sd3_light.sample.generate import stream_images
from sd3_light.sample.image_requests import PromptRow
from sd3_light.sample.png import read_png_facts
from sd3_light.sample.verb import SampleOptions
from sd3_light.ui.draw_request import parse_request
from tests.families import make_pipeline

SIZE = {"width": 64, "height": 64}
SCHNELL = {"guidance_embeds": False}


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_schnell_is_drawn_as_its_stock_pipeline_is_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "schnell"
    pipe: Any = make_pipeline("flux", guidance_embeds=False)
    pipe.save_pretrained(folder)
    sample.run(folder, [PromptRow("a star")], [3], tmp_path / "own", SampleOptions(**SIZE, grid=False))
    assert "4 steps, guidance 1: " in shown(capsys)
    length = read_png_facts(tmp_path / "own" / "00000.png")["text_max_length"]
    call = {"num_inference_steps": 4, "guidance_scale": 0.0, "max_sequence_length": length, **SIZE}
    stock = pipe("a star", generator=torch.Generator("cpu").manual_seed(3), **call)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "own" / "00000.png")), np.asarray(stock.images[0]))
    given = SampleOptions(**SIZE, steps=1, guidance=2.0, grid=False)
    sample.run(folder, [PromptRow("a star")], [3], tmp_path / "given", given)
    assert "guidance" not in shown(capsys)
    facts = read_png_facts(tmp_path / "given" / "00000.png")
    assert (facts["steps"], facts["guidance"]) == (1, 2.0)


def test_the_defaults_of_other_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for family, expected in (("flux", (28, 3.5)), ("z_image", (28, 5.0)), ("wan", (28, 5.0))):
        make_pipeline(family).save_pretrained(tmp_path / family)
        assert open_policy(tmp_path / family)[1].drawing(None, None) == expected
    _, demo = open_policy(DEMO)
    assert demo.drawing(None, None) == (28, 4.0)
    assert demo.drawing(None, 0.0, 20) == (20, 0.0)
    sample.choose_drawing(open_policy(tmp_path / "z_image")[1], 5, None)
    note = "Z-Image-Turbo, whose configs are the same, needs --steps 8 --guidance 0"
    assert f"5 steps, guidance 5: {note}" in shown(capsys)
    sample.choose_drawing(demo, None, None)
    assert not shown(capsys)


@pytest.mark.parametrize("family", ["flux", "schnell", "z_image", "wan"])
def test_grids_metrics_and_the_playground_draw_as_sample_does(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    pipe = make_pipeline("flux", **SCHNELL) if family == "schnell" else make_pipeline(family)
    pipe.save_pretrained(folder)
    policy = open_policy(folder)[1]
    metrics = {"dataset": "true.toml", "features": "clip", "every_n_steps": 1}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": {"diffusers_path": str(folder)}}
    for keys in ({}, {"steps": 7}, {"guidance": 2.5}, {"steps": 7, "guidance": 2.5}):
        tables = {**table, "sampling": keys, "metrics": {**metrics, **keys}}
        config = TrainConfig.model_validate(tables, context={"base": tmp_path})
        config = family_of_folder(folder).completed(config)
        assert config.metrics is not None
        steps = keys.get("steps")
        guidance = keys.get("guidance")
        assert (config.sampling.steps, config.sampling.guidance) == policy.drawing(steps, guidance)
        assert (config.metrics.steps, config.metrics.guidance) == policy.drawing(steps, guidance, against.USUAL_STEPS)
        form = {"models": ["a"], "prompt": "a star", **{name: str(value) for name, value in keys.items()}}
        row = parse_request(form, {"a": ("a", folder)}, {}).row()
        assert (row.steps, row.guidance) == (steps, guidance), "`OpenModel.request` completes them"


def test_models_with_different_defaults_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pipeline("flux", guidance_embeds=False).save_pretrained(tmp_path / "schnell")
    chosen = {"a": choose_model(DEMO), "b": choose_model(tmp_path / "schnell")}
    with pytest.raises(sample.UserError, match=r"a with 20 and 4, b with 4 and 1; pass --steps and --guidance"):
        against._drawing(chosen, against.AgainstOptions())
    assert against._drawing(chosen, against.AgainstOptions(steps=3, guidance=2.0)) == (3, 2.0)
    assert against._drawing({"b": chosen["b"]}, against.AgainstOptions()) == (4, 1.0)
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr("sd3_light.evaluate.composition.generate", lambda *args: drawn.append(args) or [])
    for name in ("a", "b"):
        score(None, [], open_policy(chosen[name].folder)[1], ScoreOptions())  # type: ignore[arg-type]
    assert [args[3] for args in drawn] == [(20, 4.0), (4, 1.0)]


def stating(folder: Path, **sampling: Any) -> Path:
    """Return a copy of the demo's model that states how it is drawn."""
    shutil.copytree(DEMO, folder)
    (folder / "sd3_light.json").write_text(json.dumps({"sampling": sampling}))
    return folder


def test_a_model_is_drawn_as_its_export_or_user_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stating(tmp_path / "model", steps=3, guidance=1.0)
    _, policy = open_policy(folder)
    assert policy.drawing(None, None) == (3, 1.0)
    assert policy.drawing(None, None, 20) == (3, 1.0)
    assert policy.drawing(5, None) == (5, 1.0)
    assert policy.drawing(None, 2.0) == (3, 2.0)
    assert "stated" not in policy.facts()
    rows = [PromptRow("a star")]
    sample.run(folder, rows, [3], tmp_path / "own", SampleOptions(**SIZE, grid=False))
    assert "3 steps, guidance 1: as its export says" in shown(capsys)
    facts = read_png_facts(tmp_path / "own" / "00000.png")
    assert (facts["steps"], facts["guidance"]) == (3, 1.0)
    chosen = {"a": choose_model(folder)}
    assert against._drawing(chosen, against.AgainstOptions()) == (3, 1.0)


def test_an_invalid_statement_is_one_line(tmp_path: Path) -> None:
    folder = stating(tmp_path / "model")
    statements: list[Any] = [{"steps": steps} for steps in (0, True, "4", 10**9)]
    statements += [{"guidance": guidance} for guidance in (-1, None, float("nan"), 10**400)]
    for sampling in (*statements, {"last_time": 1.0}, [4], None):
        (folder / "sd3_light.json").write_text(json.dumps({"sampling": sampling}))
        with pytest.raises(sample.UserError, match=r"sd3_light\.json: sampling.* is .*; export the model again"):
            open_policy(folder)


@pytest.mark.parametrize("moved", [False, True])
def test_an_adapter_s_file_states_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str], moved: bool) -> None:
    layer = "transformer_blocks.0.attn.to_q"
    module = LoraModule(torch.zeros(2, 256), torch.zeros(256, 2), 1.0)
    facts = {"sampling": {"steps": 2, "guidance": 1.0, "last_time": 0.5}}
    names = family_named("sd3").files.adapters
    file = write_lora(tmp_path / "lora.safetensors", {layer: module}, facts=facts, names=names)
    if moved:  # a program that renames files keeps their metadata
        file = file.rename(tmp_path / "other.safetensors")
    opened = sample.open_model(DEMO, SampleOptions(loras=(Lora(file),)), Launch())
    assert opened.policy.drawing(None, None) == (2, 1.0)
    assert opened.pipe.scheduler.config.shift_terminal == 0.5
    lora.merge(DEMO, [Lora(file)], tmp_path / "merged")
    assert open_policy(tmp_path / "merged")[1].drawing(None, None) == (2, 1.0)
    scheduler = json.loads((tmp_path / "merged" / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["shift_terminal"] == 0.5
    with pytest.raises(sample.UserError, match="needs at least 2 steps"):
        next(stream_images(opened.pipe, [ImageRequest("a star", 0, 64, 64, steps=1)], opened.policy))
    alone = write_lora(
        tmp_path / "alone.safetensors", {layer: module}, facts={"sampling": {"last_time": 0.3}}, names=names
    )
    opened = sample.open_model(DEMO, SampleOptions(loras=(Lora(alone),)), Launch())
    assert opened.pipe.scheduler.config.shift_terminal == 0.3, "without steps and guidance"
