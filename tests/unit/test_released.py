"""This version reads what earlier releases wrote: docs/formats/versions.md. tests/released/make.py made the files."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

from sd3_light import __version__
from sd3_light.cache import verb as cache
from sd3_light.config import load_config
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import Manifest
from sd3_light.engines import Launch
from sd3_light.export import convert
from sd3_light.export.lora_file import read_lora
from sd3_light.journeys import cache_then_train
from sd3_light.report.run_log import read_run
from sd3_light.runlog import read_log
from sd3_light.tasks import ProcessedDataset
from tests.project import quick_caching
from tests.released.make import FROZEN, continued_losses, output

FOLDER = Path(__file__).parents[1] / "released"
VERSIONS = sorted(path.parent.name for path in FOLDER.glob("*/expected.json"))


@pytest.fixture(scope="module", params=VERSIONS)
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a release's files. As in a checkout their times are new, and the images have other paths."""
    folder = tmp_path_factory.mktemp("released") / "copy"
    shutil.copytree(FOLDER / request.param, folder)
    for path in folder.rglob("*"):
        os.utime(path)
    return folder


def expected(released: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((released / "expected.json").read_text(encoding="utf-8"))
    return content


def test_this_project_has_files_of_a_release() -> None:
    assert VERSIONS[0] == "0.1.0"


def test_a_cache_is_up_to_date(released: Path) -> None:
    shards = {path: path.read_bytes() for path in (released / "cache" / "shards").iterdir()}
    with quick_caching():
        (report,) = cache.run(load_config(released / "train.toml"))
    assert (report.encoded, report.reused) == (0, 8)
    assert {path: path.read_bytes() for path in (released / "cache" / "shards").iterdir()} == shards


@pytest.mark.parametrize(
    ("toml", "run", "name"), [("train.toml", "run", "losses"), ("lora.toml", "lora_run", "lora_losses")]
)
def test_a_run_continues(released: Path, tmp_path: Path, toml: str, run: str, name: str) -> None:
    """The losses after the checkpoint are those of the release, so weights, optimizer, order and noise are, too."""
    folder = tmp_path / "copy"
    shutil.copytree(released, folder)
    with quick_caching():
        assert continued_losses(folder, toml, run) == pytest.approx(expected(released)[name], rel=1e-4)
    events = list(read_log(folder / run / "log.jsonl"))
    (start,) = (event for event in events if event["event"] == "start")
    (resume,) = (event for event in events if event["event"] == "resume")
    assert (start["version"], resume["version"]) == (expected(released)["version"], __version__)


def test_a_log_is_reported_with_events_that_are_not_known(released: Path) -> None:
    log = released / "run" / "log.jsonl"
    with log.open("a", encoding="utf-8") as file:
        file.write('{"event": "of a later version", "time": 1.0, "more": [1]}\n')
    report = read_run(released / "run")
    assert report.begin["version"] == expected(released)["version"]
    assert [event["step"] for event in report.last.values() if event["event"] == "step"] == [2]


def test_an_export_and_a_single_file_are_read(released: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(released / "export", folder)
    for name in FROZEN:
        shutil.copytree(released / "model" / name, folder / name)
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder)
    assert output(pipeline.transformer) == pytest.approx(expected(released)["export"], rel=1e-3, abs=1e-4)
    config = load_config(released / "train.toml", (f'model.init="{folder}"', 'output_dir="from_export"', "max_steps=1"))
    with quick_caching():
        assert cache_then_train(config, Launch()).step == 1
    convert.run(released / "single.safetensors", tmp_path / "back", base=released / "model")
    transformer = SD3Transformer2DModel.from_pretrained(tmp_path / "back" / "transformer")
    assert output(transformer) == pytest.approx(expected(released)["export"], rel=1e-3, abs=1e-4)


def test_a_lora_file_is_read_by_stock_diffusers_and_by_us(released: Path) -> None:
    pipeline = StableDiffusion3Pipeline.from_pretrained(released / "model")
    pipeline.load_lora_weights(released / "lora")
    assert output(pipeline.transformer) == pytest.approx(expected(released)["lora"], rel=1e-3, abs=1e-4)
    lora = read_lora(released / "lora" / "pytorch_lora_weights.safetensors")
    assert (lora.facts["adapter"]["rank"], lora.facts["step"]) == (2, 2)
    samples = ProcessedDataset(released / "processed")
    assert len(samples) == 3
    values = samples[2]
    assert values["prompt"] == "number 2"
    torch.testing.assert_close(values["latents"], torch.arange(4.0).reshape(1, 2, 2) + 2)


def continue_run(folder: Path) -> None:
    with quick_caching():
        continued_losses(folder, "train.toml", "run")


def read_cache(folder: Path) -> None:
    Manifest.load(folder / "cache")


def read_processed(folder: Path) -> None:
    ProcessedDataset(folder / "processed")


@pytest.mark.parametrize(
    ("file", "read", "words"),
    [
        ("cache/manifest.json", read_cache, "this version reads 5; `sd3-light cache CONFIG` encodes it again"),
        ("run/checkpoints/step-00000002/index.json", continue_run, "continue with the version that wrote it, or start"),
        ("processed/manifest.json", read_processed, "run launch_data_process_task again"),
    ],
)
def test_a_later_format_is_refused(released: Path, tmp_path: Path, file: str, read: Any, words: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(released, folder)
    content = json.loads((folder / file).read_text(encoding="utf-8"))
    content["format"] = 99
    (folder / file).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError) as error:
        read(folder)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
