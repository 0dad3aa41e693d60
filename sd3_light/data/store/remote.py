"""A cache at a URL: its manifest, and shards that are checked while they come."""

import hashlib
import time
from collections.abc import Iterator
from typing import BinaryIO

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import MANIFEST, Manifest, ShardEntry
from sd3_light.data.store.protocols import RemoteNotFound, RemoteUnreachable, remote_filesystem

CHUNK_BYTES = 16 << 20
PAUSES_SEC = (0.5, 2.0)
"""Waits before a failed download is tried again."""


def remote_manifest(url: str) -> Manifest | None:
    """The manifest of the cache at a URL; None where there is none."""
    where = f"{url}/{MANIFEST}"
    try:
        with remote_filesystem(where) as (files, path):
            data: bytes = files.cat_file(path)
    except RemoteNotFound:
        return None
    return Manifest.from_json(data, where)


def load_remote_manifest(url: str) -> Manifest:
    """The manifest of the cache at a URL; a fault of the user where there is none."""
    manifest = remote_manifest(url)
    if manifest is None:
        raise UserError(
            f"no cache at {url}: nothing lies at {url}/{MANIFEST}; build it with a local cache_dir, then copy the "
            "folder there"
        )
    return manifest


def download(url: str, entry: ShardEntry, file: BinaryIO) -> None:
    """Write the bytes at a URL into ``file``; a fault of the user unless they are the ones that ``entry`` promises.

    What comes damaged or is cut off is fetched again, as often as there are ``PAUSES_SEC``.
    """
    for pause in (*PAUSES_SEC, None):
        try:
            size, digest = _copy(url, file, entry.bytes)
            if (size, digest) == (entry.bytes, entry.sha256):
                return
            came = f"{size} bytes" if size <= entry.bytes else f"more than {entry.bytes} bytes"
            fault = UserError(
                f"{url} is damaged: expected {entry.bytes} bytes with sha256 {entry.sha256[:16]}, there came {came} "
                f"with sha256 {digest[:16]}; copy the cache folder there again"
            )
        except RemoteUnreachable as error:
            fault = error
        if pause is not None:
            time.sleep(pause)
    raise fault


def _copy(url: str, file: BinaryIO, most: int) -> tuple[int, str]:
    """(size, sha256) of what came; reading ends where more than ``most`` bytes come."""
    file.seek(0)
    size, digest = 0, hashlib.sha256()
    for chunk in _chunks(url):
        size += len(chunk)
        if size > most:
            break
        digest.update(chunk)
        file.write(chunk)
    return size, digest.hexdigest()


def _chunks(url: str) -> Iterator[bytes]:
    with remote_filesystem(url) as (files, path), files.open(path, "rb", cache_type="none") as source:
        while chunk := source.read(CHUNK_BYTES):
            yield chunk
