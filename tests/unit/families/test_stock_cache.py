"""Caches of stock families: updates encode what changed, clips of videos too, and two builders write the same bytes."""

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sd3_light.cache import verb as cache
from sd3_light.check import verb as check
from sd3_light.core.registry import family_named
from sd3_light.data.manifest import SHARDS, Manifest
from sd3_light.engines import Launch
from sd3_light.files import file_sha256
from tests.project import Project
from tests.stock import save_stock
from tests.waiting import HANG_SECONDS

TRAIN = """
output_dir = "run"
dataset = "data.toml"
cache_dir = "cache"
max_steps = 1
save_every_n_steps = 1
micro_batch_size_per_gpu = 2
caching_batch_size = 4
caching_num_workers = 0
sd3_shard_size = {size}

[model]
diffusers_path = "{model}"
text_max_length = {length}
dtype = "float32"
"""
COUNT = 9


def write_project(folder: Path, name: str, length: int = 12, extra: str = "") -> Project:
    """Write a project with images, or clips of five frames for `wan`."""
    project = Project(folder, save_stock(name, folder / "model"))
    project.images.mkdir()
    for number in range(COUNT):
        frames = [Image.new("RGB", (64, 64), (20 * number, 30 * at, 60)) for at in range(6 if name == "wan" else 1)]
        if name == "wan":
            path = project.images / f"{number}.gif"
            frames[0].save(path, save_all=True, append_images=frames[1:], duration=100)
        else:
            frames[0].save(project.images / f"{number}.png")
        (project.images / f"{number}.txt").write_text(f"caption {number}")
    set_length(project, length)
    videos = "frames = [5]\n" if name == "wan" else ""
    project.data(f'resolutions = [64]\n[[directory]]\npath = "images"\n{videos}{extra}')
    return project


def set_length(project: Project, length: int) -> None:
    # a shard of clips holds fewer samples
    text = TRAIN.format(size=20, model=project.model, length=length)
    project.train_toml.write_text(text, encoding="utf-8")


def build(project: Project, rank: int = 0, world: int = 1) -> cache.CacheReport:
    torch.set_num_threads(1)
    launch = Launch(rank=rank, local_rank=rank, world_size=world)
    (report,) = cache.run(check.load(project.train_toml), launch)
    return report


def shards(project: Project) -> dict[str, str]:
    manifest = Manifest.load(project.cache)
    files = [entry.file for entry in (*manifest.shards, manifest.empty)]
    return {file: file_sha256(project.cache / SHARDS / file) for file in files}


def in_two_processes(project: Project) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=build, args=(project, rank, 2)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG_SECONDS)
        assert process.exitcode == 0


def counted(report: cache.CacheReport) -> Sequence[Any]:
    return report.values.images, report.values.captions


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_an_update_encodes_what_changed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(family_named(name)), "packages", ())
    project = write_project(tmp_path / "project", name)
    assert counted(build(project)) == (COUNT, COUNT)
    assert counted(build(project)) == (0, 0)
    (project.images / "3.txt").write_text("another caption")
    several = project.copy(tmp_path / "several")
    assert counted(build(project)) == (0, 1)
    in_two_processes(several)
    assert shards(several) == shards(project)
    suffix = "gif" if name == "wan" else "png"
    for path in (f"5.{suffix}", "5.txt"):
        (project.images / path).rename(project.images / f"renamed {path}")
    assert counted(build(project)) == (0, 0)
    set_length(project, 14)
    report = build(project)
    assert (report.values.images, report.values.copied_images) == (0, COUNT)
    assert report.values.captions == COUNT
    if name == "wan":
        project.data(project.data_toml.read_text() + "fps = 8\n")
        assert counted(build(project)) == (COUNT, 0)
