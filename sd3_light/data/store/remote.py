"""A cache at a URL: read its manifest, download and verify its shards."""

import asyncio
import hashlib
import sys
import time
from collections.abc import Generator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from weakref import WeakKeyDictionary

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import MANIFEST, Manifest, ShardEntry, TableFile, damaged_mark, read_table
from sd3_light.data.shard_table import ShardTable
from sd3_light.data.store.disk_cache import DiskCache, private_temp_folder
from sd3_light.data.store.protocols import RemoteNotFound, RemoteUnreachable, remote_filesystem, with_retries

RANGE_BYTES = 8 << 20
"""Bytes of one request of a download."""
RANGES_IN_FLIGHT = 8
"""Most requests of a process at a time."""
RANGES_PER_DOWNLOAD = RANGES_IN_FLIGHT * 3 // 2
"""Requests that a download has open; those above `RANGES_IN_FLIGHT` start when others end."""
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


def download_bytes(shard: int) -> int:
    """Return the most memory that the download of a shard of that many bytes takes."""
    return min(shard, RANGES_PER_DOWNLOAD * RANGE_BYTES)


def download(url: str, entry: ShardEntry | TableFile, file: IO[bytes]) -> None:
    """Download a URL to ``file`` (mode "w+b"), with retries; a UserError unless size and hash are ``entry``'s."""
    for pause in (*PAUSES_SEC, None):
        try:
            size, digest = _copy(url, file, entry.bytes)
            if (size, digest) == (entry.bytes, entry.sha256):
                return
            received = f"{size} bytes" if size <= entry.bytes else f"more than {entry.bytes} bytes"
            failure = UserError(
                f"{url} is damaged: expected {entry.bytes} bytes with sha256 {entry.sha256[:16]}, received {received} "
                f"with sha256 {digest[:16]}; copy the cache folder there again"
            )
        except RemoteUnreachable as error:
            failure = error
        if pause is not None:
            time.sleep(pause)
    raise failure


def verify_remote(url: str, entry: ShardEntry, folder: Path) -> None:
    """Read a shard, with retries; a UserError unless size and hash are those of ``entry``. ``folder`` needs space."""
    with TemporaryFile(dir=folder) as file:
        download(url, entry, file)


def _copy(url: str, file: IO[bytes], limit: int) -> tuple[int, str]:
    """Copy a URL to a file and return (size, sha256); stop after more than ``limit`` bytes."""
    size = 0
    with closing(_pieces(url, limit)) as pieces:
        for start, data in pieces:
            size += len(data)
            if size > limit:
                break
            file.seek(start)
            file.write(data)
    file.flush()
    file.seek(0)
    return size, hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _pieces(url: str, size: int) -> Generator[tuple[int, bytes], None, None]:
    """Yield (offset, bytes) of a file, and more than ``size`` bytes if it is larger: by range where possible."""
    with remote_filesystem(url) as (files, path):
        if getattr(files, "async_impl", False) and not url.startswith(("http://", "https://")):
            yield from _ranges(url, size)
            return
        with files.open(path, "rb", cache_type="none") as source:  # a web server may not support ranges
            while data := source.read(RANGE_BYTES):
                yield source.tell() - len(data), data


def _ranges(url: str, size: int) -> Generator[tuple[int, bytes], None, None]:
    """Yield (offset, bytes) of ranges as they arrive, so that one that is repeated does not hold up the others."""
    starts = iter(range(0, size, RANGE_BYTES))
    pending: dict[Future[bytes], tuple[int, int]] = {}
    try:
        while True:
            for start in islice(starts, RANGES_PER_DOWNLOAD - len(pending)):
                # the last range asks for a byte more: a larger file is damaged
                end = start + RANGE_BYTES if start + RANGE_BYTES < size else size + 1
                pending[_begin(url, start, end)] = start, end
            if not pending:
                return
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                start, end = pending.pop(future)
                yield start, _finish(url, start, end, future)
    finally:
        for future in pending:
            future.cancel()


def _begin(url: str, start: int, end: int) -> "Future[bytes]":
    with remote_filesystem(url) as (files, path):
        return asyncio.run_coroutine_threadsafe(_read_range(files, path, start, end), files.loop)


async def _read_range(files: Any, path: str, start: int, end: int) -> bytes:
    """Read a range when fewer than `RANGES_IN_FLIGHT` requests of this process are running."""
    slots = _SLOTS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(RANGES_IN_FLIGHT))
    async with slots:
        data: bytes = await files._cat_file(path, start=start, end=end)
        return data


def _finish(url: str, start: int, end: int, future: "Future[bytes]") -> bytes:
    """Return the bytes of a range; a request that failed is repeated after growing pauses."""
    try:
        with remote_filesystem(url):
            try:
                return future.result()
            except OSError as error:
                if "not satisfiable" in str(error):  # the file ends before this range
                    return b""
                raise
    except RemoteUnreachable:
        data: bytes = with_retries(url, lambda files, path: files.cat_file(path, start=start, end=end))
        return data
