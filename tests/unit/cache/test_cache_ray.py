"""The cache stage on a stand-in for Ray in this process; tests/distributed/test_ray_cache.py uses Ray itself."""

import errno
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import sd3_light
from sd3_light.cache import verb as cache
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from tests import fake_ray
from tests.fake_ray import FakeRay
from tests.project import Project
from tests.refusals import refused
from tests.unit.cache.samples import contents, reject_lines

WORKERS = "caching_num_workers=0"


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    with fake_ray.installed_ray(CPU=3.0) as ray:
        yield ray


def build(project: Project, *overrides: str, **flags: Any) -> cache.CacheReport:
    (report,) = project.build_cache(WORKERS, *overrides, ray="", **flags)
    return report


def test_the_bytes_are_those_of_a_single_process(fresh_project: Project, cached_project: Project, ray: FakeRay) -> None:
    report = build(fresh_project, ray_actors=2)
    assert report.encoded == 40
    assert contents(fresh_project) == contents(cached_project)
    assert [(options["num_cpus"], options["num_gpus"]) for options in ray.actor_options] == [(1, 0), (1, 0)]
    assert {(options["name"], options["num_cpus"]) for options in ray.task_options} == {("decode images", 1)}
    assert len(ray.remote_functions) == 1, "every remote function is stored by the cluster and by all its processes"
    assert (ray.num_killed, ray.connected) == (2, False)
    assert build(fresh_project).encoded == 0


def test_without_spare_cpus_decoding_shares_those_of_the_encoders(fresh_project: Project, ray: FakeRay) -> None:
    ray.resources["CPU"] = 1.0
    assert build(fresh_project).encoded == 40
    assert len(ray.actor_options) == 1
    assert {options["num_cpus"] for options in ray.task_options} == {0}


def test_a_cluster_with_gpus_encodes_on_them(fresh_project: Project, ray: FakeRay) -> None:
    ray.resources["GPU"] = 2.0
    refused(r"torch sees no GPU.*\(on the node \S+\)", build, fresh_project)
    assert [options["num_gpus"] for options in ray.actor_options] == [1]


def test_lost_actors_lose_nothing(fresh_project: Project, cached_project: Project, ray: FakeRay) -> None:
    calls: Counter[str] = Counter()

    def lose_some(name: str, args: Sequence[Any]) -> None:
        calls[name] += 1
        if name == "build" and calls[name] in (2, 3, 5):
            raise fake_ray.RayActorError("the node was removed")
        if name == "ready" and calls[name] == 3:  # dead for good: it is replaced
            raise fake_ray.RayActorError("killed")
        if name == "call" and calls[name] == 1:
            raise fake_ray.RayActorError("the node was removed")

    ray.before = lose_some
    assert build(fresh_project).encoded == 40
    assert contents(fresh_project) == contents(cached_project)


def test_a_poison_shard_is_rejected_and_retried(fresh_project: Project, cached_project: Project, ray: FakeRay) -> None:
    tries: Counter[str] = Counter()
    poison = sorted(path.name for path in (cached_project.cache / "shards").glob("images*.safetensors"))[1]

    def crash(name: str, args: Sequence[Any]) -> None:
        if name == "build":
            tries[args[0].shard.file] += 1
            if args[0].shard.file == poison:
                raise fake_ray.RayActorError("segmentation fault")

    ray.before = crash
    report = build(fresh_project)
    assert tries.pop(poison) == 4
    assert set(tries.values()) == {1}
    failed = [line for line in reject_lines(fresh_project) if line["reason"] == "shard_failed"]
    assert 0 < len(failed) == 40 - report.encoded == report.counts["rejected: shard_failed"]
    assert "failed 3 times alone on a node of the Ray cluster: RayActorError: segmentation fault" in failed[0]["detail"]
    ray.before = lambda name, args: None
    assert build(fresh_project).encoded == len(failed)
    assert contents(fresh_project) == contents(cached_project)


def test_a_poison_shard_keeps_its_intact_shard(project: Project, ray: FakeRay) -> None:
    """With --regenerate-cache shards are built again whose shards can be used."""
    before = contents(project)
    kept, lost, damaged = sorted((project.cache / "shards").glob("images*.safetensors"))[:3]

    def crash(name: str, args: Sequence[Any]) -> None:
        if name == "build" and args[0].shard.file in (kept.name, lost.name, damaged.name):
            raise fake_ray.RayActorError("segmentation fault")

    ray.before = crash
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    report = build(project, regenerate=True)
    after = contents(project)
    assert after[kept.name] == before[kept.name]
    assert not {lost.name, damaged.name} & after.keys()
    failed = [line for line in reject_lines(project) if line["reason"] == "shard_failed"]
    assert 0 < len(failed) == 40 - report.counts["used"]


def test_an_image_that_crashes_its_decoder_is_rejected(fresh_project: Project, ray: FakeRay) -> None:
    broken = sorted(fresh_project.images.glob("*.png"))[3]

    def crash(name: str, args: Sequence[Any]) -> None:
        if name == "decode images" and any(task.location.image.path == str(broken) for task in args[-1]):
            raise fake_ray.WorkerCrashedError("segmentation fault")

    ray.before = crash
    assert build(fresh_project).encoded == 39
    (line,) = reject_lines(fresh_project)
    assert line["reason"] == "decoder_crashed"
    assert broken.name in line["image"]


def test_new_images_are_probed_by_the_cluster(
    fresh_project: Project, cached_project: Project, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sd3_light.cache.dataset_build.FEW_IMAGES", 10)
    build(fresh_project, dry_run=True)
    assert {options["name"] for options in ray.task_options} == {"probe images"}
    assert not ray.actor_options
    build(fresh_project)
    assert contents(fresh_project) == contents(cached_project)


def test_tasks_for_which_no_cpu_gets_free_share_those_of_others(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    from sd3_light.cache.ray_encoder import QUEUE_SECONDS, TaskPool

    waits: list[float | None] = []

    def wait(refs: Sequence[Any], timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        waits.append(timeout)
        return [], list(refs)

    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "cancel", cancelled.append, raising=False)
    pool = TaskPool("double", lambda numbers: [2 * number for number in numbers], -1, ahead=2)
    assert list(pool.map([[1], [2, 3], [4], [5]])) == [[2], [4, 6], [8], [10]]
    assert [options["num_cpus"] for options in ray.task_options] == [1, 1, 0, 0, 0, 0]
    assert waits == [QUEUE_SECONDS, 0]  # it waits for the first one only
    assert len(cancelled) == 2


def test_only_encoders_never_ready_count_as_failed_starts(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    from sd3_light.cache import ray_builder

    monkeypatch.setattr(ray_builder.ShardEncoder, "ready", lambda self: "node-1")
    settings: Any = None
    pool = ray_builder.ActorPool(settings, 12)
    monkeypatch.setattr(ray_builder.ActorPool, "_num_cpus", 1)
    lost = pool.ready(12)
    assert len(lost) == 12
    ray.before = Mock(side_effect=fake_ray.RayActorError("the node was removed"))
    for actor in lost:
        pool.restart(actor)
    pool.ready(12)  # all twelve answers are errors
    refused(r"the encoders cannot start on the Ray cluster: .*removed.*; install the same", pool.ready, 12)


def test_failed_starts_before_a_success_are_forgotten(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long build on preemptible nodes loses more encoders than may fail in a row."""
    from sd3_light.cache import ray_builder

    answers = iter([False] * 6 + [True] + [False] * 7 + [True])

    def answer(name: str, args: Sequence[Any]) -> None:
        if not next(answers):
            raise fake_ray.RayActorError("the node was removed")

    monkeypatch.setattr(ray_builder.ShardEncoder, "ready", lambda self: "node-1")
    monkeypatch.setattr(ray_builder.ActorPool, "_num_cpus", 1)
    settings: Any = None
    pool = ray_builder.ActorPool(settings, 1)
    ray.before = answer
    for lost in (6, 7):
        for _ in range(lost):
            assert pool.ready(1) == []
        (actor,) = pool.ready(1)
        if lost == 6:
            pool.restart(actor)


def test_a_full_object_store_is_not_a_poison_shard(fresh_project: Project, ray: FakeRay) -> None:
    def fill(name: str, args: Sequence[Any]) -> None:
        if name == "decode images":
            raise fake_ray.OutOfDiskError("the local object store is full")

    ray.before = fill
    refused("cannot decode images: the object store of Ray and the disk of a node", build, fresh_project)


@pytest.mark.parametrize(("task", "number"), [("probe images", 0), ("decode images", 0), ("decode images", 1)])
def test_a_node_without_the_sources_is_named(
    fresh_project: Project, ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, number: int
) -> None:
    """The first decode task is one of the driver, for the reconstructions; the others are those of encoders."""
    monkeypatch.setattr("sd3_light.cache.dataset_build.FEW_IMAGES", 10)
    calls: Counter[str] = Counter()

    def unmount(name: str, args: Sequence[Any]) -> None:
        if name == task and calls[name] == number:
            fresh_project.images.rename(tmp_path / "unmounted")
        calls[name] += 1

    ray.before = unmount
    expected = r"/images does not exist on the node \S+; every node needs it at the same path$"
    refused(expected, build, fresh_project)
    assert calls[task] > number
    assert not list(fresh_project.cache.glob("shards/*"))


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch/ray-1")
CUDA = RuntimeError("CUDA driver version\nis insufficient")


@pytest.mark.parametrize(
    ("name", "broken", "message"),
    [
        (
            "cache.ray_encoder.open_shard_folder",
            Mock(side_effect=FULL),
            r"No space left on device \(/scratch/ray-1\); ",
        ),
        ("families.sd3.encoding.SD3Encoding.encoders", Mock(side_effect=CUDA), "RuntimeError: CUDA driver version is "),
        ("cache.ray_encoder.make_identity", lambda *_: {"vae": "x"}, "another format than on the driver's node"),
    ],
)
def test_an_error_of_every_shard_is_no_poison_and_names_the_node(
    fresh_project: Project, ray: FakeRay, monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, message: str
) -> None:
    monkeypatch.setattr(f"sd3_light.{name}", broken)
    refused(rf"{message}.*\(on the node \S+\)$", build, fresh_project)
    assert not (fresh_project.cache / "rejects.jsonl").exists()


def test_unshared_folder(fresh_project: Project, ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sd3_light.cache import ray_builder, ray_encoder

    real = ray_encoder.open_shard_folder
    (tmp_path / "another disk" / "shards").mkdir(parents=True)
    monkeypatch.setattr(ray_encoder, "open_shard_folder", lambda _, *rest: real(tmp_path / "another disk", *rest))
    monkeypatch.setattr(ray_builder, "VISIBLE_SECONDS", 0.0)
    refused(r"which this node does not see; cache_dir must be a folder that all nodes", build, fresh_project)


def test_an_unreachable_cluster_is_named(fresh_project: Project, ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=ConnectionError("Could not find any running Ray instance."))
    monkeypatch.setattr(ray, "init", refuse)
    refused(r"--ray: cannot connect .*Could not find any running Ray instance.*HOST:PORT", build, fresh_project)


def test_workers_import_nothing_local(fresh_project: Project, ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """They import from a checkout that is not installed. `tests/e2e/test_working_directory.py` asks a real cluster."""
    from sd3_light.cache import ray_builder

    monkeypatch.chdir(fresh_project.folder)
    build(fresh_project)
    assert ray.worker_path == str(Path(sd3_light.__file__).parents[1])
    assert Path.cwd() == fresh_project.folder
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(Path(sd3_light.__file__).parents[1]))
    ray_builder._connect("")
    assert ray.worker_path == sys.prefix


def test_ray_is_refused_under_a_launcher(fresh_project: Project, ray: FakeRay) -> None:
    with pytest.raises(UserError, match="run it without torchrun"):
        cache.run(fresh_project.load(), Launch(rank=0, local_rank=0, world_size=2), cache.CacheOptions(ray=""))


def test_without_ray_the_error_names_the_command(fresh_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ray.forget_users()
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(r"--ray needs Ray, which is not installed; run `pip install 'sd3-light\[ray", build, fresh_project)


def test_a_cluster_without_a_free_device(fresh_project: Project, ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    from sd3_light.cache import ray_builder

    lines: list[str] = []
    answers = iter([False] * 6)
    real = ray.wait
    monkeypatch.setattr(ray, "wait", lambda refs, timeout=None: real(refs) if next(answers, True) else ([], refs))
    monkeypatch.setattr(ray_builder, "_MESSAGE_SECONDS", 0.0)
    monkeypatch.setattr(ray_builder, "info", lines.append)
    assert build(fresh_project).encoded == 40
    assert any("it needs a node with a free CPU" in line for line in lines)
