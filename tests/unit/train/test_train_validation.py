"""`validation = true`: a part of the dataset is held out, of one cache, and measures the run."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from sd3_light.cache import dataset_build
from sd3_light.cache.verb import CacheOptions
from sd3_light.config import ConfigFaults
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import HELD_OUT, Manifest
from sd3_light.data.shards import read_origins
from sd3_light.data.split import RECORD
from sd3_light.data.stream import MicroBatches
from sd3_light.engines import Launch
from sd3_light.engines.feed import make_order, open_cache
from sd3_light.evaluate.verb import validation_losses
from sd3_light.export.chosen import best_export
from sd3_light.journeys import cache_then_train
from sd3_light.randomness import sample_id
from tests.project import Project, quick_caching

DIVIDED = """
size_buckets = [[64, 64], [80, 48], [48, 80]]
validation = true

[[directory]]
path = "images"
"""
EVALUATED = ("eval_every_n_steps=2", "max_steps=4", "save_every_n_steps=2")


@pytest.fixture
def divided(project: Project) -> Project:
    """The project, with its cache from the time before it was divided."""
    project.data(DIVIDED)
    return project


def ids_of(project: Project, side: Any) -> set[int]:
    """Return the samples of an epoch of one side."""
    loaded = project.load()
    data = open_cache(loaded.dataset, loaded.train, Launch(), side)
    order = make_order(data, loaded, Launch())
    batches = MicroBatches(data, order, 0, 1, 1)
    return {number for step in range(order.steps_per_epoch) for number in batches[step]["sample_id"].tolist()}


def names_of(project: Project) -> dict[int, str]:
    files = [project.cache / "shards" / entry.file for entry in Manifest.load(project.cache).shards]
    return {sample_id(origin.key): Path(origin.key).name for file in files for origin in read_origins(file)}


def test_rows_of_the_one_cache_are_divided(divided: Project, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = r"no part of the cache at .* is held out, and .* says validation = true"
    with quick_caching(), pytest.raises(UserError, match=refusal):
        cache_then_train(divided.load(), Launch(), CacheOptions(trust=True))
    capsys.readouterr()
    before = {path.name: path.stat().st_mtime_ns for path in (divided.cache / "shards").iterdir()}
    (report,) = divided.build_cache()
    assert report.encoded == 0, "nothing is encoded twice"
    assert {path.name: path.stat().st_mtime_ns for path in (divided.cache / "shards").iterdir()} == before
    assert "2 of 40 images are held out" in " ".join(capsys.readouterr().err.split())
    train, held = ids_of(divided, "train"), ids_of(divided, "validation")
    assert (len(train), len(held)) == (38, 2)
    assert not train & held
    assert train | held == ids_of(divided, "all")
    assert Manifest.load(divided.cache).counts[HELD_OUT] == 2
    divided.build_cache()
    assert ids_of(divided, "validation") == held
    loaded = divided.load()
    data = open_cache(loaded.dataset, loaded.train, Launch(), "train")
    orders = [make_order(data, loaded, Launch(rank, 2)) for rank in range(2)]
    assert orders[0] == orders[1]
    seen = set()
    for rank in range(2):
        batches = MicroBatches(data, orders[0], rank, 2, 1)
        seen |= {int(number) for step in range(orders[0].steps_per_epoch) for number in batches[step]["sample_id"]}
    assert seen == ids_of(divided, "train")


def test_a_run_trains_evaluates_and_does_the_same_from_a_url(divided: Project, capsys: Any, tmp_path: Path) -> None:
    divided.train(*EVALUATED, "ema.enable=false")
    printed = " ".join(capsys.readouterr().err.split())
    assert "validation: 2 of 40 images are held out; they are never trained on" in printed
    evals = divided.events("eval")
    assert [(event["step"], event["set"]) for event in evals] == [(2, "validation"), (4, "validation")]
    best = best_export(divided.run)
    assert best.name in ("step-00000002", "step-00000004")
    losses = validation_losses(divided.load(*EVALUATED), divided.run / "exports" / "step-00000004")
    assert losses["validation"]["flow"] == pytest.approx(evals[-1]["flow"], rel=2e-2)
    divided.train(*EVALUATED, 'output_dir="here"')
    url = f'cache_dir="{divided.cache.as_uri()}"'
    divided.train(*EVALUATED, url, f'stream_cache_dir="{tmp_path / "fetched"}"', 'output_dir="there"')
    assert divided.losses("there") == divided.losses("here")
    here, there = ([event["flow"] for event in divided.events("eval", run)] for run in ("here", "there"))
    assert here == there


def test_the_validation_loss_is_that_of_a_set_of_the_same_images(divided: Project) -> None:
    divided.build_cache()
    held = ids_of(divided, "validation")
    names = names_of(divided)
    folder = divided.folder / "val"
    folder.mkdir()
    captions = json.loads((divided.images / "captions.json").read_text(encoding="utf-8"))
    for number in held:
        shutil.copy(divided.images / names[number], folder)
    kept = {names[number]: captions[names[number]] for number in held}
    (folder / "captions.json").write_text(json.dumps(kept), encoding="utf-8")
    text = DIVIDED.replace("validation = true", "").replace('"images"', '"val"')
    (divided.folder / "val.toml").write_text(text, encoding="utf-8")
    keys = (*EVALUATED, 'eval_datasets=["val.toml"]', "ema.enable=false")
    divided.train(*keys)
    by_set = {event["set"]: event for event in divided.events("eval") if event["step"] == 4}
    assert by_set.keys() == {"validation", "val"}
    # noise follows the sample's id, which differs between the two
    assert by_set["validation"]["flow"] == pytest.approx(by_set["val"]["flow"], rel=0.2)


def add_image(project: Project, name: str, image: Image.Image) -> int:
    image.save(project.images / f"{name}.png")
    (project.images / f"{name}.txt").write_text("an image", encoding="utf-8")
    return sample_id(f"images#0/{name}.png")


def test_added_images_change_no_side_and_copies_are_not_trained_on(divided: Project) -> None:
    divided.build_cache()
    train, held = ids_of(divided, "train"), ids_of(divided, "validation")
    rng = np.random.default_rng(0)
    for number in range(150):
        pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        add_image(divided, f"new{number}", Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST))
    divided.build_cache()
    assert train <= ids_of(divided, "train")
    assert held <= ids_of(divided, "validation")
    assert len(ids_of(divided, "validation")) <= 190 // 25
    # a copy of a held-out image is not trained on
    names = names_of(divided)
    held = ids_of(divided, "validation")
    with Image.open(divided.images / names[min(held)]) as image:
        copy = add_image(divided, "copy", image.resize((2 * image.width, 2 * image.height), Image.Resampling.BICUBIC))
    divided.build_cache()
    assert copy in ids_of(divided, "all")
    assert copy not in ids_of(divided, "train")
    assert held <= ids_of(divided, "validation")


def test_sides_are_decided_once_and_return_if_lost(divided: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    divided.build_cache()
    held = ids_of(divided, "validation")
    shutil.rmtree(divided.cache)
    divided.build_cache()
    assert ids_of(divided, "validation") == held
    divided.data(DIVIDED.replace("validation = true", ""))
    divided.build_cache()
    assert Manifest.load(divided.cache).held_out is None
    divided.data(DIVIDED)
    divided.build_cache()
    assert ids_of(divided, "validation") == held
    assert (divided.cache / "catalogue" / RECORD).is_file()
    compared = Mock(side_effect=AssertionError("the images are compared again"))
    with monkeypatch.context() as patch:
        patch.setattr("sd3_light.cache.split.split_images", compared)
        divided.build_cache()
    # the thumbnail of a truncated image is not made, so it is rejected before the split
    broken = divided.images / names_of(divided)[min(held)]
    broken.write_bytes(broken.read_bytes()[:-200])
    divided.build_cache()
    assert ids_of(divided, "train") | ids_of(divided, "validation") == ids_of(divided, "all")


def test_eval_sets_are_not_divided(divided: Project, capsys: pytest.CaptureFixture[str]) -> None:
    (divided.folder / "val.toml").write_text(DIVIDED, encoding="utf-8")
    with pytest.raises(ConfigFaults, match="only the training set is divided"):
        divided.load('eval_datasets=["val.toml"]')
    (divided.folder / "validation.toml").write_text(DIVIDED.replace("validation = true", ""), encoding="utf-8")
    with pytest.raises(ConfigFaults, match="the name of the part of the dataset that is held out"):
        divided.load('eval_datasets=["validation.toml"]')
    assert divided.load('eval_datasets=[{name="v", config="validation.toml"}]').evaluates
    for path in sorted(divided.images.glob("*.png"))[1:]:
        path.unlink()
    divided.train("max_steps=1", "eval_every_n_steps=1")
    assert "none of 1 images can be held out" in " ".join(capsys.readouterr().err.split())
    assert divided.events("eval") == []


def test_the_manifest_is_written_last(divided: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that is killed before it leaves the old manifest, and the decisions stay."""
    with monkeypatch.context() as patch:
        patch.setattr(dataset_build, "write_manifest", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            divided.build_cache()
    assert Manifest.load(divided.cache).held_out is None
    decisions = (divided.cache / "catalogue" / RECORD).read_bytes()
    divided.build_cache()
    assert (divided.cache / "catalogue" / RECORD).read_bytes() == decisions
