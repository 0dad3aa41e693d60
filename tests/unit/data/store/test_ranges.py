"""Downloads by range against a slow S3 server that fails: requests overlap, are bounded, and survive a storm."""

import asyncio
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from errno import EBUSY
from pathlib import Path

import pytest

from sd3_light import urls as protocols
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import ShardEntry
from sd3_light.data.store import remote
from sd3_light.data.store.remote import download
from tests.object_store import ObjectStore, object_store
from tests.refusals import refused

RANGE, COUNT = 1000, 24
DATA = hashlib.shake_128(b"shard").digest(RANGE * COUNT - 300)
ENTRY = ShardEntry("a", "64x64", (64, 64), "", 1, len(DATA), hashlib.sha256(DATA).hexdigest(), "")


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store("ranges") as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setattr(remote, "RANGE_BYTES", RANGE)
    monkeypatch.setattr(remote, "PAUSES_SEC", ())
    monkeypatch.setattr(protocols, "PAUSES_SEC", (0.01, 0.01))
    server.files.pipe_file(f"{server.url}/shard", DATA)
    server.reset()
    yield server
    server.reset()


def fetch(store: ObjectStore, folder: Path, entry: ShardEntry = ENTRY) -> bytes:
    with open(folder / "shard", "w+b") as file:
        download(f"{store.url}/shard", entry, file)
        file.seek(0)
        return file.read()


def test_requests_overlap_and_are_bounded(store: ObjectStore, tmp_path: Path) -> None:
    lock, current, peaks = threading.Lock(), [0], []

    def slow(method: str, path: str) -> bool:
        with lock:
            current[0] += 1
            peaks.append(current[0])
        time.sleep(0.05)
        with lock:
            current[0] -= 1
        return False

    store.fails = slow
    assert fetch(store, tmp_path) == DATA
    assert len(peaks) == COUNT, "one request per range and nothing else"
    assert 3 <= max(peaks) <= remote.RANGES_IN_FLIGHT


@pytest.mark.parametrize(("attempts", "failures"), [(1, 2), (2, 4)])  # three requests per attempt
def test_a_failed_range_waits_alone_and_only_it_is_requested_again(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: int, failures: int
) -> None:
    monkeypatch.setattr(remote, "PAUSES_SEC", (0.0,) * (attempts - 1))
    monkeypatch.setattr(protocols, "PAUSES_SEC", (0.3, 0.3))
    read, starts = store.files._cat_file, []

    async def fail_often(path: str, start: int, end: int) -> bytes:
        starts.append(start)
        if start == 0 and starts.count(0) <= failures:
            raise OSError(EBUSY, "Please try again")
        data: bytes = await read(path, start=start, end=end)
        return data

    monkeypatch.setattr(store.files, "_cat_file", fail_often)
    assert fetch(store, tmp_path) == DATA
    assert Counter(starts) == {start * RANGE: 1 + failures if start == 0 else 1 for start in range(COUNT)}
    assert starts[-failures:] == [0] * failures, "all others were requested in the first pause"


def test_downloads_share_one_limit(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current, peak, write = [0], [0], remote._write

    async def slow(path: str, start: int, end: int) -> bytes:
        current[0] += 1
        peak[0] = max(peak[0], current[0])
        await asyncio.sleep(0.02)
        return DATA[start:end]

    def note(file: int, data: bytes, start: int) -> None:
        write(file, data, start)
        current[0] -= 1  # a range counts until it is written

    monkeypatch.setattr(store.files, "_cat_file", slow)
    monkeypatch.setattr(remote, "_write", note)
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(len(folders)) as pool:
        assert list(pool.map(lambda folder: fetch(store, folder), folders)) == [DATA] * len(folders)
    assert peak == [remote.RANGES_IN_FLIGHT]


def test_a_full_disk_is_not_a_fault_of_the_store(store: ObjectStore, tmp_path: Path) -> None:
    with open("/dev/full", "r+b", buffering=0) as full, pytest.raises(OSError, match="No space left") as caught:
        download(f"{store.url}/shard", ENTRY, full)
    assert not isinstance(caught.value, UserError)
    assert len(store.requests) <= COUNT, "not repeated"


def test_an_outage_ends_with_one_line(store: ObjectStore, tmp_path: Path) -> None:
    store.fails = lambda method, path: True
    refused(r"cannot read s3://ranges/shard \(.*check the network", fetch, store, tmp_path)
    store.fails = lambda method, path: False
    assert fetch(store, tmp_path) == DATA


@pytest.mark.parametrize("change", [-RANGE - 1, -2 * RANGE, 1, 5 * RANGE])
def test_an_object_of_another_length_is_damaged(store: ObjectStore, tmp_path: Path, change: int) -> None:
    data = DATA[:change] if change < 0 else DATA + bytes(change)
    store.files.pipe_file(f"{store.url}/shard", data)
    received = f"{len(data)} bytes" if change < 0 else f"more than {len(DATA)} bytes"
    refused(f"is damaged: expected {len(DATA)} bytes .* received {received}", fetch, store, tmp_path)
