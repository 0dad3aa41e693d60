"""Caches built at a URL, from images at a URL, equal those of a folder: resumed, repaired, updated and in parts."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import MANIFEST
from sd3_light.data.store import protocols, remote
from sd3_light.stages import inspect
from sd3_light.stages.inspect.cache_stats import draw_samples
from sd3_light.stages.inspect.fetched import opened
from tests.object_store import ObjectStore, object_store
from tests.project import Project
from tests.remote_project import RemoteProject, content, local_content


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store("builds") as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setattr(protocols, "PAUSES_SEC", (0.0,))
    monkeypatch.setattr(remote, "PAUSES_SEC", (0.0,))
    server.reset()
    yield server
    server.reset()


@pytest.fixture
def project(tmp_path: Path, cached_project: Project, store: ObjectStore) -> RemoteProject:
    return RemoteProject(cached_project, store, tmp_path / "project")


def writes(store: ObjectStore) -> list[str]:
    return [path for method, path in store.requests if method in ("PUT", "POST", "DELETE")]


def test_a_build_from_s3_to_s3_equals_a_local_one(
    project: RemoteProject, cached_project: Project, store: ObjectStore
) -> None:
    assert project.build() == 40
    assert content(store.get(project.url)) == local_content(cached_project)
    assert [path for path in writes(store) if "/catalogue/" not in path][-1].endswith(f"/cache/{MANIFEST}")
    for machine in ("machine", "another"):
        store.reset()
        assert project.build(machine) == 0
        assert writes(store) == []
        assert [path for path in store.objects_read() if "/images/" in path or path.endswith(".safetensors")] == []
    with opened(project.url, 3, seed=0) as (folder, samples):
        inspection = inspect.run(folder, samples=samples)
        assert len(draw_samples(inspection.manifest.shards, 3, seed=0)) == 3
    expected = inspect.run(cached_project.cache)
    assert (inspection.counts, inspection.stats.words) == (expected.counts, expected.stats.words)
    assert inspection.stats.unreadable == []
    assert not folder.exists()
    sizes = {path.stat().st_blocks for path in (project.folder / "machine").rglob("shards/*.safetensors")}
    assert sizes == {0}  # the local mirror holds no shard


def test_a_broken_build_continues_where_it_stopped(
    project: RemoteProject, cached_project: Project, store: ObjectStore
) -> None:
    for most in (3, 20):
        store.reset()
        store.fails = lambda method, path, most=most: method == "PUT" and len(writes(store)) > most
        with pytest.raises(UserError, match=r"cannot write s3://builds/.*ServiceUnavailable|Please try again"):
            project.build(f"machine-{most}")
        files = store.get(project.url)
        assert MANIFEST not in files
        for name in files:  # a shard never exists without its files
            assert not name.endswith(".safetensors") or {name[:-11] + "json", name[:-11] + "arrow"} <= files.keys()
    store.reset()
    assert 0 < project.build("fresh") < 40
    assert content(store.get(project.url)) == local_content(cached_project)


@pytest.mark.slow
def test_damaged_shards_are_repaired(project: RemoteProject, cached_project: Project, store: ObjectStore) -> None:
    project.build()
    shards = sorted(name for name in store.get(project.url) if name.endswith(".safetensors") and "empty" not in name)
    first, second = shards[0], shards[1]
    data = store.files.cat_file(f"{project.url}/{first}")
    store.files.pipe_file(f"{project.url}/{first}", data[:-1] + b"?")
    store.files.pipe_file(f"{project.url}/{second}", b"short")
    assert project.build(dry_run=True) == 0
    assert 0 < project.build("another") < 10  # another size is noticed at once
    assert 0 < project.build(verify=True) < 10  # other bytes by their hash
    assert content(store.get(project.url)) == local_content(cached_project)


@pytest.mark.slow
def test_a_changed_bucket_updates_the_cache(
    project: RemoteProject, cached_project: Project, store: ObjectStore, tmp_path: Path
) -> None:
    local = cached_project.copy(tmp_path / "local")
    project.build()
    name = sorted(path.name for path in local.images.glob("*.png"))[5]
    Image.new("RGB", (64, 64), "red").save(local.images / name)
    store.files.pipe_file(f"{project.source}/{name}", (local.images / name).read_bytes())
    store.reset()
    assert 0 < project.build("another", prune=True) < 30
    local.build_cache(prune=True)
    assert content(store.get(project.url)) == local_content(local)


@pytest.mark.slow
def test_a_manifest_of_another_run_is_not_overwritten(
    project: RemoteProject, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sd3_light.stages.cache import dataset_build

    write = dataset_build.write_manifest

    def slow_write(*arguments: object) -> dict[str, int]:
        store.files.pipe_file(f"{project.url}/{MANIFEST}", b"{}")
        return write(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(dataset_build, "write_manifest", slow_write)
        with pytest.raises(UserError, match=r"manifest\.json was replaced by another run meanwhile; run the command"):
            project.build()
    assert store.files.cat_file(f"{project.url}/{MANIFEST}") == b"{}"
    assert project.build() == 0
    assert json.loads(store.files.cat_file(f"{project.url}/{MANIFEST}"))["counts"]["used"] == 40


def test_parts_of_an_array_job(project: RemoteProject, cached_project: Project, store: ObjectStore) -> None:
    project.build(dry_run=True)  # one job lists the bucket for all
    store.requests.clear()
    encoded = project.build("a", part=(0, 3))
    store.fails = lambda method, path: method == "PUT" and path.endswith(".safetensors")
    with pytest.raises(UserError, match="cannot write"):
        project.build("b", part=(1, 3))
    store.reset()
    encoded += project.build("c", part=(2, 3))
    with pytest.raises(UserError, match=r"shards are missing, such as .*; run the parts \(--part I/N\) that failed"):
        project.build("d", finish=True)
    assert MANIFEST not in store.get(project.url)
    encoded += project.build("e", part=(1, 3))
    assert encoded == 40
    assert project.build("d", finish=True) == 0
    assert content(store.get(project.url)) == local_content(cached_project)
