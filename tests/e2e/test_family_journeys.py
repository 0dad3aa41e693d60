"""Every family's whole journey by the installed command: new, check, cache, train in two processes, stop, resume,
export, sample, report."""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from sd3_light.assets import DEMO
from sd3_light.checkpoint.store import checkpoint_name
from tests.checkpoints import read_checkpoint
from tests.e2e.live import TORCHRUN
from tests.families import PIPELINES
from tests.journeys import EPOCH, SIDE, SQUARE, STEPS, WIDE, Journey, sd3_words, shards, write_ftfy, write_images
from tests.stock import save_stock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EDITS = ("flux_kontext", "qwen_image_edit", "qwen_image_edit_plus")  # of images that the journey does not have
FAMILIES = ("sd3", *(name for name in PIPELINES if name not in EDITS))
WITHOUT_LORA = ("prx",)  # stock pipelines that load no adapter
MERGED = ("flux", "sana")  # with a guidance number, and without
EXPORT = f"exports/step-{STEPS:08}"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def journey(family: str, tmp_path_factory: pytest.TempPathFactory) -> Journey:
    """A family's journey up to a cache. `new` chooses everything but the resolution."""
    folder = tmp_path_factory.mktemp(family)
    if family == "sd3":  # without the demo's own policy of text
        shutil.copytree(DEMO, folder / "model", ignore=shutil.ignore_patterns("sd3_light.json", "pipeline.py", "*.md"))
    else:
        save_stock(family, folder / "model")
    write_images(folder / "images")
    needs_ftfy = family == "prx" and find_spec("ftfy") is None
    packages = write_ftfy(folder / "packages") if needs_ftfy else None
    journey = Journey(folder, "finetune" if family in WITHOUT_LORA else "lora", packages)
    start = ("--model", journey.model, "--data", folder / "images", "--out", folder)
    journey.command("new", journey.kind, *start, "--resolution", SIDE)
    return journey


@pytest.fixture(scope="module")
def cached(journey: Journey) -> str:
    """What `cache` printed."""
    return journey.command("cache", journey.toml)


@pytest.fixture(scope="module")
def trained(journey: Journey, cached: str) -> Path:
    """A run that was stopped and resumed, beside the run `whole` without a stop."""
    train = ("train", journey.toml)
    journey.command(*train, *journey.settings("whole"), launcher=TORCHRUN)
    assert journey.stop("stopped") < EPOCH
    journey.command(*train, "--resume", *journey.settings("stopped"), launcher=TORCHRUN)
    return journey.folder / "stopped"


def test_check_accepts_what_new_writes(journey: Journey) -> None:
    output = journey.command("check", journey.toml)
    assert "no faults and the run fits" in output
    assert f"of {SQUARE + WIDE + 1} images in 2 buckets" in " ".join(output.split())


def test_rejects_are_listed_and_two_builders_write_the_bytes_of_one(journey: Journey, cached: str) -> None:
    assert "1 input was rejected: 1 truncated; see " in cached
    (reject,) = (journey.folder / f"{journey.kind}_data.cache" / "rejects.jsonl").read_text().splitlines()
    assert json.loads(reject)["key"] == "images#0/broken.png"
    journey.command("cache", journey.toml, "--set", 'cache_dir="other"', launcher=TORCHRUN)
    one = shards(journey.folder / f"{journey.kind}_data.cache")
    assert len(one) >= 2
    assert shards(journey.folder / "other") == one


def test_a_resumed_run_has_the_weights_of_one_without_a_stop(trained: Path) -> None:
    whole = trained.with_name("whole")
    runs = [read_checkpoint(run / "checkpoints" / checkpoint_name(STEPS))[0] for run in (whole, trained)]
    assert runs[0].keys() == runs[1].keys()
    different = [name for name, tensor in runs[0].items() if not torch.equal(tensor, runs[1][name])]
    assert different == []
    files = sorted((whole / EXPORT).rglob("*.safetensors"))
    assert files
    for file in files:
        assert (trained / file.relative_to(whole)).read_bytes() == file.read_bytes(), file.name


def test_the_stock_pipeline_draws_the_images_of_the_export(family: str, journey: Journey, trained: Path) -> None:
    out = journey.folder / "exported"
    journey.command("export", trained, out)
    proof = json.loads((out / "proof.json").read_text())
    plain = journey.stock_image(journey.model)
    if family in WITHOUT_LORA:
        assert proof["picture_max_difference"] < 1 / 255
        ours = journey.sample(journey.folder / "images-ours", out)
        stock = journey.stock_image(out)
    else:
        assert proof["loaded_by"] == "load_lora_weights of stock diffusers"
        ours = journey.sample(journey.folder / "images-ours", journey.model, "--lora", out)
        stock = journey.stock_image(journey.model, out)
    assert np.array_equal(ours, stock)
    assert not np.array_equal(ours, plain)
    if family in MERGED:
        merged = journey.folder / "merged"
        journey.command("lora", "merge", journey.model, merged, out)
        journey.command("lora", "extract", journey.model, merged, journey.folder / "lora.safetensors", "--rank", 2)


def test_a_run_is_evaluated_and_reported_without_words_of_another_family(
    family: str, journey: Journey, trained: Path
) -> None:
    page = journey.folder / "report.html"
    journey.command("report", trained, "--out", page)
    assert page.stat().st_size > 1000
    assert "flow" in journey.command("evaluate", trained, "--config", journey.toml)
    tomls = "".join(path.read_text() for path in sorted(journey.folder.glob("*.toml")))
    card = (trained / EXPORT / "README.md").read_text()
    if family != "sd3":
        assert sd3_words(journey.output + tomls + card + page.read_text()) == []


@pytest.fixture(scope="module", autouse=True)
def cleaning(family: str) -> Any:
    """PRX's pipeline cleans captions with a package that may be missing here."""
    with pytest.MonkeyPatch.context() as patch:
        if family == "prx":
            same = SimpleNamespace(fix_text=lambda text: text)
            patch.setattr(sys.modules[diffusers.PRXPipeline.__module__], "ftfy", same, raising=False)
        yield
