"""Shards are hashed once per machine and launch, by the first process that needs them."""

import multiprocessing
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sd3_light.data import verify as verify_module
from sd3_light.data.manifest import SHARDS, Manifest
from sd3_light.data.shard_table import ShardEntry
from sd3_light.data.stream import CachedDataset
from sd3_light.data.verify import ShardFile, Verifier
from tests.refusals import refused
from tests.waiting import HANG_SECONDS

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path: Path, make_cache: Callable[..., CachedDataset], monkeypatch: pytest.MonkeyPatch) -> Path:
    make_cache(sizes=(3, 3, 3))
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    return tmp_path / "cache"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Counter[str]]:
    """Count how often each shard was hashed, by this process and those forked from it."""
    path, real = tmp_path / "hashed", verify_module.file_sha256
    path.touch()

    def hash_and_log(shard: Path) -> str:
        with open(path, "a") as out:
            out.write(f"{shard.name}\n")
        return real(shard)

    monkeypatch.setattr(verify_module, "file_sha256", hash_and_log)
    return lambda: Counter(path.read_text().split())


def shard_files(folder: Path) -> list[ShardFile]:
    return [(entry, folder / SHARDS / entry.file) for entry in Manifest.load(folder).shards]


def marker_folders(folder: Path) -> list[Path]:
    return sorted((folder.parent / "temp").iterdir())


def run(work: Callable[[], Any], count: int = 1) -> list[int | None]:
    """Run ``work`` in parallel forked processes; return their exit codes."""
    processes = [FORK.Process(target=work) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def test_processes_of_one_launch_share_the_work(folder: Path, log: Callable[[], Counter[str]]) -> None:
    assert run(lambda: Verifier(folder, launched=True).require(shard_files(folder)), 4) == [0] * 4
    assert sorted(log().values()) == [1, 1, 1]
    assert len(marker_folders(folder)) == 1


def test_a_copy_of_the_cache_is_verified_separately(folder: Path, log: Callable[[], Counter[str]]) -> None:
    Verifier(folder).require(shard_files(folder))
    copy = folder.with_name("copy")
    folder.rename(copy)
    Verifier(copy).require(shard_files(copy))
    assert sorted(log().values()) == [2, 2, 2]


def test_the_shard_of_a_killed_process_is_hashed_by_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, hashing = verify_module.file_sha256, FORK.Event()

    def hang(path: Path) -> str:
        hashing.set()
        signal.pause()
        raise AssertionError

    monkeypatch.setattr(verify_module, "file_sha256", hang)
    victim = FORK.Process(target=lambda: Verifier(folder, launched=True).require(shard_files(folder)[:1]), daemon=True)
    victim.start()
    assert hashing.wait(HANG_SECONDS)
    monkeypatch.setattr(verify_module, "file_sha256", real)
    waiting = FORK.Process(target=lambda: Verifier(folder, launched=True).require(shard_files(folder)), daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "it waits for the shard that is being hashed"
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    waiting.join(HANG_SECONDS)
    assert waiting.exitcode == 0


def test_no_marker_folder(folder: Path, log: Callable[[], Counter[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "nowhere"))
    for _ in range(2):
        own = Verifier(folder)
        own.require(shard_files(folder))
        own.require(shard_files(folder))
    assert sorted(log().values()) == [2, 2, 2]


def test_a_marker_folder_that_is_a_link_is_not_used(folder: Path, log: Callable[[], Counter[str]]) -> None:
    first = Verifier(folder)
    first.require(shard_files(folder))
    (markers,) = marker_folders(folder)
    elsewhere = markers.rename(folder / "elsewhere")
    markers.symlink_to(elsewhere)
    Verifier(folder).require(shard_files(folder))
    assert sorted(log().values()) == [2, 2, 2]


def is_verified(own: Verifier, entry: ShardEntry) -> bool:
    return entry.file in own._verified or own._marked(entry) is not None


def test_markers_of_ended_launches_are_removed(folder: Path) -> None:
    assert run(lambda: Verifier(folder).require(shard_files(folder))) == [0]
    assert len(marker_folders(folder)) == 1
    (old,) = marker_folders(folder)
    keep = folder.parent / "temp" / "sd3-light-of-someone-else"
    keep.touch()
    mine = Verifier(folder)
    assert old not in marker_folders(folder)
    assert len(marker_folders(folder)) == 2
    assert not is_verified(mine, Manifest.load(folder).shards[0])


def test_a_damaged_shard_is_reported_and_marked(folder: Path) -> None:
    entry, path = shard_files(folder)[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    own = Verifier(folder)
    for _ in range(2):
        fault = refused("", own.require, shard_files(folder))
        assert str(path) in fault
        assert "run `sd3-light cache CONFIG`" in fault
    assert [mark.name for mark in path.parent.glob("*.damaged")] == [f"{path.name}.damaged"]
    assert not is_verified(own, entry)


def test_a_truncated_shard_in_a_read_only_folder_is_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = shard_files(folder)[0]
    os.truncate(path, 100)

    monkeypatch.setattr(Path, "touch", Mock(side_effect=PermissionError))
    refused("is damaged", Verifier(folder).require, shard_files(folder))
    assert not list(path.parent.glob("*.damaged"))
