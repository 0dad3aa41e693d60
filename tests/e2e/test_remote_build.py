"""Caches built at a URL, from images at a URL, equal those of a folder: resumed, repaired, updated and in parts; and
training from them equals training from a folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from sd3_light import urls as protocols
from sd3_light.config.faults import UserError
from sd3_light.data import manifest as manifest_module
from sd3_light.data.manifest import MANIFEST, Manifest
from sd3_light.data.shard_table import ShardTable
from sd3_light.data.store import remote
from sd3_light.data.store.remote import load_remote_manifest
from sd3_light.report.inspect import verb as inspect
from sd3_light.report.inspect.cache_stats import draw_samples
from sd3_light.report.inspect.fetched import opened
from tests import fake_ray
from tests.object_store import ObjectStore, object_store
from tests.project import Project
from tests.remote_project import RemoteProject, content, local_content

OPTIONS = ("stream_cache_dir=another", "caching_num_workers=0")


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


@pytest.fixture
def copied(project: RemoteProject, cached_project: Project, store: ObjectStore) -> RemoteProject:
    """A project whose cache was copied into the bucket."""
    store.put(cached_project.cache, project.url.removeprefix(f"{store.url}/"))
    return project


def change_caption(images: Path) -> bytes:
    """Return the caption table with one caption changed."""
    captions = json.loads((images / "captions.json").read_text(encoding="utf-8"))
    captions[sorted(captions)[5]][0] = "something else"
    return json.dumps(captions).encode()


def has_complete_shards(files: dict[str, bytes]) -> bool:
    """Return whether every shard has its side files."""
    shards = [name[:-11] for name in files if name.endswith(".safetensors")]
    return all(f"{name}{suffix}" in files for name in shards for suffix in ("json", "arrow"))


def writes(store: ObjectStore) -> list[str]:
    return [path for method, path in store.requests if method in ("PUT", "POST", "DELETE")]


def test_s3_to_s3_builds_as_a_local_one(project: RemoteProject, cached_project: Project, store: ObjectStore) -> None:
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
    for most, part in ((0, "/shards/"), (20, "")):  # the first file beside a shard, and any later file
        store.reset()
        store.fails = lambda method, path, most=most, part=part: (
            method == "PUT" and len(writes(store)) > most and part in path and not path.endswith(".safetensors")
        )
        with pytest.raises(UserError, match=r"cannot write s3://builds/.*ServiceUnavailable|Please try again"):
            project.build(f"machine-{most}")
        files = store.get(project.url)
        assert MANIFEST not in files
        assert has_complete_shards(files)
    store.reset()
    assert 0 < project.build("fresh") < 40
    assert content(store.get(project.url)) == local_content(cached_project)


@pytest.mark.slow
def test_a_divided_dataset_keeps_its_sides(project: RemoteProject, cached_project: Project, store: ObjectStore) -> None:
    assert project.build() == 40
    project.data(project.data_toml.read_text().replace("[[directory]]", "validation = true\n\n[[directory]]"))
    assert project.build() == 0, "nothing is encoded twice"
    files = store.get(project.url)
    held_out = json.loads(files[MANIFEST])["held_out"]
    assert sum(map(len, held_out["validation"].values())) == 2
    assert "catalogue/sides.arrow" in files
    decided = [path for path in writes(store) if path.endswith(("sides.arrow", MANIFEST))]
    assert decided[-2].endswith("sides.arrow"), "decisions are stored before they are used"
    store.reset()
    assert project.build("another") == 0
    assert writes(store) == []
    assert json.loads(store.get(project.url)[MANIFEST])["held_out"] == held_out


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


@pytest.mark.parametrize("builders", ["one", "parts", "ray"])
def test_a_changed_caption_is_all_that_is_encoded(
    copied: RemoteProject, cached_project: Project, store: ObjectStore, tmp_path: Path, builders: str
) -> None:
    """On another machine than that of the first build; old shards are fetched from the store and copied from."""
    local = cached_project.copy(tmp_path / "local")
    captions = change_caption(local.images)
    (local.images / "captions.json").write_bytes(captions)
    store.files.pipe_file(f"{copied.source}/captions.json", captions)
    (expected,) = local.build_cache()
    assert (expected.values.images, expected.values.captions) == (0, 1)
    if builders == "parts":
        for part in range(3):
            copied.build(f"machine-{part}", part=(part, 3))
        copied.build("end", finish=True)
    elif builders == "ray":
        with fake_ray.installed_ray(CPU=3.0):
            copied.build("another", ray="")
    else:
        (report,) = copied.build_cache(*OPTIONS, at_url=True)
        assert report.values == expected.values
    built = store.get(copied.url)
    assert content(built) == local_content(local)
    assert not [key for key in built if "reuse-" in key]


@pytest.mark.slow
def test_a_damaged_old_shard_at_a_url_is_not_copied_from(
    copied: RemoteProject, cached_project: Project, store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.files.pipe_file(f"{copied.source}/captions.json", change_caption(cached_project.images))
    for path in store.get(copied.url):
        if path.startswith("shards/images") and path.endswith(".safetensors"):
            data = store.files.cat_file(f"{copied.url}/{path}")
            store.files.pipe_file(f"{copied.url}/{path}", data[:-1] + b"?")
    (report,) = copied.build_cache(*OPTIONS, at_url=True)
    assert report.values.images == report.encoded > 0
    assert "is missing or damaged; its samples are encoded again" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_manifest_of_another_run_is_not_overwritten(
    project: RemoteProject, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sd3_light.cache import dataset_build

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


class Killer:
    """Answers requests, and kills a process with SIGKILL when its N-th matching write arrives.

    ``before``: the server does not execute that write.
    """

    def __init__(self, pid_file: Path, number: int, suffix: str, before: bool) -> None:
        self.pid_file, self.number, self.suffix, self.before = pid_file, number, suffix, before

    def __call__(self, method: str, path: str) -> bool:
        if method not in ("PUT", "POST", "DELETE") or not path.endswith(self.suffix):
            return False
        self.number -= 1
        if self.number == 0:
            os.kill(int(self.pid_file.read_text(encoding="ascii")), signal.SIGKILL)
        return self.number == 0 and self.before


def run_command(project: RemoteProject, store: ObjectStore, *flags: str, killer: Killer | None = None) -> int:
    """Run `sd3-light cache` in a process; return its exit code."""
    pid_file = project.folder / "pid.txt"
    store.reset()
    if killer is not None:
        store.fails = killer
    settings = ["--set", "caching_num_workers=0", "--set", "stream_cache_dir=machine"]
    command = [sys.executable, "-m", "sd3_light", "cache", str(project.train_toml), *settings, *flags]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "SD3_LIGHT_TEST_PID_FILE": str(pid_file)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    store.reset()
    assert done.returncode == (-signal.SIGKILL if killer else 0), done.stderr
    return done.returncode


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_build_killed_at_any_moment_ends(project: RemoteProject, cached_project: Project, store: ObjectStore) -> None:
    pid_file = project.folder / "pid.txt"
    moments = [(1, "", True), (3, ".safetensors", True), (2, ".json", False), (2, ".safetensors", False)]
    moments += [(1, "rejects.jsonl", False), (1, f"/{MANIFEST}", True), (1, f"/{MANIFEST}", False)]
    for number, suffix, before in moments:
        run_command(project, store, killer=Killer(pid_file, number, suffix, before))
        files = store.get(project.url)
        if (suffix, before) == (f"/{MANIFEST}", False):  # the server may have received all of it, or not
            assert json.loads(files.get(MANIFEST, b'{"counts": {"used": 40}}'))["counts"]["used"] == 40
        else:
            assert MANIFEST not in files
        assert has_complete_shards(files)
    run_command(project, store)
    assert content(store.get(project.url)) == local_content(cached_project)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_array_job_with_a_killed_part_trains_like_a_local_cache(
    project: RemoteProject, cached_project: Project, store: ObjectStore, tmp_path: Path, unproven: None
) -> None:
    run_command(project, store, "--dry_run")
    for part in range(3):
        if part == 1:
            run_command(project, store, "--part", "1/3", killer=Killer(project.folder / "pid.txt", 1, ".arrow", True))
            with pytest.raises(
                UserError, match=r"shards are missing, such as .*; run the parts \(--part I/N\) that fail"
            ):
                project.build("another", finish=True)
            assert MANIFEST not in store.get(project.url)
        run_command(project, store, "--part", f"{part}/3")
    run_command(project, store, "--finish")
    assert content(store.get(project.url)) == local_content(cached_project)
    assert project.build("another") == 0
    local = cached_project.copy(tmp_path / "local")
    for each in (local, project):
        each.train("max_steps=2")
    assert list(project.losses()) == [1, 2]
    assert project.losses() == local.losses()


@pytest.mark.slow
def test_a_large_manifest_at_a_url(
    project: RemoteProject, cached_project: Project, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "TABLE_SHARDS", 3)
    expected = set(Manifest.load(cached_project.cache).shards)
    assert project.build() == 40
    first = load_remote_manifest(project.url, project.folder / "fetched")
    assert set(first.shards) == expected
    assert isinstance(first.shards, ShardTable)
    store.files.rm_file(f"{project.source}/{sorted(path.name for path in cached_project.images.glob('*.png'))[5]}")
    project.build("another")
    tables = [name for name in store.get(project.url) if name.endswith(".arrow") and "/" not in name]
    assert len(tables) == 1, "the table of the replaced manifest is deleted"
    second = load_remote_manifest(project.url, project.folder / "fetched")
    assert second.counts["used"] == 39
    with opened(project.url, 3, seed=0) as (folder, samples):
        assert inspect.run(folder, samples=samples).samples == 39


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_run_from_a_url_equals_the_run_from_the_folder(
    copied: RemoteProject, cached_project: Project, tmp_path: Path, workers: int
) -> None:
    local = cached_project.copy(tmp_path / "local")
    local.train("max_steps=2")
    copied.train("max_steps=2", f"num_dataloader_workers={workers}")
    assert list(copied.losses()) == [1, 2]
    assert copied.losses() == local.losses()
    assert list((copied.folder / "machine").glob("*.safetensors"))
    assert not copied.cache.exists()


def test_what_cannot_train_is_reported_and_no_cache_is_built_at_a_url(copied: RemoteProject) -> None:
    with pytest.raises(UserError, match=r"stream_cache_gb = 1e-06 is too small for the shards .* set [\d.]+ or more"):
        copied.train("max_steps=2", "stream_cache_gb=1e-6")
    with pytest.raises(UserError, match="t5_max_length"):
        copied.train("model.t5_max_length=8")
    other = Path(shutil.copytree(copied.model, copied.folder / "other"))
    config = other / "vae" / "config.json"
    config.write_text(config.read_text().replace("{", '{\n  "note": "another",', 1))
    with pytest.raises(UserError, match="vae"):
        copied.train(f'model.diffusers_path="{other}"')
    with pytest.raises(UserError, match=r"no cache at s3://builds/none.* build it with `sd3-light cache CONFIG`"):
        copied.train("cache_dir=s3://builds/none")
    assert copied.build_cache() == []
