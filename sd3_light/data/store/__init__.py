"""Shard stores: a local cache folder, or a URL with a local folder of bounded size for fetched shards."""

import os
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import numpy as np

from sd3_light.config.base import CacheLocation
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import MANIFEST, SHARDS, Manifest, ShardEntry
from sd3_light.data.shard_table import ShardTable, column, group_shards
from sd3_light.data.store.disk_cache import DiskCache
from sd3_light.data.store.disk_cache import private_temp_folder as private_temp_folder
from sd3_light.data.store.remote import download, load_remote_manifest

_Opened = TypeVar("_Opened")
_OPEN_TRIES = 8
_NUM_HASHED = 1024  # shards that a process has downloaded but not opened yet, at most


class ShardStore(Protocol):
    """The shards of one cache. Can be sent to worker processes, forked or spawned."""

    manifest: Manifest
    keeps_times: bool
    """Whether reading leaves the modification times of the files unchanged."""
    prefetch_threads: int
    """Shards to prefetch at a time; with two, one is downloaded while the other is flushed and hashed."""

    def path(self, entry: ShardEntry) -> Path:
        """Return a local file of the shard. It may be removed before it is opened: use `open_shard`."""

    def was_just_hashed(self, entry: ShardEntry, status: os.stat_result) -> bool:
        """Return, once per download, whether this process has just compared this file with its entry's hash."""


def open_shard(store: ShardStore, entry: ShardEntry, reader: Callable[[Path], _Opened]) -> _Opened:
    """Return ``reader(path)`` of a shard; retry if it raises FileNotFoundError because the file was just evicted."""
    for _ in range(_OPEN_TRIES):
        try:
            return reader(store.path(entry))
        except FileNotFoundError:
            continue
    raise UserError(f"{entry.file} was evicted {_OPEN_TRIES} times before it could be opened; raise stream_cache_gb")


class LocalStore:
    """A local cache folder."""

    keeps_times = True
    prefetch_threads = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.load(folder)

    def path(self, entry: ShardEntry) -> Path:
        """Return the shard in the cache folder; a UserError if it is missing."""
        path = self.folder / SHARDS / entry.file
        if not path.is_file():
            raise UserError(f"{path} is missing; run `sd3-light cache CONFIG` to build it again")
        return path

    def was_just_hashed(self, entry: ShardEntry, status: os.stat_result) -> bool:
        """Return False: a local shard is hashed before it is used."""
        return False


class RemoteStore:
    """A cache at a URL. Shards are fetched on demand, verified, and stored in ``folder``.

    The folder holds at most ``limit_bytes`` and can be shared by several processes, runs and URLs. ``window`` is the
    number of shards per bucket in use at a time. A limit below their total size is rejected, because it would fetch
    each shard again and again.
    """

    keeps_times = False  # they order the shards by their last use
    prefetch_threads = 2

    def __init__(self, url: str, folder: Path, limit_bytes: int, window: int = 1) -> None:
        self.url = url
        self.manifest = load_remote_manifest(url, folder)
        _check_entries(self.manifest, f"{url}/{MANIFEST}")
        _check_limit(self.manifest, url, limit_bytes, window)
        self.disk = DiskCache(folder, limit_bytes)
        self._hashed: deque[tuple[str, int, int]] = deque(maxlen=_NUM_HASHED)

    def path(self, entry: ShardEntry) -> Path:
        """Return the shard in the local folder, fetched if necessary."""

        def fetch(file: BinaryIO) -> None:
            download(f"{self.url}/{SHARDS}/{entry.file}", entry, file)
            self._hashed.append(_identity(entry, os.fstat(file.fileno())))

        return self.disk.path(entry.sha256, entry.bytes, fetch)

    def was_just_hashed(self, entry: ShardEntry, status: os.stat_result) -> bool:
        """Return whether this process has downloaded this file; False when asked again."""
        try:
            self._hashed.remove(_identity(entry, status))
        except ValueError:
            return False
        return True


def open_store(location: CacheLocation, folder: Path | None, limit_bytes: int, window: int = 1) -> ShardStore:
    """Return the store of a local path or a URL; ``folder`` (None: in the temp folder) is for the shards of a URL."""
    if isinstance(location, Path):
        return LocalStore(location)
    return RemoteStore(location, folder or private_temp_folder(location), limit_bytes, window)


def _identity(entry: ShardEntry, status: os.stat_result) -> tuple[str, int, int]:
    return entry.sha256, status.st_dev, status.st_ino


def _check_entries(manifest: Manifest, where: str) -> None:
    """Raise a UserError for invalid names and hashes, because they become parts of paths."""
    listed = () if isinstance(manifest.shards, ShardTable) else manifest.shards  # a table is checked when it is opened
    for entry in (*listed, manifest.empty):
        if not re.fullmatch(r"[0-9a-f]{64}", entry.sha256) or "/" in entry.file or entry.bytes < 1:
            raise UserError(f"{where} is damaged at {entry.file!r}; copy the cache folder there again")


def _check_limit(manifest: Manifest, url: str, limit_bytes: int, window: int) -> None:
    buckets = group_shards(manifest.shards)
    in_use = sum(int(np.sort(column(bucket.shards, "bytes"))[-window:].sum()) for bucket in buckets)
    needed = max(in_use, manifest.empty.bytes)
    if limit_bytes < needed:
        raise UserError(
            f"stream_cache_gb = {limit_bytes / 1e9:g} is too small for the shards of {url} that are in use at a time "
            f"({window} per bucket, {len(buckets)} buckets); set {_round_up(needed)} or more, or lower shuffle_window"
        )


def _round_up(count: int) -> str:
    """Format bytes in GB, rounded up to at most three decimals (more below 1 MB)."""
    digits = 3 if count >= 1_000_000 else 9
    step = 10 ** (9 - digits)
    return f"{-(-count // step) * step / 1e9:.{digits}f}".rstrip("0").rstrip(".")
