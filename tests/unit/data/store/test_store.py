"""Shard stores: local folders, URLs (against an S3 server) and the disk cache of fetched shards."""

import fcntl
import hashlib
import multiprocessing
import os
import pickle
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest

from sd3_light import urls as protocols
from sd3_light.config import UserError
from sd3_light.data import manifest as manifest_module
from sd3_light.data.manifest import Manifest, ShardEntry
from sd3_light.data.store import LocalStore, RemoteStore, disk_cache, open_shard, open_store, remote
from sd3_light.data.store.disk_cache import DiskCache, private_temp_folder
from sd3_light.data.store.remote import load_remote_manifest
from sd3_light.urls import protocol_problem
from tests.object_store import ObjectStore, object_store, web_server
from tests.refusals import refused

SIZE = 1000
COUNT = 8
FORK = multiprocessing.get_context("fork")  # as the loader starts its workers


def make_cache(folder: Path, count: int = COUNT, size: int = SIZE) -> Manifest:
    """Write a cache whose shards are noise: stores do not parse them."""
    (folder / "shards").mkdir(parents=True)
    entries = []
    for number in range(count + 1):
        data = hashlib.shake_128(f"{number}".encode()).digest(size)
        file = f"shard-{number}.safetensors"
        (folder / "shards" / file).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        entries.append(ShardEntry(file, "64x64", (64, 64), "images#0", 4, size, digest, digest[:16]))
    manifest = Manifest({}, tuple(entries[:-1]), entries[-1])
    manifest.save(folder)
    return manifest


def gets(store: ObjectStore, url: str, file: str) -> int:
    return store.requests.count(("GET", f"{url.removeprefix('s3:/')}/{file}"))


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store("stores") as store:
        yield store


@pytest.fixture
def s3(server: ObjectStore, tmp_path: Path) -> Iterator[ObjectStore]:
    """The server, without cached file systems of earlier tests."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.url = f"s3://stores/{tmp_path.name}"
    yield server
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    make_cache(tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES_SEC", (0.0, 0.0))
    monkeypatch.setattr(protocols, "PAUSES_SEC", (0.0,))


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != ".lock"}


def used(disk: DiskCache) -> int:
    """Return the bytes in the folder while it does not change."""
    with disk._folder_lock():
        return sum(path.stat().st_size for path in disk.folder.iterdir())


def content(number: int, size: int = SIZE) -> bytes:
    return hashlib.shake_128(f"{number}".encode()).digest(size)


def read(store: Any, number: int) -> bytes:
    return open_shard(store, store.manifest.shards[number], Path.read_bytes)


def test_a_local_store_reads_its_folder_and_reports_a_missing_shard(cache: Path) -> None:
    store = open_store(cache, None, 1)
    assert isinstance(store, LocalStore)
    assert store.manifest == Manifest.load(cache)
    assert read(store, 3) == content(3)
    entry = store.manifest.shards[2]
    store.path(entry).unlink()
    refused(r"shard-2\.safetensors is missing; run `sd3-light cache CONFIG`", store.path, entry)


def test_s3_reads_shards_once(s3: ObjectStore, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RANGE_BYTES", 300)
    url = s3.put(cache)
    for _ in range(2):  # a second run reuses the files of the first
        store = open_store(url, tmp_path / "kept", 10**6)
        assert isinstance(store, RemoteStore)
        assert store.manifest == Manifest.load(cache)
        assert [read(store, number) for number in range(COUNT)] == [content(number) for number in range(COUNT)]
    assert gets(s3, url, f"shards/{store.manifest.shards[0].file}") == 4, "in chunks"
    assert open_shard(store, store.manifest.empty, Path.read_bytes) == content(COUNT)
    entries = (*store.manifest.shards, store.manifest.empty)
    assert kept(tmp_path / "kept") == {f"{entry.sha256}.safetensors" for entry in entries}
    os.truncate(store.path(store.manifest.shards[0]), 10)
    assert read(store, 0) == content(0), "fetched again"
    assert used(RemoteStore(url, tmp_path / "kept", 2 * SIZE).disk) == 2 * SIZE, "a smaller limit than in the last run"


def test_other_protocols(cache: Path, tmp_path: Path) -> None:
    fsspec.filesystem("memory").put(str(cache), "memory://place/cache", recursive=True)
    with web_server(partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as web:  # without support for ranges
        for number, url in enumerate([cache.as_uri(), "memory://place/cache", f"{web}/cache"]):
            store = open_store(url, tmp_path / f"kept-{number}", 10**6)
            assert read(store, number) == content(number)
            refused(r"^no cache at", load_remote_manifest, f"{url}-none")


def test_a_manifests_table_is_fetched_once(s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "TABLE_SHARDS", 3)
    made = make_cache(tmp_path / "cache")
    (table,) = (tmp_path / "cache").glob("manifest-*.arrow")
    url, data = s3.put(tmp_path / "cache"), table.read_bytes()
    for _ in range(2):
        store = RemoteStore(url, tmp_path / "kept", SIZE)
        assert set(store.manifest.shards) == set(made.shards)
        assert read(store, 0) == Path(tmp_path / "cache" / "shards" / store.manifest.shards[0].file).read_bytes()
    assert gets(s3, url, table.name) == 2  # evicted by the shard: the limit is that small
    (tmp_path / "kept" / f"{hashlib.sha256(data).hexdigest()}.arrow").unlink(missing_ok=True)
    assert len(store.manifest.shards[2].sha256) == 64  # still mapped
    for _ in range(2):
        assert load_remote_manifest(url, tmp_path / "more") == store.manifest
    assert gets(s3, url, table.name) == 3


def test_a_damaged_table_is_fetched_again(s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "TABLE_SHARDS", 3)
    made = make_cache(tmp_path / "cache")
    url, kept = s3.put(tmp_path / "cache"), tmp_path / "kept"
    load_remote_manifest(url, kept)
    (table,) = kept.glob("*.arrow")
    table.write_bytes(b"x" * table.stat().st_size)
    assert set(load_remote_manifest(url, kept).shards) == set(made.shards)
    assert not list(kept.glob("*.damaged"))
    s3.requests.clear()
    load_remote_manifest(url, kept)
    assert not any(".arrow" in path for _, path in s3.requests)


def test_a_download_is_reported_as_hashed_before_its_file_appears(s3: ObjectStore, cache: Path, tmp_path: Path) -> None:
    store = RemoteStore(s3.put(cache), tmp_path / "kept", COUNT * SIZE)
    reported: list[tuple[str, int]] = []

    def note(entry: ShardEntry, status: os.stat_result) -> None:
        assert not (tmp_path / "kept" / f"{entry.sha256}.safetensors").exists()
        reported.append((entry.file, status.st_ino))

    store.on_hashed = note
    first, second = store.manifest.shards[:2]
    assert store.prefetch(first) == store.path(first)
    assert store.path(second) == store.prefetch(second)
    assert reported == [(entry.file, store.path(entry).stat().st_ino) for entry in (first, second)]


def test_a_retry_is_reported_once_in_a_while(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(protocols, "PAUSES_SEC", (0.0, 0.0))
    monkeypatch.setattr(protocols, "_next_report", 0.0, raising=False)

    refuse = Mock(side_effect=ConnectionRefusedError("Connection refused"))
    for _ in range(2):
        refused("cannot read memory://cache", protocols.with_retries, "memory://cache", refuse)
    line = "cannot read memory://cache (Connection refused); retrying in 0 s (2 of 3)"
    assert caplog.messages == [line]


def test_a_store_can_be_sent_to_other_processes(s3: ObjectStore, cache: Path, tmp_path: Path) -> None:
    store = pickle.loads(pickle.dumps(RemoteStore(s3.put(cache), tmp_path / "kept", 10**6)))
    assert read(store, 0) == content(0)
    with FORK.Pool(1) as pool:  # this process has a file system and its thread; the forked one needs its own
        assert pool.apply(read, (store, 1)) == content(1)


def test_the_least_recently_used_shard_is_evicted(s3: ObjectStore, cache: Path, tmp_path: Path) -> None:
    others = {"thesis.txt", "model.safetensors", "download.part"}  # never removed
    (tmp_path / "kept").mkdir()
    for name in others:
        (tmp_path / "kept" / name).write_bytes(bytes(10 * SIZE))
    store = RemoteStore(s3.put(cache), tmp_path / "kept", 3 * SIZE + 10)
    for number, left in ((0, {0}), (1, {0, 1}), (2, {0, 1, 2}), (0, {0, 1, 2}), (3, {0, 2, 3}), (4, {0, 3, 4})):
        assert read(store, number) == content(number)
        assert kept(tmp_path / "kept") == {f"{store.manifest.shards[at].sha256}.safetensors" for at in left} | others


def test_an_eviction_before_opening_is_retried_a_few_times(cache: Path, tmp_path: Path) -> None:
    store = RemoteStore(cache.as_uri(), tmp_path / "kept", 10**6)
    calls = []

    def unlucky(path: Path) -> bytes:
        calls.append(path)
        if len(calls) < 3:
            path.unlink()
        return path.read_bytes()

    assert open_shard(store, store.manifest.shards[0], unlucky) == content(0)
    assert len(calls) == 3
    message = "evicted 8 times before it could be opened; raise stream_cache_gb"
    refused(message, open_shard, store, store.manifest.shards[0], lambda path: path.unlink() or path.read_bytes())


def test_a_limit_below_the_windows_of_all_buckets_is_rejected(cache: Path, tmp_path: Path) -> None:
    open_kept = partial(RemoteStore, cache.as_uri(), tmp_path / "kept")
    message = r"is too small for the shards of .* \(5 per bucket, 1 buckets\)"
    (limit,) = re.findall(r"set ([\d.]+) or more", refused(message, open_kept, 5 * SIZE - 1, window=5))
    assert float(limit) == 5 * SIZE / 1e9
    open_kept(5 * SIZE, window=5)
    open_kept(COUNT * SIZE, window=100)  # there are no more shards
    manifest = Manifest.load(cache)
    wide = [replace(entry, bucket="80x48") for entry in manifest.shards[:3]]
    replace(manifest, shards=(*wide, *manifest.shards[3:])).save(cache)
    refused("4 per bucket, 2 buckets", open_kept, 7 * SIZE - 1, window=4)  # all 3 of one, 4 of the other
    open_kept(7 * SIZE, window=4)


def _read_all(store: RemoteStore, order: list[int], start: Any, most: Any) -> None:
    """Read shards in an order and report the largest size of the folder after any of them."""
    start.wait()
    peak = 0
    for number in order:
        assert read(store, number) == content(number)
        peak = max(peak, used(store.disk))
    most.put(peak)


def in_processes(store: RemoteStore, orders: list[list[int]]) -> list[int]:
    start, most = FORK.Barrier(len(orders)), FORK.SimpleQueue()
    children = [FORK.Process(target=_read_all, args=(store, order, start, most)) for order in orders]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * len(children)
    return [most.get() for _ in children]


def test_processes_that_need_the_same_shards_fetch_each_once(s3: ObjectStore, cache: Path, tmp_path: Path) -> None:
    url = s3.put(cache)
    store = RemoteStore(url, tmp_path / "kept", 10**6)
    in_processes(store, [list(range(COUNT))] * 3)
    assert [gets(s3, url, f"shards/{entry.file}") for entry in store.manifest.shards] == [1] * COUNT
    assert used(store.disk) == COUNT * SIZE


def test_a_file_of_another_process_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, digest, fetched = DiskCache(tmp_path, 10 * SIZE), hashlib.sha256(content(0)).hexdigest(), []
    claimed = disk_cache._claimed

    def fetch(file: Any) -> None:
        fetched.append(file.write(content(0)))

    def late(part: Path, folder_lock: Any) -> Any:
        monkeypatch.setattr(disk_cache, "_claimed", claimed)
        disk.path(digest, SIZE, fetch)
        return claimed(part, folder_lock)

    monkeypatch.setattr(disk_cache, "_claimed", late)
    assert disk.path(digest, SIZE, fetch).read_bytes() == content(0)
    assert fetched == [SIZE]
    assert kept(tmp_path) == {f"{digest}.safetensors"}


@pytest.mark.parametrize("room", [1, 3])
def test_shared_limit(s3: ObjectStore, cache: Path, tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_POLL_SEC", 0.005)
    store = RemoteStore(s3.put(cache), tmp_path / "kept", room * SIZE)
    paces = ((0, 1), (3, 5), (5, 7))
    orders = [[(start + step * number) % COUNT for number in range(2 * COUNT)] for start, step in paces]
    assert max(in_processes(store, orders)) <= room * SIZE
    assert not [name for name in kept(tmp_path / "kept") if name.endswith(".part")]


def _stop_halfway(url: str, folder: Path, parent: Any) -> None:
    """Download half of the first shard, report it, and continue on request."""
    write, written = remote._write, []

    def half(file: int, data: bytes, start: int) -> None:
        write(file, data, start)
        written.append(start)
        if len(written) == 1:
            parent.send("half")
            parent.recv()

    remote.RANGE_BYTES, remote._write = SIZE // 2, half
    store = RemoteStore(url, folder, 3 * SIZE)
    parent.send(store.path(store.manifest.shards[0]).name)


@pytest.fixture
def half_a_download(s3: ObjectStore, cache: Path, tmp_path: Path) -> Iterator[tuple[str, Any, Any]]:
    """The URL of a cache, a process that waits with half of its first shard, and a connection to it."""
    url = s3.put(cache)
    line, end = FORK.Pipe()
    child = FORK.Process(target=_stop_halfway, args=(url, tmp_path / "kept", end))
    child.start()
    assert line.recv() == "half"
    yield url, child, line
    child.kill()
    child.join()


def test_a_killed_process_leaves_no_complete_file(half_a_download: tuple[str, Any, Any], tmp_path: Path) -> None:
    url, child, _ = half_a_download
    (part,) = kept(tmp_path / "kept")
    assert part.endswith(".part")
    before = RemoteStore(url, tmp_path / "kept", 3 * SIZE)
    child.kill()
    child.join()
    assert kept(tmp_path / "kept") == {part}
    store = RemoteStore(url, tmp_path / "kept", 3 * SIZE)
    assert kept(tmp_path / "kept") == set()
    assert read(store, 0) == content(0)
    (tmp_path / "kept" / part).write_bytes(b"of another killed process")
    (tmp_path / "kept" / f"{store.manifest.shards[0].sha256}.safetensors").unlink()
    assert read(before, 0) == content(0), "leftovers are overwritten"
    assert used(before.disk) == SIZE


def test_a_prefetch_does_not_wait_for_another_process(half_a_download: tuple[str, Any, Any], tmp_path: Path) -> None:
    url, _, line = half_a_download
    store = RemoteStore(url, tmp_path / "kept", 3 * SIZE)
    first, second = store.manifest.shards[:2]
    assert store.prefetch(first) is None
    assert store.prefetch(second) == store.path(second)
    line.send("continue")
    assert line.recv() == f"{first.sha256}.safetensors"
    assert store.prefetch(first) == store.path(first)


def test_a_prefetch_is_not_skipped_while_leftovers_are_sought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, digest = DiskCache(tmp_path, 10 * SIZE), hashlib.sha256(content(0)).hexdigest()
    creating, cleaners = disk_cache._creating, []

    def clean() -> None:
        with disk._folder_lock():
            assert disk._free_space(0)

    def create(path: str, flags: int) -> int:
        file = creating(path, flags)  # not locked yet, like a leftover
        cleaners.append(threading.Thread(target=clean))
        cleaners[-1].start()
        cleaners[-1].join(0.3)
        return file

    monkeypatch.setattr(disk_cache, "_creating", create)
    path = disk.prefetch(digest, SIZE, lambda file: file.write(content(0)) and None)
    assert path == tmp_path / f"{digest}.safetensors"
    assert len(cleaners) == 1
    cleaners[0].join()


def test_a_running_download_keeps_its_space_and_file(half_a_download: tuple[str, Any, Any], tmp_path: Path) -> None:
    url, _, line = half_a_download
    (part,) = kept(tmp_path / "kept")
    store = RemoteStore(url, tmp_path / "kept", 3 * SIZE)
    for number in (1, 2, 3):
        read(store, number)
    entries = store.manifest.shards
    assert kept(tmp_path / "kept") == {part, f"{entries[2].sha256}.safetensors", f"{entries[3].sha256}.safetensors"}
    line.send("continue")
    assert line.recv() == f"{entries[0].sha256}.safetensors"
    assert read(store, 0) == content(0)


@pytest.mark.parametrize(
    ("spoil", "came"),
    [
        (lambda data: bytes(len(data)), f"{SIZE} bytes with sha256 541b3e9daa09b20b"),
        (lambda data: data[:-1], f"{SIZE - 1} bytes"),
        (lambda data: b"", "0 bytes"),
        (lambda data: data + b"more", f"more than {SIZE} bytes"),
    ],
    ids=["other bytes", "short", "empty", "long"],
)
@pytest.mark.usefixtures("quick")
def test_a_damaged_object_is_reported(s3: ObjectStore, cache: Path, tmp_path: Path, spoil: Any, came: str) -> None:
    (cache / "shards" / "shard-0.safetensors").write_bytes(spoil(content(0)))
    url = s3.put(cache)
    store = RemoteStore(url, tmp_path / "kept", 10**6)
    entry = store.manifest.shards[0]
    for _ in range(2):  # no part of it was kept
        text = refused("", store.path, entry)
        assert text.startswith(f"{url}/shards/shard-0.safetensors is damaged: expected {SIZE} bytes with sha256 ")
        assert entry.sha256[:16] in text
        assert f"received {came}" in text
        assert kept(tmp_path / "kept") == set()


@pytest.mark.usefixtures("quick")
def test_damage_is_retried(s3: ObjectStore, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, calls = remote._copy_ranges, []

    def sometimes(url: str, file: int, size: int, written: dict[int, int]) -> None:
        calls.append(url)
        if len(calls) == 1:
            raise protocols.RemoteUnreachable("cut off")
        if len(calls) == 2:
            written[0] = os.pwrite(file, bytes(SIZE // 2), 0)
        else:
            copy(url, file, size, written)

    monkeypatch.setattr(remote, "_copy_ranges", sometimes)
    assert read(RemoteStore(s3.put(cache), tmp_path / "kept", 10**6), 0) == content(0)
    assert len(calls) == 3


def test_a_missing_object_is_reported(s3: ObjectStore, cache: Path, tmp_path: Path) -> None:
    (cache / "shards" / "shard-0.safetensors").unlink()
    url = s3.put(cache)
    store = RemoteStore(url, tmp_path / "kept", 10**6)
    with pytest.raises(UserError, match=f"^nothing found at {url}/shards/shard-0.safetensors; copy the whole cache"):
        store.path(store.manifest.shards[0])
    assert kept(tmp_path / "kept") == set()


@pytest.mark.parametrize("place", ["s3://stores/none", "s3://no-such-bucket/none"])
def test_a_missing_cache_is_reported(s3: ObjectStore, tmp_path: Path, place: str) -> None:
    refused(f"^no cache at {place}: .* build it with `sd3-light cache CONFIG`, or copy", load_remote_manifest, place)
    refused(r"^no cache at", open_store, place, tmp_path / "kept", 10**6)


def test_a_damaged_manifest_is_reported(s3: ObjectStore, cache: Path, tmp_path: Path) -> None:
    text = (cache / "manifest.json").read_text()
    (cache / "manifest.json").write_text(text[:100])
    refused(r"manifest\.json is damaged", load_remote_manifest, s3.put(cache))
    digest = re.search(r'"sha256": "(\w+)"', text)
    assert digest is not None
    (cache / "manifest.json").write_text(text.replace(digest[1], "../../elsewhere", 1))
    with pytest.raises(UserError, match=r"manifest\.json is damaged at 'shard-0\.safetensors'"):
        RemoteStore(s3.put(cache), tmp_path / "kept", 10**6)


def error_of(url: str) -> str:
    text = refused("", load_remote_manifest, url)
    assert "secret-testing" not in text
    return text


def test_wrong_credentials(s3: ObjectStore, cache: Path) -> None:
    url = s3.put(cache)
    requests = pytest.importorskip("requests")
    requests.post(f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset-auth", data=b"0")  # enable authentication
    try:
        text = error_of(url)
    finally:
        requests.post(f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset-auth", data=b"inf")
    assert text.startswith(f"no permission to read {url}/manifest.json (")
    assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in text


class Refusal(BaseHTTPRequestHandler):
    """Answers like S3 to a machine whose clock is wrong; a HEAD request has no body."""

    minutes = 0.0
    code = "RequestTimeTooSkewed"

    def do_HEAD(self) -> None:
        self.send_response_only(403)
        self.send_header("Date", formatdate(time.time() - 60 * self.minutes, usegmt=True))
        body = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>No</Message></Error>".encode()
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD  # noqa: N815 - the library's name

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("minutes", "code", "text"),
    [
        (60, "RequestTimeTooSkewed", "the clock of this machine is 60 minutes ahead"),
        (-20, "RequestTimeTooSkewed", "the clock of this machine is 20 minutes behind"),
        (-20, "AccessDenied", "the clock of this machine is 20 minutes behind"),
        (0, "AccessDenied", "no permission"),
        (8, "AccessDenied", "no permission"),
    ],
)
def test_a_wrong_clock(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, minutes: float, code: str, text: str) -> None:
    with web_server(type("Handler", (Refusal,), {"minutes": minutes, "code": code})) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        error = error_of("s3://bucket/any")
        with pytest.raises(protocols.RemoteForbidden) as of_head:
            protocols.with_retries("s3://bucket/any", lambda files, path: files.info(path))
    assert text in error
    assert ("set the clock" in error) == ("AWS_ACCESS_KEY_ID" not in error)
    assert text in str(of_head.value)


def test_a_wrong_clock_is_named_by_the_code_of_the_store() -> None:
    cause = OSError("skewed")
    cause.response = {"Error": {"Code": "RequestTimeTooSkewed"}}  # type: ignore[attr-defined]
    with (
        pytest.raises(protocols.RemoteForbidden, match=r"the clock of this machine is wrong, .*; set the clock$"),
        protocols.remote_errors("s3://bucket/any"),
    ):
        raise OSError(5, "Input/output error") from cause


PORTAL = b"\n <!DOCTYPE html><html><body>Please log in</body></html>"


@pytest.mark.usefixtures("quick")
def test_a_login_page_instead_of_the_cache_is_named(s3: ObjectStore, cache: Path, tmp_path: Path) -> None:
    (cache / "shards" / "shard-0.safetensors").write_bytes(PORTAL)
    store = RemoteStore(s3.put(cache), tmp_path / "kept", 10**6)
    with pytest.raises(UserError, match=r"shard-0.safetensors is an HTML page instead of the file: a login page or a"):
        store.path(store.manifest.shards[0])
    (cache / "manifest.json").write_bytes(PORTAL)
    text = error_of(s3.put(cache))
    assert "manifest.json is an HTML page instead of the file: a login page or a proxy answers" in text
    assert "AWS_ENDPOINT_URL" in text
    assert "sd3-light cache" not in text


@pytest.mark.usefixtures("quick")
def test_no_credentials_and_a_wrong_endpoint(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        text = error_of("s3://bucket/any")
    assert text.startswith("cannot read s3://bucket/any/manifest.json (Unable to locate credentials); check")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    text = error_of("s3://bucket/any")
    assert text.startswith("cannot read s3://bucket/any/manifest.json (Could not connect to the endpoint URL")
    assert "AWS_ENDPOINT_URL or FSSPEC_S3_ENDPOINT_URL" in text


@pytest.mark.usefixtures("quick")
def test_a_forbidden_web_page() -> None:
    refuses = type("Refuses", (SimpleHTTPRequestHandler,), {"do_GET": lambda self: self.send_error(403)})
    with web_server(refuses) as web:
        assert re.match(r"cannot read http://127.0.0.1:\d+/x/manifest.json \(403", error_of(f"{web}/x"))


def test_an_unsupported_protocol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert protocol_problem("file:///folder") is None
    assert "fsspec does not support the protocol 's4'" in str(protocol_problem("s4://bucket/x"))
    with pytest.raises(UserError, match=r"s4://bucket/x/manifest\.json: fsspec does not support the protocol 's4'"):
        open_store("s4://bucket/x", tmp_path, 1)

    def missing(protocol: str) -> None:
        raise ImportError(f"Install the package of {protocol}")

    monkeypatch.setattr(protocols.fsspec, "get_filesystem_class", missing)
    assert protocol_problem("s3://bucket/x") == "s3:// needs a package: pip install 'sd3-light[s3]'"
    assert protocol_problem("gs://bucket/x") == "gs:// needs a package: Install the package of gs"


def test_a_full_disk_is_not_a_network_error(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore(cache.as_uri(), tmp_path / "kept", 10**6)
    monkeypatch.setattr(remote, "_copy", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=f"^cannot keep shards in {tmp_path / 'kept'}: No space left on device; free"):
        store.path(store.manifest.shards[0])
    assert kept(tmp_path / "kept") == set()


def test_the_default_folder_belongs_to_the_user(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    store = open_store(cache.as_uri(), None, 10**6)
    assert isinstance(store, RemoteStore)
    assert store.disk.folder == private_temp_folder(cache.as_uri())
    assert store.disk.folder.parent == tmp_path / "temp"
    assert store.disk.folder.stat().st_mode & 0o777 == 0o700
    assert private_temp_folder("s3://bucket/x") != private_temp_folder("s3://bucket/y")
    uid = os.getuid()
    (tmp_path / "temp" / private_temp_folder("s3://bucket/z").name.replace(f"-{uid}-", f"-{uid + 1}-")).mkdir()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    refused("belongs to another user; set stream_cache_dir", private_temp_folder, "s3://bucket/z")


def test_a_damaged_shard_is_fetched_again(tmp_path: Path, make_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sd3_light.data.stream import CachedDataset

    make_cache()
    store = RemoteStore(f"file://{tmp_path / 'cache'}", tmp_path / "kept", 10**9)
    good = CachedDataset(store).empty_text()
    kept = store.path(store.manifest.empty)
    kept.write_bytes(kept.read_bytes()[:-1] + b"\x7f")
    monkeypatch.setenv("MASTER_PORT", "1")  # another launch
    refused("is damaged", CachedDataset(store).empty_text)
    monkeypatch.setenv("MASTER_PORT", "2")
    assert CachedDataset(store).empty_text().keys() == good.keys(), "fetched again at the next start"


def test_a_fetched_file_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure a complete name would otherwise contain zeros."""
    disk, digest = DiskCache(tmp_path, 10 * SIZE), hashlib.sha256(content(0)).hexdigest()
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.replace

    def synced(file: int) -> None:
        events.append(("fsync", hashlib.sha256(os.pread(file, SIZE + 1, 0)).hexdigest()))
        fsync(file)

    def renamed(source: Any, target: Any) -> None:
        events.append(("rename", Path(target).stem))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    disk.path(digest, SIZE, lambda file: file.write(content(0)))  # type: ignore[arg-type, return-value]
    assert events == [("fsync", digest), ("rename", digest)]


def test_a_process_forked_under_the_lock_does_not_keep_it(tmp_path: Path) -> None:
    """The loader forks its workers while another thread may hold the lock; its file stays open in them."""
    disk, done = DiskCache(tmp_path, 10 * SIZE), FORK.Event()
    worker = FORK.Process(target=done.wait)
    with disk._folder_lock():
        worker.start()
    try:
        with (tmp_path / ".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        done.set()
        worker.join()
