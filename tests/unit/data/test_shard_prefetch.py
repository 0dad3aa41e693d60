"""Shards at a URL are downloaded several at a time, ahead of the reader, as far as the disk has room."""

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config.faults import UserError
from sd3_light.data import store as store_module
from sd3_light.data import verify as verify_module
from sd3_light.data.manifest import ShardEntry
from sd3_light.data.shard_prefetch import ShardPrefetcher
from sd3_light.data.store import RemoteStore
from sd3_light.data.stream import CachedDataset, MicroBatches
from tests.waiting import HANG_SECONDS, wait_until

FORK = multiprocessing.get_context("fork")
MakeCache = Callable[..., CachedDataset]
WINDOW, NUM_SHARDS, SIZE = 2, 6, 4


def entry(name: str) -> ShardEntry:
    return ShardEntry(name, "64x64", (64, 64), "", 1, 1, "", "")


def join(prefetcher: ShardPrefetcher) -> None:
    for thread in prefetcher.threads:
        thread.join()


def test_urgent_shards_are_fetched_first_and_each_once() -> None:
    fetched: list[str] = []
    started, go = threading.Event(), threading.Event()

    def fetch(shard: ShardEntry) -> None:
        started.set()
        assert go.wait(HANG_SECONDS)
        fetched.append(shard.file)

    prefetcher = ShardPrefetcher(fetch, 1)
    prefetcher.request([entry("a")])
    assert started.wait(HANG_SECONDS)
    prefetcher.request([entry("b"), entry("c"), entry("d")])
    prefetcher.request([entry("c"), entry("e")])
    prefetcher.request([entry("d"), entry("x")], first=True)
    go.set()
    join(prefetcher)
    assert fetched == ["a", "d", "x", "b", "c", "e"]


def test_a_failed_shard_does_not_stop_the_others() -> None:
    fetched: list[str] = []

    def fetch(shard: ShardEntry) -> None:
        if shard.file in ("a", "b"):
            raise UserError("damaged") if shard.file == "a" else OSError("gone")
        fetched.append(shard.file)

    prefetcher = ShardPrefetcher(fetch, 1)
    prefetcher.request([entry(name) for name in "abc"])
    join(prefetcher)
    assert fetched == ["c"]


def test_no_more_threads_than_shards_and_the_limit() -> None:
    go = threading.Event()
    prefetcher = ShardPrefetcher(lambda shard: go.wait(HANG_SECONDS) and None, 3)
    prefetcher.request([entry("a"), entry("b")])
    assert len(prefetcher.threads) == 2
    prefetcher.request([entry(name) for name in "cdefg"])
    assert len(prefetcher.threads) == 3
    go.set()
    join(prefetcher)


class Blocked:
    """A fetch that blocks in the first process and works in others."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.is_parent = True

    def __call__(self, shard: ShardEntry) -> None:
        if self.is_parent:
            self.go.wait(HANG_SECONDS)

    def __getstate__(self) -> dict[str, Any]:
        return {"is_parent": False}


def test_a_forked_or_spawned_process_continues_with_its_own_threads() -> None:
    fetch = Blocked()
    prefetcher = ShardPrefetcher(fetch, 2)
    prefetcher.request([entry(name) for name in "abcd"])

    def child() -> None:
        fetch.is_parent = False
        prefetcher.request([entry("e")])
        join(prefetcher)
        assert not prefetcher._waiting

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    copy = pickle.loads(pickle.dumps(prefetcher))
    assert not copy.threads
    fetch.go.set()
    join(prefetcher)


class Downloads:
    """Downloads that wait until they are released, by file."""

    def __init__(self, patch: pytest.MonkeyPatch, real: Callable[..., None] = store_module.download) -> None:
        self.started: list[str] = []
        self.running = self.peak = 0
        self.held: set[str] = set()
        self._changed = threading.Condition()
        self._real = real
        patch.setattr(store_module, "download", self._download)

    def _download(self, url: str, shard: ShardEntry, file: Any) -> None:
        with self._changed:
            self.started.append(shard.file)
            self.running += 1
            self.peak = max(self.peak, self.running)
            assert self._changed.wait_for(lambda: shard.file not in self.held, HANG_SECONDS)
        self._real(url, shard, file)
        with self._changed:
            self.running -= 1

    def release(self, files: set[str]) -> None:
        with self._changed:
            self.held -= files
            self._changed.notify_all()


def remote_batches(folder: Path, limit: int = 10**9) -> MicroBatches:
    data = CachedDataset(RemoteStore((folder / "cache").as_uri(), folder / "kept", limit, WINDOW))
    return MicroBatches(data, data.order(0, {"toy#0": 1.0}, lambda resolution: SIZE, WINDOW), 0, 1, 1)


def window_files(batches: MicroBatches, number: int) -> set[str]:
    shards = batches.data.buckets[0].shards
    first = number * WINDOW * SIZE // SIZE
    picks = [batches.order.picks(step) for step in range(first, first + WINDOW)]
    return {shards[segment].file for pick in picks for segment in pick.segment.tolist()}


@pytest.fixture
def folder(make_cache: MakeCache, tmp_path: Path) -> Path:
    make_cache(sizes=(SIZE,) * NUM_SHARDS)
    return tmp_path


def test_the_next_window_is_downloaded_while_the_reader_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, downloads = remote_batches(folder), Downloads(monkeypatch)
    assert batches.data.store.prefetches_early
    current, following = (window_files(batches, number) for number in (0, 1))
    assert len(current | following) == 2 * WINDOW
    downloads.held = set(current)
    reader = threading.Thread(target=lambda: batches[0])
    reader.start()
    wait_until(lambda: current | following <= set(downloads.started), lambda: downloads.started)
    assert reader.is_alive()
    downloads.release(current)
    reader.join()
    assert downloads.peak >= WINDOW
    assert sorted(set(downloads.started)) == sorted(downloads.started), "each shard once"
    assert set(downloads.started) == current | following, "bounded by the order's windows"


def test_a_small_disk_has_room_for_the_shards_of_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [path.stat().st_size for path in (folder / "cache" / "shards").glob("*.safetensors")]
    batches, downloads = remote_batches(folder, 2 * WINDOW * max(sizes)), Downloads(monkeypatch)
    assert not batches.data.store.prefetches_early
    current = window_files(batches, 0)
    downloads.held = set(current)
    reader = threading.Thread(target=lambda: batches[0])
    reader.start()
    wait_until(lambda: current <= set(downloads.started), lambda: downloads.started)
    assert set(downloads.started) == current, "both at once, and nothing else"
    downloads.release(current)
    reader.join()


def test_an_evicted_shard_is_prefetched_again_in_the_next_epoch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = remote_batches(folder)
    for step in range(NUM_SHARDS):
        batches[step]
    data = batches.data
    join(data._prefetcher)
    data._open.clear()
    for path in (folder / "kept").glob("*.safetensors"):
        path.unlink()
    downloads = Downloads(monkeypatch)
    batches.prefetch_step(3 * NUM_SHARDS)
    join(data._prefetcher)
    assert len(downloads.started) >= WINDOW


def test_a_download_is_not_hashed_again_by_any_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, hashed = remote_batches(folder), []
    data = batches.data
    data.empty_text()
    monkeypatch.setattr(verify_module, "file_sha256", lambda path: hashed.append(path) or "")
    late = pickle.loads(pickle.dumps(batches))  # another process of the launch
    for step in range(2 * NUM_SHARDS):
        batches[step]
        join(data._prefetcher)
    for path in (folder / "kept").glob("*.safetensors"):
        path.unlink()
    for step in range(2 * NUM_SHARDS, 3 * NUM_SHARDS):  # of new files
        late[step]
        batches[step]
    assert hashed == []
