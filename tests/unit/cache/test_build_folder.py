"""The local mirror of a cache at a URL: what it uploads, in which order, and what another machine sees."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from sd3_light import urls as protocols
from sd3_light.cache import build_folder
from sd3_light.cache.build_folder import BuildFolder, open_build_folder
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import MANIFEST, SHARDS, ShardEntry, read_entry
from sd3_light.data.store import remote
from tests.object_store import ObjectStore, object_store
from tests.refusals import refused

FILE = "images-64x64-abc.safetensors"


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store("images") as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ObjectStore:
    monkeypatch.setattr(protocols, "PAUSES_SEC", (0.0,))
    monkeypatch.setattr(remote, "PAUSES_SEC", (0.0,))
    server.reset()
    server.url = f"s3://images/{tmp_path.name}"
    return server


def write_files(folder: Path, data: bytes = b"tensors" * 100) -> ShardEntry:
    path = folder / SHARDS / FILE
    path.write_bytes(data)
    path.with_suffix(".arrow").write_bytes(b"table")
    entry = ShardEntry(FILE, "64x64", (64, 64), "images#0", 3, len(data), hashlib.sha256(data).hexdigest(), "f")
    path.with_suffix(".json").write_text(json.dumps(asdict(entry)))
    return entry


def names(store: ObjectStore) -> set[str]:
    return {Path(name).name for name in store.get(store.url)}


def test_a_shard_is_uploaded_shard_last_and_leaves_no_bytes(store: ObjectStore, tmp_path: Path) -> None:
    with open_build_folder(store.url, tmp_path / "a") as place:
        entry = write_files(place.folder)
        place.push_shard(FILE)
    puts = [Path(path).suffix for method, path in store.requests if method == "PUT"]
    assert puts == [".arrow", ".json", ".safetensors"]
    for folder in (tmp_path / "a", tmp_path / "b"):  # also on another machine
        with open_build_folder(store.url, folder) as place:
            assert read_entry(folder / SHARDS, FILE) == entry
            assert (folder / SHARDS / FILE).stat().st_size == entry.bytes
            assert (folder / SHARDS / FILE).stat().st_blocks == 0
            assert place.is_intact(entry)
            assert (folder / SHARDS / FILE).with_suffix(".arrow").read_bytes() == b"table"  # fetched to be verified
    place.delete([tmp_path / "b" / SHARDS / FILE])
    assert names(store) == {Path(FILE).with_suffix(suffix).name for suffix in (".arrow", ".json")}


def test_a_shard_whose_samples_were_all_rejected_has_no_shard(store: ObjectStore, tmp_path: Path) -> None:
    with open_build_folder(store.url, tmp_path / "a") as place:
        write_files(place.folder)
        place.push_shard(FILE)
        shard = place.folder / SHARDS / FILE
        shard.with_suffix(".none").touch()
        shard.unlink()
        place.push_shard(FILE)
    assert names(store) == {Path(FILE).with_suffix(".none").name}


def test_a_killed_upload_of_a_rebuilt_shard_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, upload = f"memory://{tmp_path.name}/cache", build_folder.RemoteBuildFolder._upload

    def killed(place: build_folder.RemoteBuildFolder, name: str) -> None:
        if name.endswith(FILE):
            raise KeyboardInterrupt
        upload(place, name)

    with open_build_folder(url, tmp_path / "a") as place:
        write_files(place.folder)
        place.push_shard(FILE)
        monkeypatch.setattr(build_folder.RemoteBuildFolder, "_upload", killed)
        write_files(place.folder, b"rebuilt" * 100)
        with pytest.raises(KeyboardInterrupt):
            place.push_shard(FILE)
    for folder in (tmp_path / "a", tmp_path / "b"):
        with open_build_folder(url, folder):
            assert read_entry(folder / SHARDS, FILE) is None, "the new hash with the old bytes"


def test_a_damaged_arrival_is_not_kept(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = build_folder.RemoteBuildFolder._upload

    def damaging(place: build_folder.RemoteBuildFolder, name: str) -> None:
        upload(place, name)
        if name.endswith(FILE):
            store.files.pipe_file(f"{store.url}/{name}", b"x" * 700)

    monkeypatch.setattr(build_folder.RemoteBuildFolder, "_upload", damaging)
    with open_build_folder(store.url, tmp_path / "a") as place:
        write_files(place.folder)
        refused("is damaged: expected 700 bytes", place.push_shard, FILE)
    assert FILE not in names(store)


def push_rebuilt(place: BuildFolder) -> None:
    write_files(place.folder, b"rebuilt" * 100)
    place.push_shard(FILE)


@pytest.mark.parametrize(
    ("method", "work"),
    [
        ("ls", lambda place: build_folder.RemoteBuildFolder(place.url, place.folder)),
        ("cat_file", lambda place: place.fetch_tables([FILE])),
        ("info", push_rebuilt),
    ],
)
def test_a_store_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, work: Any) -> None:
    url = f"memory://{tmp_path.name}/cache"
    with open_build_folder(url, tmp_path / "a") as place:
        write_files(place.folder)
        place.push_shard(FILE)
        monkeypatch.setattr(MemoryFileSystem, method, Mock(side_effect=PermissionError("Access Denied")))
        refused(rf"^no permission to read {url}.*Access Denied.*; check the network", work, place)


def test_a_missing_bucket_is_named(store: ObjectStore, tmp_path: Path) -> None:
    with open_build_folder("s3://no-such-bucket/cache", tmp_path / "a") as place:
        write_files(place.folder)
        refused(r"^cannot write s3://no-such-bucket/.*; create it, or correct cache_dir$", place.push_shard, FILE)


def test_a_manifest_is_replaced_only_if_it_is_the_known_one(store: ObjectStore, tmp_path: Path) -> None:
    for text in ("first", "second"):
        with open_build_folder(store.url, tmp_path / "a") as place:
            (place.folder / MANIFEST).write_text(text)
            store.requests.clear()
            place.publish()
            place.publish()
        assert [path for method, path in store.requests if method == "PUT"] == [f"/images/{tmp_path.name}/{MANIFEST}"]
        assert store.get(store.url)[MANIFEST] == text.encode()
    with open_build_folder(store.url, tmp_path / "a") as place:
        (place.folder / MANIFEST).write_text("third")
        store.files.pipe_file(f"{store.url}/{MANIFEST}", b"of another run")
        refused("was replaced by another run meanwhile; run the command again", place.publish)
    assert store.get(store.url)[MANIFEST] == b"of another run"


def test_a_folder_is_built_in_place_and_a_work_folder_by_one_process(tmp_path: Path) -> None:
    with open_build_folder(tmp_path, tmp_path / "unused") as place:
        assert type(place) is BuildFolder
        assert place.folder == tmp_path
    with (
        open_build_folder("memory://one/cache", tmp_path / "work"),
        pytest.raises(UserError, match=r"another process of this machine builds memory://one/cache .*--part I/N"),
        open_build_folder("memory://one/cache", tmp_path / "work"),
    ):
        pass
    with pytest.raises(UserError, match="a cache cannot be built at https://host/cache; give a path"):
        next(iter([open_build_folder("https://host/cache", tmp_path / "w").__enter__()]))
