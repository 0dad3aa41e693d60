"""Stock families from the command line: cache, train, export, draw images, evaluate, adapters."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

from sd3_light.cli import app
from tests.stock import save_stock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
FAMILIES = ("flux", "sana")  # fixed text with a guidance number; ragged text, guidance, and another scheduler
SIDES = {"flux": 64, "sana": 64}
LENGTHS = {"flux": 12, "sana": 40}
_TRAIN = """
output_dir = "{run}"
dataset = "data.toml"
eval_datasets = ["data.toml"]
max_steps = 2
micro_batch_size_per_gpu = 2
save_every_n_steps = 2
checkpoint_every_n_steps = 2
caching_num_workers = 0
caching_batch_size = 2
{adapter}
[model]
diffusers_path = "model"
text_max_length = {length}
[optimizer]
type = "adamw"
lr = 1e-3
[sampling]
prompts = ["a red fox"]
steps = 2
guidance = 3.5
every_n_steps = 2
"""
_DATA = """
resolutions = [64]
{cache}
[[directory]]
path = "images"
flip = true
"""


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module", params=FAMILIES)
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A folder with a model and images, one of which is damaged."""
    folder = tmp_path_factory.mktemp(request.param)
    save_stock(request.param, folder / "model")
    random = np.random.default_rng(0)
    (folder / "images").mkdir()
    for number in range(5):
        image = Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8))
        image.save(folder / "images" / f"{number}.png")
        (folder / "images" / f"{number}.txt").write_text(f"image {number}" + " of a fox" * number)
    (folder / "images" / "4.png").write_bytes((folder / "images" / "4.png").read_bytes()[:200])
    Image.new("L", (64, 64), 100).save(folder / "images" / "0-masklabel.png")
    (folder / "data.toml").write_text(_DATA.format(cache=""))
    for name, adapter in (("run", ""), ("lora", "[adapter]\nrank = 2\nalpha = 2.0\n")):
        text = _TRAIN.format(run=name, adapter="", length=LENGTHS[request.param])
        (folder / f"{name}.toml").write_text(f"{text}\n{adapter}")
    run("cache", folder / "run.toml")
    run("train", folder / "run.toml")
    run("train", folder / "lora.toml")
    return request.param, folder


def shards(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((cache / "shards").glob("*.safetensors"))}


def images(folder: Path) -> Sequence[bytes]:
    return [np.asarray(Image.open(path)).tobytes() for path in sorted(folder.glob("0*.png"))]


def test_two_builders_write_the_same_bytes(project: tuple[str, Path]) -> None:
    _, folder = project
    first = shards(folder / "data.cache")
    assert len(first) >= 2
    (folder / "run.toml").with_name("parts.toml").write_text(
        (folder / "run.toml").read_text().replace('output_dir = "run"', 'output_dir = "run"\ncache_dir = "other"')
    )
    for part in ("1/2", "0/2"):
        run("cache", folder / "parts.toml", "--part", part)
    run("cache", folder / "parts.toml", "--finish")
    assert shards(folder / "other") == first
    tensors = load_file(
        next(path for path in (folder / "other" / "shards").glob("*.safetensors") if "empty" not in path.name)
    )
    assert tensors["moments"].shape[1] == 2, "a mirrored variant"


def test_exports_are_proven_and_draw_the_images_of_stock(project: tuple[str, Path]) -> None:
    name, folder = project
    export = folder / "run" / "exports" / "step-00000002"
    assert json.loads((export / "proof.json").read_text())["picture_max_difference"] < 1 / 255
    scheduler = Path("scheduler") / "scheduler_config.json"
    assert (export / scheduler).read_bytes() == (folder / "model" / scheduler).read_bytes()
    assert list((folder / "run" / "samples").glob("step-*.png"))
    size = ("--width", SIDES[name], "--height", SIDES[name], "--steps", 2)
    run("sample", folder / "run", "a red fox", "--out", folder / "one", *size)
    run("sample", folder / "run", "a red fox", "--out", folder / "two", "--batch", 1, *size)
    assert images(folder / "one") == images(folder / "two")
    assert "flow" in run("evaluate", folder / "run", "--config", folder / "run.toml")
    run("export", folder / "run", folder / "exported")


def test_adapters_are_drawn_merged_and_converted(project: tuple[str, Path]) -> None:
    name, folder = project
    file = folder / "lora" / "exports" / "step-00000002" / "pytorch_lora_weights.safetensors"
    size = ("--width", SIDES[name], "--height", SIDES[name], "--steps", 2)
    run("sample", folder / "lora", "a red fox", "--out", folder / "adapted", *size)
    run("sample", folder / "model", "a red fox", "--out", folder / "given", "--lora", file, *size)
    run("sample", folder / "model", "a red fox", "--out", folder / "plain", *size)
    drawn = [images(folder / kind) for kind in ("adapted", "given", "plain")]
    assert drawn[0] == drawn[1] != drawn[2]
    run("lora", "merge", folder / "model", folder / "merged", file)
    run("lora", "extract", folder / "model", folder / "merged", folder / "extracted.safetensors", "--rank", 2)
    run("lora", "convert", file, folder / "peft.safetensors", "--layout", "peft")
    refused = CliRunner().invoke(
        app, ["lora", "convert", str(file), str(folder / "kohya.safetensors"), "--layout", "kohya"]
    )
    assert 'layout "kohya" is not known for a ' in str(refused.exception)
