"""What the cache stage says before it encodes: cut captions, images that fit badly, a VAE that does not fit."""

import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from sd3_light.cache import advice, local_builder, shard_builder
from sd3_light.cache import verb as cache
from sd3_light.check import verb as check
from sd3_light.families.sd3.encoders import FrozenParts
from sd3_light.sources.buckets import fits, misfit
from sd3_light.sources.decode import Decoded, DecodeTask, Probe, SampleLocation, decode_images, probe_images
from tests.project import Project
from tests.unit.cache.samples import reject_lines

WIDE = 'resolutions = [64]\n[[directory]]\npath = "images"\n'


@pytest.fixture
def odd_project(fresh_project: Project) -> Project:
    """Four usual images, one that loses 95% of its area, and one that is enlarged 13 times."""
    for path in sorted(fresh_project.images.glob("*.png"))[4:]:
        path.unlink()
    captions = {f"{number:06d}.png": "a red star" for number in range(4)}
    for name, size in (("long.png", (1280, 64)), ("tiny.png", (5, 5))):
        Image.new("RGB", size, "red").save(fresh_project.images / name)
        captions[name] = "a red star"
    (fresh_project.images / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
    fresh_project.data(WIDE)
    return fresh_project


def build(project: Project, capfd: pytest.CaptureFixture[str], *overrides: str) -> str:
    cache.run(project.load(*overrides))
    return " ".join(capfd.readouterr().err.split())


def rejects(project: Project) -> dict[str, tuple[str, str]]:
    return {Path(line["key"]).name: (line["reason"], line["detail"]) for line in reject_lines(project)}


def test_extreme_sizes_are_reported_and_excludable(odd_project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    crop = "1 loses more than half by cropping, images#0/long.png 95% (max_crop excludes such images)"
    limits = "min_side or no_upscale exclude such images"
    enlarged = f"1 is enlarged more than twice, images#0/tiny.png 12.8 times ({limits})"
    loaded = odd_project.load()
    lines = dict(check.conclude(loaded.train, check.run(loaded), check.Target(on_cpu=True)))
    assert lines["images train"] == f"{crop}; {enlarged}"
    printed = build(odd_project, capfd)
    assert f"cache: warning: images fit their buckets badly: {crop}; {enlarged}" in printed
    assert "the VAE reconstructs 6 images with a median of" in printed

    odd_project.data(f"min_side = 16\nmax_crop = 0.5\n{WIDE}")
    printed = build(odd_project, capfd)
    assert "fit their buckets badly" not in printed
    assert rejects(odd_project) == {"long.png": ("crop_too_large", "1280x64"), "tiny.png": ("too_small", "5x5")}
    assert "2 inputs were rejected: 1 crop_too_large, 1 too_small" in printed
    odd_project.data(f'min_side = 16\nmax_crop = 0.5\nwhere = "height < 64 or width < 1000"\n{WIDE}')
    build(odd_project, capfd)
    assert rejects(odd_project).keys() == {"tiny.png"}, "samples that do not match are not rejects"
    assert check.run(odd_project.load()).data.rejects.counts == {"too_small": 1}
    odd_project.data(f"min_side = 16\nmax_crop = 0.5\n{WIDE}")
    estimate = check.run(odd_project.load())
    assert (estimate.data.samples, estimate.data.rejects.counts) == (4, {"crop_too_large": 1, "too_small": 1})


@pytest.mark.parametrize("text_tokens", ["padded", "real"])
def test_a_disk_that_is_too_small_is_reported_before_anything_is_encoded(
    fresh_project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], text_tokens: str
) -> None:
    keys = ("sd3_shard_size=4", "caching_num_workers=0", f"model.text_tokens={text_tokens!r}")
    loaded = fresh_project.load(*keys)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=3 << 10))
    verdict = dict(check.conclude(loaded.train, check.run(loaded), check.Target(on_cpu=True)))["disk, cache"]
    assert verdict.startswith("does not fit: at most " if text_tokens == "real" else "does not fit: ")
    printed = build(fresh_project, capfd, *keys)
    assert f"cache: warning: disk, cache: {verdict}" in printed, "the figures of check"
    assert printed.index("warning: disk") < printed.index("the VAE reconstructs")
    (victim, *_) = sorted((fresh_project.cache / "shards").glob("[!e]*.safetensors"))
    size = victim.stat().st_size
    victim.unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=size // 4))
    assert "warning: disk" in build(fresh_project, capfd, *keys), "only the missing shard counts"
    victim.unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Mock(free=8 * size))
    assert "warning: disk" not in build(fresh_project, capfd, *keys)


@pytest.mark.parametrize(
    ("keys", "size", "buckets", "reason"),
    [
        ({}, (5, 5), ["64x64", "256x256"], ""),
        ({"no_upscale": True}, (100, 100), ["64x64"], ""),
        ({"no_upscale": True}, (64, 63), [], "would_be_enlarged"),
        ({"min_side": 64}, (64, 64), ["64x64", "256x256"], ""),
        ({"min_side": 65}, (64, 900), [], "too_small"),
        ({"max_crop": 0.5}, (200, 100), ["64x64", "256x256"], ""),
        ({"max_crop": 0.49}, (200, 100), [], "crop_too_large"),
        ({"max_crop": 0.49, "no_upscale": True}, (80, 40), [], "would_be_enlarged"),
    ],
)
def test_limits_apply_at_each_resolution(files: Any, keys: Any, size: Any, buckets: list[str], reason: str) -> None:
    """An image is used at the resolutions that it fits, and rejected if it fits none."""
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    dataset = f'resolutions = [64, 256]\n{text}[[directory]]\npath = "images"\n'
    (directory,) = files.load(dataset=dataset).dataset.directories
    assert [str(bucket) for _, bucket, _ in fits(*size, directory)] == buckets
    assert misfit(*size, directory) == reason


def test_a_wrong_vae(odd_project: Project, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def noise(self: FrozenParts, pixels: np.ndarray) -> np.ndarray:
        return np.random.default_rng(0).integers(0, 256, pixels.shape, np.uint8)

    monkeypatch.setattr(FrozenParts, "reconstruct", noise)
    printed = build(odd_project, capfd)
    assert re.search(
        r"cache: warning: the VAE reconstructs 6 images with a median of \d\.\d dB, the worst with \d\.\d dB "
        r"\(images#0/\w+\.png\); 6 are below 20 dB: what they show is lost before training; choose a VAE that fits",
        printed,
    )
    assert "reconstructs" not in build(odd_project, capfd), "nothing was encoded"


def crash() -> None:
    assert multiprocessing.parent_process() is not None, "this would end the run"
    os._exit(1)


def decode_or_crash(tasks: Sequence[DecodeTask]) -> list[Decoded]:
    if any(task.location.image.path.endswith("long.png") for task in tasks):
        crash()
    return decode_images(tasks)


def probe_or_crash(locations: Sequence[SampleLocation]) -> list[Probe]:
    if any(location.with_thumbnail and location.image.path.endswith("long.png") for location in locations):
        crash()
    return probe_images(locations)


def test_an_image_that_crashes_its_decoder_is_left_out(
    odd_project: Project, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (advice, local_builder, shard_builder):
        monkeypatch.setattr(module, "decode_images", decode_or_crash, raising=False)
    assert "the VAE reconstructs 5 images" in build(odd_project, capfd)
    assert rejects(odd_project) == {"long.png": ("decoder_crashed", "")}


def test_few_images_with_thumbnails_are_probed_by_other_processes(
    odd_project: Project, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thumbnail is made of the decoded image, which can crash."""
    monkeypatch.setattr("sd3_light.sources.catalogue.probe_images", probe_or_crash)
    odd_project.data(f'{WIDE}duplicates = "drop_similar"\n')
    build(odd_project, capfd)
    assert rejects(odd_project)["long.png"] == ("decoder_crashed", "while its header was read")


def test_few_images_are_taken_from_as_many_shards_as_possible() -> None:
    class Plan:
        shards = tuple(range(5))

        def members(self, shard: int) -> list[int]:
            return [10 * shard + row for row in range(shard)]

    def taken(count: int) -> list[tuple[int, int]]:
        return list(advice._few(Plan(), count))  # type: ignore[arg-type]

    assert taken(4) == [(1, 10), (2, 20), (3, 30), (2, 21)]
    assert len(taken(100)) == 10
