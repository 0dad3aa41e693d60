"""Steps and guidance by default: those that the configs of a distilled model tell, or the usual ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd3_light.assets import DEMO
from sd3_light.evaluate import against
from sd3_light.evaluate.composition import ScoreOptions, score
from sd3_light.export.chosen import choose_model
from sd3_light.export.open_pipeline import open_policy
from sd3_light.sample import verb as sample
from sd3_light.sample.image_requests import PromptRow
from sd3_light.sample.png import read_png_facts
from sd3_light.sample.verb import SampleOptions
from tests.families import make_pipeline

SIZE = {"width": 64, "height": 64}


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
    assert [args[3:5] for args in drawn] == [(20, 4.0), (4, 1.0)]
