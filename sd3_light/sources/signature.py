"""A hash of everything that a scan depends on: if it is unchanged, a scan would yield the same items.

Hashes of files are summed in the order in which the disk lists them, so nothing is sorted or kept in memory.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from sd3_light.config import DirectoryConfig
from sd3_light.config.base import DataLocation
from sd3_light.remote_file import RemoteEntry, remote_entry
from sd3_light.sources import access
from sd3_light.sources.access import FolderEntry, folder_entries
from sd3_light.sources.exclusions import read_exclusions
from sd3_light.sources.listing import (
    CAPTION_SUFFIXES,
    IMAGES,
    TABLE_FILES,
    FolderIdentity,
    depth_first,
    folder_identity,
    is_folder,
    is_image_name,
    is_other_table,
    mask_paths,
    media_of,
    visible,
)

SCAN_VERSION = 2
"""Increase it whenever a scan of the same files would yield different records or rejects."""

_SETTINGS = (
    "caption_prefix",
    "shuffle_tags",
    "cache_shuffle_num",
    "cache_shuffle_delimiter",
    "subsample_ratio",
    "skip_empty_caption",
    "image_column",
    "caption_column",
    "max_image_mb",
    "mask_path",
    "default_mask_file",
)
_OTHER_SUFFIXES = frozenset((*CAPTION_SUFFIXES, ".tar", ".parquet"))
_MODULUS = 1 << 128


_Entries = Callable[[str], Iterator[FolderEntry]]
"""Lists the entries of a folder."""


class _HashedFolder(NamedTuple):
    name: str
    path: str
    above: frozenset[FolderIdentity]


def signature(directory: DirectoryConfig, index: int) -> str:
    """Hash every file that ``scan(directory, index)`` reads (name, size, time) and the settings that affect it.

    The hash includes the name of the directory but not its parent folder, so a dataset can be moved. Files that a scan
    ignores are not included.
    """
    excluded = mask_paths(directory)
    total = _hash(f"version {SCAN_VERSION}\0{directory.name}\0{index}")
    for key in _SETTINGS:
        total += _hash(f"setting {key}\0{getattr(directory, key)!r}")
    if directory.exclude is not None:
        prefix = f"{directory.name}#{index}/"
        total += sum(_hash(f"excluded {key}") for key in read_exclusions(directory.exclude) if key.startswith(prefix))
    if directory.where:
        total += _hash(f"setting where\0{directory.where}")
    media = media_of(directory)
    total += _hash(f"media {media.name}") if media is not IMAGES else 0
    is_relevant = partial(_is_relevant, media.suffixes | media.unread | _OTHER_SUFFIXES)
    total += _hash_path("path", directory.path, partial(visible, excluded=excluded), is_relevant)
    if directory.rejected:
        total += _hash(f"setting rejected\0{directory.rejected!r}")
    for key in ("mask_path", "default_mask_file", "rejected"):
        path: DataLocation | None = getattr(directory, key)
        total += 0 if path is None else _hash_path(key, path, _all_entries, is_image_name)
    for number, folder in enumerate(directory.references):
        total += _hash(f"setting reference {number}\0{folder!r}")
        total += _hash_path(f"reference {number}", folder, _all_entries, is_image_name)
    return f"{total % _MODULUS:032x}"


def _all_entries(path: str) -> Iterator[FolderEntry]:
    with folder_entries(path) as entries:
        yield from entries


def _hash_path(name: str, path: DataLocation, entries: _Entries, is_relevant: Callable[[str], bool]) -> int:
    if not access.is_folder(path):
        return _hash_file(name, path.stat) if isinstance(path, Path) else _hash_remote(name, path)
    visit = partial(_hash_folder, entries, is_relevant)
    return sum(depth_first(_HashedFolder(name, str(path), frozenset()), _HashedFolder, visit))


def _hash_folder(
    entries: _Entries, is_relevant: Callable[[str], bool], folder: _HashedFolder
) -> Iterator[int | _HashedFolder]:
    """Yield the hashes of a folder's files, and its folders. Link loops and unreadable folders are hashed too."""
    try:
        identity = folder_identity(folder.path)
        if identity in folder.above:
            yield _hash(f"{folder.name}\0loop")
            return
        above = folder.above | {identity}
        for entry in entries(folder.path):
            name = f"{folder.name}/{entry.name}"
            if is_folder(entry):
                yield _HashedFolder(name, entry.path, above)
            elif is_relevant(entry.name):
                if isinstance(entry, RemoteEntry):
                    yield _hash_remote(name, entry.path, entry.version)
                else:
                    yield _hash_file(name, entry.stat)
    except OSError as error:
        yield _hash(f"{folder.name}\0unreadable {error.errno}")


def _hash_file(name: str, stat: Callable[[], os.stat_result]) -> int:
    try:
        status = stat()
    except OSError as error:
        return _hash(f"{name}\0unreadable {error.errno}")
    return _hash(f"{name}\0{status.st_size}\0{status.st_mtime_ns}")


def _hash_remote(name: str, url: str, version: str = "") -> int:
    try:
        return _hash(f"{name}\0{version or remote_entry(url).version}")
    except OSError as error:
        return _hash(f"{name}\0unreadable {error.errno}")


def _is_relevant(suffixes: frozenset[str], name: str) -> bool:
    suffix = os.path.splitext(name)[1].lower()
    return suffix in suffixes or name in TABLE_FILES or is_other_table(name)


def _hash(text: str) -> int:
    # names contain no zero byte, so different files have different texts
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest(), "little")
