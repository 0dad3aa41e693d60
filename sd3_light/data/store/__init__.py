"""Shard stores: a local cache folder, or a URL with a local folder of bounded size for fetched shards."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from sd3_light.config.base import CacheLocation
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import MANIFEST, SHARDS, Manifest, ShardEntry
from sd3_light.data.shard_table import ShardTable, column, group_shards
from sd3_light.data.store.disk_cache import DiskCache
from sd3_light.data.store.disk_cache import private_temp_folder as private_temp_folder
from sd3_light.data.store.remote import download, downloads_at_once, load_remote_manifest

_Opened = TypeVar("_Opened")
_OPEN_TRIES = 8
_WINDOWS_ON_DISK = 3  # the current one, the next one, and one that another process still reads

OnHashed = Callable[[ShardEntry, os.stat_result], None]
"""Receives the status of a file when its bytes have been compared with the entry's hash."""


def open_shard(store: "ShardStore", entry: ShardEntry, reader: Callable[[Path], _Opened]) -> _Opened:
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
    """Whether reading leaves the modification times of the files unchanged."""
    prefetch_threads = 1
    """Shards to prefetch at a time."""
    prefetches_early = False
    """Whether the shards of the next windows may be prefetched before those of the current step are open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.on_hashed: OnHashed | None = None  # a local shard is hashed before it is used
        self.manifest = Manifest.load(folder)

    def path(self, entry: ShardEntry) -> Path:
        """Return the shard in the cache folder; a UserError if it is missing."""
        path = self.folder / SHARDS / entry.file
        if not path.is_file():
            raise UserError(f"{path} is missing; run `sd3-light cache CONFIG` to build it again")
        return path

    def prefetch(self, entry: ShardEntry) -> Path | None:
        """Return the shard in the cache folder."""
        return self.path(entry)


class RemoteStore:
    """A cache at a URL. Shards are fetched on demand or ahead of it, verified, and stored in ``folder``.

    The folder holds at most ``limit_bytes`` and can be shared by several processes, runs and URLs. ``window`` is the
    number of shards per bucket in use at a time. A limit below their total size is rejected, because it would fetch
    each shard again and again.
    """

    keeps_times = False  # they order the shards by their last use

    def __init__(self, url: str, folder: Path, limit_bytes: int, window: int = 1) -> None:
        self.url = url
        self.manifest = load_remote_manifest(url, folder)
        _check_entries(self.manifest, f"{url}/{MANIFEST}")
        in_use = _check_limit(self.manifest, url, limit_bytes, window)
        sizes = column(self.manifest.shards, "bytes")
        self.prefetch_threads = downloads_at_once(int(sizes.mean()) if len(sizes) else 0)
        self.prefetches_early = limit_bytes >= _WINDOWS_ON_DISK * in_use
        self.on_hashed: OnHashed | None = None
        self.disk = DiskCache(folder, limit_bytes)

    def path(self, entry: ShardEntry) -> Path:
        """Return the shard in the local folder, fetched if necessary; it may be removed before it is opened."""
        return self.disk.path(entry.sha256, entry.bytes, partial(self._download, entry))

    def prefetch(self, entry: ShardEntry) -> Path | None:
        """Return the shard like `path`; None if another process or thread is fetching it."""
        return self.disk.prefetch(entry.sha256, entry.bytes, partial(self._download, entry))

    def _download(self, entry: ShardEntry, file: BinaryIO) -> None:
        download(f"{self.url}/{SHARDS}/{entry.file}", entry, file)
        if self.on_hashed is not None:
            self.on_hashed(entry, os.fstat(file.fileno()))


ShardStore = LocalStore | RemoteStore
"""The shards of one cache. Can be sent to worker processes, forked or spawned."""


def open_store(location: CacheLocation, folder: Path | None, limit_bytes: int, window: int = 1) -> ShardStore:
    """Return the store of a local path or a URL; ``folder`` (None: in the temp folder) is for the shards of a URL."""
    if isinstance(location, Path):
        return LocalStore(location)
    return RemoteStore(location, folder or private_temp_folder(location), limit_bytes, window)


def _check_entries(manifest: Manifest, where: str) -> None:
    """Raise a UserError for invalid names and hashes, because they become parts of paths."""
    listed = () if isinstance(manifest.shards, ShardTable) else manifest.shards  # a table is checked when it is opened
    for entry in (*listed, manifest.empty):
        if not re.fullmatch(r"[0-9a-f]{64}", entry.sha256) or "/" in entry.file or entry.bytes < 1:
            raise UserError(f"{where} is damaged at {entry.file!r}; copy the cache folder there again")


def _check_limit(manifest: Manifest, url: str, limit_bytes: int, window: int) -> int:
    """Return the bytes of the shards that are in use at a time; a UserError if the limit is below that."""
    buckets = group_shards(manifest.shards)
    in_use = sum(int(np.sort(column(bucket.shards, "bytes"))[-window:].sum()) for bucket in buckets)
    needed = max(in_use, manifest.empty.bytes)
    if limit_bytes < needed:
        raise UserError(
            f"stream_cache_gb = {limit_bytes / 1e9:g} is too small for the shards of {url} that are in use at a time "
            f"({window} per bucket, {len(buckets)} buckets); set {_round_up(needed)} or more, or lower shuffle_window"
        )
    return needed


def _round_up(count: int) -> str:
    """Format bytes in GB, rounded up to at most three decimals (more below 1 MB)."""
    digits = 3 if count >= 1_000_000 else 9
    step = 10 ** (9 - digits)
    return f"{-(-count // step) * step / 1e9:.{digits}f}".rstrip("0").rstrip(".")
