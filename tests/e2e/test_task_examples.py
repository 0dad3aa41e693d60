"""The scripts in examples/ run unchanged, and stock diffusers loads what they save."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

from sd3_light.assets import DEMO
from sd3_light.runlog import read_log
from sd3_light.world import draw_image, scene_captions

ROOT = Path(__file__).parents[2]
WITHOUT = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")


def run_example(name: str, *arguments: object) -> None:
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr


def losses(out: Path) -> list[float]:
    return [event["loss"] for event in read_log(out / "log.jsonl") if event["event"] == "step"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and what the example trained on them."""
    folder = tmp_path_factory.mktemp("sd3")
    (folder / "images").mkdir()
    for index in range(0, 16, 2):  # the square ones
        image, scene = draw_image(index, 1)
        image.save(folder / "images" / f"{index:02d}.png")
        (folder / "images" / f"{index:02d}.txt").write_text(scene_captions(scene)["en"], encoding="utf-8")
    run_example("sd3_lora_task.py", DEMO, folder / "images", folder / "one")
    return folder


@pytest.mark.slow  # test_video_task.py compares the stages of another task
def test_sd3_in_two_stages_equals_one(trained: Path) -> None:
    for stage in ("process", "train"):
        run_example("sd3_lora_task.py", DEMO, trained / "images", trained / "two", stage)
    assert losses(trained / "one") == losses(trained / "two")
    files = [trained / out / "epoch-1.safetensors" for out in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_stock_pipeline_loads_the_lora_of_sd3(trained: Path) -> None:
    assert len(losses(trained / "one")) == 8
    transformer = SD3Transformer2DModel.from_pretrained(DEMO / "transformer", torch_dtype=torch.float32)
    before = output(transformer)
    pipe = StableDiffusion3Pipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(), **dict.fromkeys(WITHOUT)
    )
    pipe.load_lora_weights(trained / "one", weight_name="epoch-1.safetensors")
    assert not torch.allclose(output(transformer), before, atol=1e-4)


def output(transformer: Any) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    shapes = ((1, 16, 8, 8), (1, 5, 256), (1, 224))
    noisy, text, pooled = (torch.randn(shape, generator=random) for shape in shapes)
    with torch.no_grad():
        velocity: torch.Tensor = transformer(noisy, text, pooled, torch.tensor([500.0]), return_dict=False)[0]
    return velocity


def test_a_script_stays_short() -> None:
    """At most 40 lines, with docstring, imports and blank lines."""
    assert len((ROOT / "examples" / "sd3_lora_task.py").read_text(encoding="utf-8").splitlines()) <= 40
