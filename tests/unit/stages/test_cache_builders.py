"""Several builders of one cache, killed ones too: always the same shards, and nothing broken on the way."""

import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config.faults import UserError
from sd3_light.data.building.claims import Claims
from sd3_light.data.manifest import MANIFEST, Manifest
from sd3_light.engines import Launch
from sd3_light.files import file_sha256
from sd3_light.stages import cache as stage
from sd3_light.training.data import open_cache
from tests.project import Project

WORKERS = "caching_num_workers=2"


def shards(project: Project) -> dict[str, str]:
    """Every shard in the folder by its hash; nothing else may lie there but what belongs to one."""
    return {path.name: file_sha256(path) for path in (project.cache / "shards").glob("*.safetensors")}


def start(work: Callable[..., object], *given: object) -> BaseProcess:
    """Run something in a forked process, which need not import torch anew."""
    process = multiprocessing.get_context("fork").Process(target=work, args=given)
    process.start()
    return process


def build(project: Project, rank: int = 0, world: int = 1, *overrides: str) -> None:
    stage.run(project.load(WORKERS, *overrides), Launch(rank=rank, local_rank=rank, world=world))


def join(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(120)
        assert process.exitcode == 0


def is_sound(project: Project) -> None:
    """The manifest names whole shards, and no temporary file or claim is left."""
    manifest = Manifest.load(project.cache)
    assert {shard.file: shard.sha256 for shard in (*manifest.shards, manifest.empty)} == shards(project)
    assert not list(project.cache.rglob("*.tmp"))
    assert not list((project.cache / "claims").iterdir())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_number_of_builders_makes_the_same_shards(
    fresh_project: Project, cached_project: Project, world: int
) -> None:
    join([start(build, fresh_project, rank, world) for rank in range(world)])
    assert shards(fresh_project) == shards(cached_project)
    assert (fresh_project.cache / "rejects.jsonl").read_bytes() == (cached_project.cache / "rejects.jsonl").read_bytes()
    is_sound(fresh_project)


def test_two_runs_started_by_mistake_share_the_work(fresh_project: Project, cached_project: Project) -> None:
    join([start(build, fresh_project) for _ in range(2)])
    assert shards(fresh_project) == shards(cached_project)
    is_sound(fresh_project)


def test_two_runs_of_different_configs_do_not_harm_each_other(fresh_project: Project, cached_project: Project) -> None:
    join([start(build, fresh_project), start(build, fresh_project, 0, 1, "model.t5_max_length=12")])
    assert shards(cached_project).items() < shards(fresh_project).items()
    (report,) = stage.run(fresh_project.load(WORKERS))
    assert report.encoded == 0
    loaded = fresh_project.load()
    assert open_cache(loaded.dataset, loaded.train, Launch()).manifest.counts["used"] == 40


@pytest.mark.slow  # one kill is tested below, and in test_cache.py
def test_a_builder_killed_at_ten_random_moments_ends_with_the_same_shards(
    fresh_project: Project, cached_project: Project, tmp_path: Path
) -> None:
    timed = fresh_project.copy(tmp_path / "timed")
    begun = time.monotonic()
    join([start(build, timed)])
    lasts = time.monotonic() - begun
    moments = random.Random(5)
    whole = set(shards(cached_project))
    for _ in range(10):
        process = start(build, fresh_project)
        time.sleep(moments.uniform(0.05, 0.9) * lasts)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        folder = fresh_project.cache / "shards"
        if folder.is_dir():
            # whatever has its name is whole
            assert {path.name for path in folder.glob("*.safetensors")} <= whole
            assert shards(fresh_project).items() <= shards(cached_project).items()
    join([start(build, fresh_project)])
    assert shards(fresh_project) == shards(cached_project)
    is_sound(fresh_project)


def test_a_killed_builders_share_is_picked_up_by_the_other(fresh_project: Project, cached_project: Project) -> None:
    first, second = start(build, fresh_project, 0, 2), start(build, fresh_project, 1, 2)
    folder = fresh_project.cache / "shards"
    while not list(folder.glob("*.safetensors")):
        time.sleep(0.01)
    os.kill(second.pid, signal.SIGKILL)
    second.join()
    join([first])
    assert shards(fresh_project) == shards(cached_project)


def test_worker_processes_die_with_a_killed_builder(fresh_project: Project) -> None:
    process = start(build, fresh_project)
    while not (children := _children(process.pid)):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    deadline = time.monotonic() + 20
    while any(_is_running(child) for child in children):
        assert time.monotonic() < deadline, "orphans are left"
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_full_disk_stops_with_one_line_and_leaves_a_valid_cache(
    fresh_project: Project, cached_project: Project, tmp_path: Path
) -> None:
    """A limit on the size of files stands for the disk: small shards fit, the larger do not."""
    said = tmp_path / "said"
    sizes = sorted(path.stat().st_size for path in (cached_project.cache / "shards").glob("*.safetensors"))

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = sizes[len(sizes) // 2]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            build(fresh_project)
        except UserError as fault:
            said.write_text(str(fault))

    join([start(fill)])
    assert "cannot write" in said.read_text()
    assert "File too large" in said.read_text()
    assert said.read_text().count("\n") == 0
    assert not (fresh_project.cache / MANIFEST).exists()
    assert not list(fresh_project.cache.rglob("*.tmp"))
    assert shards(fresh_project).items() < shards(cached_project).items()
    join([start(build, fresh_project)])
    assert shards(fresh_project) == shards(cached_project)
    is_sound(fresh_project)


# --- who waits for whom --------------------------------------------------------------------------


def test_a_rank_encodes_what_is_free_then_waits_for_the_manifest(
    fresh_project: Project, cached_project: Project
) -> None:
    loaded = fresh_project.load("sd3_manifest_timeout_sec=0.3")
    with pytest.raises(UserError, match=r"gave up waiting for the main process to write .*manifest\.json"):
        stage.run(loaded, Launch(rank=1, local_rank=1, world=2))
    assert shards(fresh_project) == shards(cached_project)
    (report,) = stage.run(loaded, Launch(rank=0, local_rank=0, world=2))
    assert report.encoded == 0


def test_the_main_process_says_what_it_waits_for(project: Project) -> None:
    (lost,) = Manifest.load(project.cache).shards[:1]
    (project.cache / "shards" / lost.file).unlink()
    loaded = project.load("sd3_manifest_timeout_sec=0.3")
    with Claims(project.cache / "claims") as other:
        other.take(lost.file)
        with pytest.raises(UserError, match=r"gave up waiting for 1 shards of other processes, such as images-0"):
            stage.run(loaded)


def test_an_older_manifest_is_not_taken_for_that_of_a_larger_plan(project: Project) -> None:
    """Every shard of the old manifest is in the new plan too, but a rank that went on with it would train on less."""
    (project.folder / "more").mkdir()
    (project.images / "000000.png").rename(project.folder / "more" / "a.png")
    (project.folder / "more" / "a.txt").write_text("a picture")
    project.data(project.data_toml.read_text() + '\n[[directory]]\npath = "more"\n')
    loaded = project.load("sd3_manifest_timeout_sec=0.3")
    with pytest.raises(UserError, match="gave up waiting for the main process"):
        stage.run(loaded, Launch(rank=1, local_rank=1, world=2))
    stage.run(loaded, Launch(rank=0, local_rank=0, world=2))
    assert {shard.directory for shard in Manifest.load(project.cache).shards} == {"images#0", "more#0"}


def test_a_rank_that_comes_late_takes_the_manifest_that_stands(project: Project) -> None:
    """The main process may be done before another has begun, and writes no second manifest."""
    stage.run(project.load(), Launch(rank=0, local_rank=0, world=2))
    os.utime(project.cache / MANIFEST, ns=(1, 1))
    (report,) = stage.run(project.load("sd3_manifest_timeout_sec=0.3"), Launch(rank=1, local_rank=1, world=2))
    assert report.counts["used"] == 40


def test_the_encoders_are_freed_before_training(fresh_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    held: list[Any] = []
    real = stage.FrozenParts.part

    def part(self: Any, name: str) -> Any:
        module = real(self, name)
        held.append(weakref.ref(module))
        return module

    monkeypatch.setattr(stage.FrozenParts, "part", part)
    fresh_project.build_cache()
    assert held
    assert all(reference() is None for reference in held)
