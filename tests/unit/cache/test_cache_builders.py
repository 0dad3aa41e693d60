"""Several builders of one cache, some of them killed, always produce the same shards."""

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.cache import verb as stage
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import MANIFEST, Manifest
from sd3_light.engines import Launch
from sd3_light.engines.feed import open_cache
from sd3_light.families.sd3.encoders import FrozenParts
from sd3_light.files import file_sha256
from sd3_light.sources.claims import Claims
from tests.cases import combinations
from tests.project import Project, quick_caching
from tests.refusals import refused
from tests.waiting import HANG_SECONDS, is_running, wait_until

WORKERS = "caching_num_workers=2"


def shards(project: Project) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in (project.cache / "shards").glob("*.safetensors")}


def start(work: Callable[..., object], *args: object) -> BaseProcess:
    """Run a function in a forked process, which need not import torch again."""

    def run() -> None:
        torch.set_num_threads(1)  # makes torch's thread pool here: the threads that load models would race for it
        work(*args)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def build(project: Project, rank: int = 0, world: int = 1, *overrides: str) -> None:
    with quick_caching():
        stage.run(project.load(WORKERS, *overrides), Launch(rank=rank, local_rank=rank, world_size=world))


def join(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(HANG_SECONDS)
        assert process.exitcode == 0


def assert_valid(project: Project) -> None:
    """Assert that the manifest lists the complete shards and no temporary file or claim is left."""
    manifest = Manifest.load(project.cache)
    assert {shard.file: shard.sha256 for shard in (*manifest.shards, manifest.empty)} == shards(project)
    assert not list(project.cache.rglob("*.tmp"))
    assert not list((project.cache / "claims").iterdir())


@pytest.mark.parametrize("world", combinations((1, 2, 3), fast=[(3,)]))
def test_several_builders_make_the_same_shards(fresh_project: Project, cached_project: Project, world: int) -> None:
    join([start(build, fresh_project, rank, world) for rank in range(world)])
    assert shards(fresh_project) == shards(cached_project)
    assert (fresh_project.cache / "rejects.jsonl").read_bytes() == (cached_project.cache / "rejects.jsonl").read_bytes()
    assert_valid(fresh_project)


def test_two_runs_with_different_configs_do_not_interfere(fresh_project: Project, cached_project: Project) -> None:
    join([start(build, fresh_project), start(build, fresh_project, 0, 1, "model.t5_max_length=12")])
    assert shards(cached_project).items() < shards(fresh_project).items()
    (report,) = stage.run(fresh_project.load(WORKERS))
    assert report.encoded == 0
    loaded = fresh_project.load()
    assert open_cache(loaded.dataset, loaded.train, Launch()).manifest.counts["used"] == 40


def test_the_shards_of_a_killed_builder_are_taken_over(fresh_project: Project, cached_project: Project) -> None:
    first, second = start(build, fresh_project, 0, 2), start(build, fresh_project, 1, 2)
    folder = fresh_project.cache / "shards"
    wait_until(lambda: list(folder.glob("*.safetensors")))
    os.kill(second.pid, signal.SIGKILL)
    second.join()
    join([first])
    assert shards(fresh_project) == shards(cached_project)


def test_worker_processes_exit_with_a_killed_builder(fresh_project: Project) -> None:
    process = start(build, fresh_project)
    children = wait_until(lambda: _children(process.pid))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    wait_until(lambda: not any(map(is_running, children)), lambda: "orphaned workers are left")


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def test_a_full_disk_leaves_a_valid_cache(fresh_project: Project, cached_project: Project, tmp_path: Path) -> None:
    """Simulated by a limit on file sizes: small shards fit, larger ones do not."""
    message = tmp_path / "message"
    sizes = sorted(path.stat().st_size for path in (cached_project.cache / "shards").glob("*.safetensors"))

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = sizes[len(sizes) // 2]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            build(fresh_project)
        except UserError as fault:
            message.write_text(str(fault))

    join([start(fill)])
    assert "cannot write" in message.read_text()
    assert "File too large" in message.read_text()
    assert message.read_text().count("\n") == 0
    assert not (fresh_project.cache / MANIFEST).exists()
    assert not list(fresh_project.cache.rglob("*.tmp"))
    assert shards(fresh_project).items() < shards(cached_project).items()
    join([start(build, fresh_project)])
    assert shards(fresh_project) == shards(cached_project)
    assert_valid(fresh_project)


def test_a_rank_encodes_unclaimed_shards_then_waits(fresh_project: Project, cached_project: Project) -> None:
    loaded = fresh_project.load("sd3_manifest_timeout_sec=0.3")
    with pytest.raises(UserError, match=r"timed out waiting for the main process to write .*manifest\.json"):
        stage.run(loaded, Launch(rank=1, local_rank=1, world_size=2))
    assert shards(fresh_project) == shards(cached_project)
    (report,) = stage.run(loaded, Launch(rank=0, local_rank=0, world_size=2))
    assert report.encoded == 0


def test_the_main_process_reports_what_it_waits_for(project: Project) -> None:
    (lost,) = Manifest.load(project.cache).shards[:1]
    (project.cache / "shards" / lost.file).unlink()
    loaded = project.load("sd3_manifest_timeout_sec=0.3")
    with Claims(project.cache / "claims") as other:
        other.take(lost.file)
        refused(r"timed out waiting for 1 shards of other processes, such as images-0", stage.run, loaded)


def test_an_older_manifest_is_not_accepted_for_a_larger_plan(project: Project) -> None:
    """All shards of the old manifest are in the new plan, but a rank that used it would train on fewer samples."""
    (project.folder / "more").mkdir()
    (project.images / "000000.png").rename(project.folder / "more" / "a.png")
    (project.folder / "more" / "a.txt").write_text("an image")
    project.data(project.data_toml.read_text() + '\n[[directory]]\npath = "more"\n')
    loaded = project.load("sd3_manifest_timeout_sec=0.3")
    refused("timed out waiting for the main process", stage.run, loaded, Launch(rank=1, local_rank=1, world_size=2))
    stage.run(loaded, Launch(rank=0, local_rank=0, world_size=2))
    assert {shard.directory for shard in Manifest.load(project.cache).shards} == {"images#0", "more#0"}


def test_a_late_rank_uses_the_existing_manifest(project: Project) -> None:
    """The main process may finish before another one starts, and does not write the manifest again."""
    stage.run(project.load(), Launch(rank=0, local_rank=0, world_size=2))
    os.utime(project.cache / MANIFEST, ns=(1, 1))
    (report,) = stage.run(project.load("sd3_manifest_timeout_sec=0.3"), Launch(rank=1, local_rank=1, world_size=2))
    assert report.counts["used"] == 40


def test_the_encoders_are_freed_before_training(fresh_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    modules: list[Any] = []
    real = FrozenParts.part

    def part(self: Any, name: str) -> Any:
        module = real(self, name)
        modules.append(weakref.ref(module))
        return module

    monkeypatch.setattr(FrozenParts, "part", part)
    stage.run(fresh_project.load())
    assert modules
    assert all(reference() is None for reference in modules)
