"""A cache at a URL: read its manifest, download and verify its shards."""

import hashlib
import os
import time
from collections.abc import Iterator
from typing import BinaryIO

from sd3_light.config.faults import UserError
from sd3_light.data.manifest import MANIFEST, Manifest, ShardEntry
from sd3_light.data.store.protocols import RemoteNotFound, RemoteUnreachable, remote_filesystem

DOWNLOAD_CHUNK_BYTES = 16 << 20
PAUSES_SEC = (0.5, 2.0)
"""Delays before a failed download is retried."""


def load_remote_manifest(url: str) -> Manifest:
    """Return the manifest of the cache at a URL; a UserError if there is none."""
    where = f"{url}/{MANIFEST}"
    try:
        with remote_filesystem(where) as (files, path):
            data: bytes = files.cat_file(path)
    except RemoteNotFound as error:
        raise UserError(
            f"no cache at {url}: {where} does not exist; build it with `sd3-light cache CONFIG`, or copy a folder there"
        ) from error
    return Manifest.from_json(data, where)


def download(url: str, entry: ShardEntry, file: BinaryIO) -> None:
    """Download a URL to ``file``, with retries; a UserError unless size and hash are those of ``entry``."""
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


def verify_remote(url: str, entry: ShardEntry) -> None:
    """Read a shard, with retries; a UserError unless size and hash are those of ``entry``."""
    with open(os.devnull, "wb") as nowhere:
        download(url, entry, nowhere)


def _copy(url: str, file: BinaryIO, limit: int) -> tuple[int, str]:
    """Copy a URL to a file and return (size, sha256); stop after more than ``limit`` bytes."""
    if file.seekable():
        file.seek(0)
    size, digest = 0, hashlib.sha256()
    for chunk in _chunks(url):
        size += len(chunk)
        if size > limit:
            break
        digest.update(chunk)
        file.write(chunk)
    return size, digest.hexdigest()


def _chunks(url: str) -> Iterator[bytes]:
    with remote_filesystem(url) as (files, path), files.open(path, "rb", cache_type="none") as source:
        while chunk := source.read(DOWNLOAD_CHUNK_BYTES):
            yield chunk
