"""A cache at a URL: read its manifest, download and verify its shards."""

import asyncio
import hashlib
import os
import sys
import time
from collections.abc import Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from weakref import WeakKeyDictionary

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import MANIFEST, Manifest, ShardEntry, TableFile, damaged_mark, read_table
from sd3_light.data.shard_table import ShardTable
from sd3_light.data.store.disk_cache import DiskCache, private_temp_folder
from sd3_light.urls import (
    HTML_BYTES,
    RemoteNotFound,
    RemoteUnreachable,
    await_with_retries,
    html_problem,
    remote_errors,
    remote_filesystem,
    with_retries,
)

RANGE_BYTES = 8 << 20
"""Bytes of one request of a download."""
RANGES_IN_FLIGHT = 16
"""Most ranges of a process that are requested or in memory at a time, over all its downloads."""
_FINISHING = 3  # downloads whose bytes are flushed and hashed while those of others arrive
PAUSES_SEC = (0.5, 2.0)
"""Delays before a failed download is retried, after the retries of its requests."""
# by the library's event loop: a forked process has its own
_SLOTS: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = WeakKeyDictionary()


def load_remote_manifest(url: str, folder: Path | None = None) -> Manifest:
    """Return the manifest of the cache at a URL; a UserError if there is none.

    A table of its shards is downloaded to ``folder`` (None: one in the temp folder), once for all processes.
    """
    where = f"{url}/{MANIFEST}"
    try:
        data: bytes = with_retries(where, lambda files, path: files.cat_file(path))
    except RemoteNotFound as error:
        raise UserError(
            f"no cache at {url}: {where} does not exist; build it with `sd3-light cache CONFIG`, or copy a folder there"
        ) from error

    if problem := html_problem(where, data):
        raise UserError(problem)

    def open_table(table: TableFile) -> ShardTable:
        disk = DiskCache(folder or private_temp_folder(url), sys.maxsize)  # no reason to evict shards

        def path() -> Path:
            fetch = partial(download, f"{url}/{table.file}", table)
            return disk.path(table.sha256, table.bytes, fetch, ".arrow")

        try:
            return read_table(table, path())
        except ValueError:  # the local copy has been damaged or removed: fetch it again, once
            damaged_mark(path()).touch()
            return read_table(table, path())

    return Manifest.from_json(data, where, open_table)


def downloads_at_once(shard: int) -> int:
    """Return how many shards of that many bytes are prefetched at a time, to use all `RANGES_IN_FLIGHT`."""
    ranges = max(1, -(-shard // RANGE_BYTES))
    return _FINISHING + -(-RANGES_IN_FLIGHT // ranges)


def download_bytes(shard: int) -> int:
    """Return the most memory that the downloads of a process take, for shards of that many bytes."""
    downloads = downloads_at_once(shard) + 1  # the reader may wait for one more
    # the library joins the parts of one range at a time; a download without ranges holds as much as a range
    return min(downloads * shard, max(RANGES_IN_FLIGHT + 1, downloads) * RANGE_BYTES)


def download(url: str, entry: ShardEntry | TableFile, file: IO[bytes]) -> None:
    """Download a URL to ``file`` (mode "w+b"), with retries; a UserError unless size and hash are ``entry``'s."""
    written: dict[int, int] = {}
    for pause in (*PAUSES_SEC, None):
        try:
            size, digest = _copy(url, file, entry.bytes, written)
            if (size, digest) == (entry.bytes, entry.sha256):
                return
            written.clear()
            start = os.pread(file.fileno(), HTML_BYTES, 0)
            failure = UserError(html_problem(url, start) or _damage(url, entry, size, digest))
        except RemoteUnreachable as error:
            failure = error
        if pause is not None:
            time.sleep(pause)
    raise failure


def _damage(url: str, entry: ShardEntry | TableFile, size: int, digest: str) -> str:
    received = f"{size} bytes" if size <= entry.bytes else f"more than {entry.bytes} bytes"
    return (
        f"{url} is damaged: expected {entry.bytes} bytes with sha256 {entry.sha256[:16]}, received {received} "
        f"with sha256 {digest[:16]}; copy the cache folder there again"
    )


def verify_remote(url: str, entry: ShardEntry, folder: Path) -> None:
    """Read a shard, with retries; a UserError unless size and hash are those of ``entry``. ``folder`` needs space."""
    with TemporaryFile(dir=folder) as file:
        download(url, entry, file)


def _copy(url: str, file: IO[bytes], limit: int, written: dict[int, int]) -> tuple[int, str]:
    """Copy a URL to a file and return (size, sha256); what exceeds ``limit`` bytes is not written.

    ``written`` has the start and size of ranges that need not be copied again after an error.
    """
    with remote_filesystem(url) as (files, _):
        has_ranges = getattr(files, "async_impl", False)
    if has_ranges and not url.startswith(("http://", "https://")):  # a web server may not support ranges
        _copy_ranges(url, file.fileno(), limit, written)
        size = sum(written.values())
    else:
        size = _copy_stream(url, file.fileno(), limit)
    with open(os.dup(file.fileno()), "rb", buffering=0) as copy:
        copy.seek(0)
        return size, hashlib.file_digest(copy, "sha256").hexdigest()


def _copy_stream(url: str, file: int, limit: int) -> int:
    """Copy a URL from its start to its end; return its size, or more than ``limit`` as soon as it is larger."""
    size = 0
    with closing(_pieces(url)) as pieces:
        for data in pieces:
            size += len(data)
            if size > limit:
                break
            _write(file, data, size - len(data))
    return size


def _pieces(url: str) -> Generator[bytes, None, None]:
    with remote_filesystem(url) as (files, path), files.open(path, "rb", cache_type="none") as source:
        while data := source.read(RANGE_BYTES):
            yield data


def _copy_ranges(url: str, file: int, size: int, written: dict[int, int]) -> None:
    """Copy the ranges of a URL that are not in ``written``, concurrently."""
    with remote_filesystem(url) as (files, path):
        # a copy of the descriptor: the event loop may run for a moment after this thread was interrupted
        copies = _write_ranges(files, url, path, os.dup(file), size, written)
        future = asyncio.run_coroutine_threadsafe(copies, files.loop)
    try:
        future.result()
    finally:
        future.cancel()


async def _write_ranges(files: Any, url: str, path: str, file: int, size: int, written: dict[int, int]) -> None:
    """Write ranges to ``file`` and close it. If the store cannot be reached, the other ranges are copied first."""
    slots = _SLOTS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(RANGES_IN_FLIGHT))
    failures: list[RemoteUnreachable] = []

    async def copy(start: int) -> None:
        # the last range asks for a byte more: a larger file is damaged
        end = start + RANGE_BYTES if start + RANGE_BYTES < size else size + 1
        async with slots:  # until the bytes are written, which bounds memory; not during the pause before a retry
            data = await _read_range(files, url, path, start, end)
            _write(file, data[: size - start], start)
            written[start] = len(data)

    async def copy_or_note(start: int) -> None:
        try:
            await await_with_retries(url, partial(copy, start))
        except RemoteUnreachable as error:
            failures.append(error)

    starts = [start for start in range(0, size, RANGE_BYTES) if start not in written]
    copies = [asyncio.ensure_future(copy_or_note(start)) for start in starts]
    try:
        await asyncio.gather(*copies)
    finally:
        for task in copies:
            task.cancel()  # it writes nothing after this
        os.close(file)
    if failures:
        raise failures[0]


async def _read_range(files: Any, url: str, path: str, start: int, end: int) -> bytes:
    with remote_errors(url):
        try:
            data: bytes = await files._cat_file(path, start=start, end=end)
        except OSError as error:
            if "not satisfiable" not in str(error):
                raise
            data = b""  # the file ends before this range
        return data


def _write(file: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, start)
        view = view[count:]
        start = start + count
