"""The example of a custom family: it trains in one stage or two, in at most 60 lines."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from sd3_light.runlog import read_log

SCRIPT = Path(__file__).parents[3] / "examples" / "own_family.py"


def run(*words: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
        runpy.run_path(str(SCRIPT), run_name="__main__")


def losses(out: Path) -> list[float]:
    return [event["loss"] for event in read_log(out / "log.jsonl") if event["event"] == "step"]


def test_it_is_short_trains_in_one_stage_or_two_and_draws(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(5):
        Image.new("RGB", (64, 64) if number < 4 else (96, 48), (50 * number, 90, 10)).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text("a dot" * (1 + number % 2), encoding="utf-8")
    run(images, tmp_path / "one")
    run(images, tmp_path / "two", "process")
    run(images, tmp_path / "two", "train")
    assert len(losses(tmp_path / "one")) == 6, "two buckets: three steps per epoch"
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert "blocks.0.linear1.weight" in load_file(tmp_path / "one" / "epoch-1.safetensors")
    assert (tmp_path / "one" / "samples" / "step-00000004.png").is_file()
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 60
