"""Caches built on a Ray cluster of several nodes, some of which are lost, equal those of one process."""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sd3_light.cache.verb import CacheOptions
from sd3_light.cache.verb import run as run_cache
from tests.object_store import ObjectStore, object_store
from tests.project import Project
from tests.remote_project import RemoteProject, content, local_content
from tests.warm import REAL_PYTHON

ray = pytest.importorskip("ray", reason="the tests of caching on Ray need ray")
ROOT = Path(__file__).parents[2]
NODE = {"object_store_memory": 100 << 20}
SMALL = ("sd3_shard_size = 8", "sd3_shard_size = 2")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store("ray-builds") as store:
        yield store


@pytest.fixture(scope="module")
def cluster(store: ObjectStore) -> Iterator[Any]:
    """A cluster without CPUs: the tests add nodes. Its processes inherit the credentials of the store."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-")  # sockets have short paths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", REAL_PYTHON)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.setenv("RAY_TMPDIR", folder)  # also for the file that names the last cluster of this machine
        os.mkdir(f"{folder}/ray")
        patch.setenv("RAY_worker_niceness", "0")  # by default 15: on a busy machine they would hardly run
        patch.setenv("RAY_raylet_start_wait_time_s", "300")
        timeouts = {"worker_register_timeout_seconds": 600}  # for a busy machine
        head = {**NODE, "num_cpus": 0, "include_dashboard": False, "_system_config": timeouts}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
        ray.shutdown()
        cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def add_node(cluster: Any) -> Iterator[Callable[[], Any]]:
    """A function that adds a node with one CPU; all are removed after the test."""
    nodes: list[Any] = []

    def add() -> Any:
        nodes.append(cluster.add_node(num_cpus=1, **NODE))
        return nodes[-1]

    yield add
    for node in nodes:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> dict[int, Callable[[Any], object]]:
    """Functions by number of finished units, called with the actor that finished the last of them."""
    from sd3_light.cache import ray_builder

    actions: dict[int, Callable[[Any], object]] = {}
    real, count = ray_builder._UnitRun.finish, 0

    def finish(self: Any, worker: Any, *rest: Any) -> None:
        nonlocal count
        real(self, worker, *rest)
        count += 1
        if action := actions.pop(count, None):
            action(worker)

    monkeypatch.setattr(ray_builder._UnitRun, "finish", finish)
    return actions


def process_of(actor: Any) -> int:
    return int(ray.get(actor.handle.__ray_call__.remote(lambda self: os.getpid())))


def small_shards(project: Project) -> None:
    project.train_toml.write_text(project.train_toml.read_text().replace(*SMALL))


def build(project: Project, **options: Any) -> int:
    (report,) = run_cache(project.load("caching_num_workers=1"), options=CacheOptions(ray="", **options))
    return report.encoded


def test_from_s3_to_s3_with_a_killed_actor_and_a_removed_node(
    cluster: Any,
    store: ObjectStore,
    add_node: Callable[[], Any],
    after: dict[int, Callable[[Any], object]],
    raw_project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
    local = raw_project.copy(tmp_path / "local")
    small_shards(local)
    local.build_cache("caching_num_workers=0")
    project = RemoteProject(local, store, tmp_path / "s3" / "project")
    nodes = [add_node(), add_node()]
    after[2] = lambda actor: os.kill(process_of(actor), signal.SIGKILL)
    after[6] = lambda _: cluster.remove_node(nodes[1], allow_graceful=False)
    assert project.build(ray="") == 40
    assert after == {}
    assert content(store.get(project.url)) == local_content(local)
    assert project.build("another machine") == 0
    secrets = [os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]]
    manifest = store.files.cat_file(f"{project.url}/manifest.json").decode()
    assert not any(secret in manifest for secret in secrets)
    for each in (local, project):
        each.train("max_steps=2")
    assert list(project.losses()) == [1, 2]
    assert project.losses() == local.losses()


def test_a_poison_unit_a_crashing_image_and_a_node_that_joins(
    add_node: Callable[[], Any],
    after: dict[int, Callable[[Any], object]],
    raw_project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sd3_light.cache import ray_builder
    from tests.ray_actors import POISON, CrashingEncoder
    from tests.ray_decode import CRASHING

    project = raw_project.copy(tmp_path / "project")
    small_shards(project)
    local = project.copy(tmp_path / "local")
    local.build_cache("caching_num_workers=0")
    add_node()
    after[4] = lambda _: add_node()
    with monkeypatch.context() as patch:
        patch.setattr(ray_builder, "ShardEncoder", CrashingEncoder)
        encoded = build(project, ray_actors=2)
    lines = [json.loads(line) for line in (project.cache / "rejects.jsonl").read_text().splitlines()]
    failed = [line["key"] for line in lines if line["reason"] == "shard_failed"]
    assert 1 <= len(failed) <= 2
    assert any(key.endswith(POISON) for key in failed)
    (crashed,) = (line["key"] for line in lines if line["reason"] == "decoder_crashed")
    assert crashed.endswith(CRASHING)
    assert encoded == 40 - len(failed) - 1
    ours, expected = local_content(project), local_content(local)
    shards = [name for name in expected if name.endswith(".safetensors")]
    different = [name for name in shards if ours.get(name) != expected[name]]
    assert len(different) == 2  # the poison unit, and the one without the crashing image
    assert build(project) > 0  # the next run tries the poison unit again
    assert after == {}
