"""What a scan depends on, as one hash: if it stands, a scan would yield what it yielded before.

Files are added up in whatever order the disk lists them, so nothing is sorted and no name is held.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from sd3_light.config import DirectoryConfig
from sd3_light.data.sources.listing import (
    IMAGE_SUFFIXES,
    TABLE_FILES,
    UNREAD_SUFFIXES,
    depth_first,
    is_folder,
    is_image_name,
    mask_paths,
    visible,
)

SCAN_VERSION = 1
"""Raise it whenever the same files would be scanned to other records or rejects."""

_SETTINGS = (
    "caption_prefix",
    "shuffle_tags",
    "cache_shuffle_num",
    "cache_shuffle_delimiter",
    "subsample_ratio",
    "skip_empty_caption",
    "image_column",
    "caption_column",
    "mask_path",
    "default_mask_file",
)
_SEEN_SUFFIXES = IMAGE_SUFFIXES | UNREAD_SUFFIXES | {".txt", ".tar", ".parquet"}
_MODULUS = 1 << 128


class _Rules(NamedTuple):
    """Which entries of a folder are met, and which files among them count."""

    entries: Callable[[str], Iterator["os.DirEntry[str]"]]
    counts: Callable[[str], bool]


class _Folder(NamedTuple):
    name: str
    path: str
    above: frozenset[tuple[int, int]]


def signature(directory: DirectoryConfig, index: int) -> str:
    """A hash of every file that ``scan(directory, index)`` looks at (name, size, time) and of the settings it obeys.

    The place of the directory is not part of it, its name is: a set that was moved whole is the same set. Files of
    kinds that a scan passes over do not count.
    """
    apart = mask_paths(directory)
    total = _hash(f"version {SCAN_VERSION}\0{directory.path.name}\0{index}")
    for key in _SETTINGS:
        total += _hash(f"setting {key}\0{getattr(directory, key)!r}")
    total += _place("path", directory.path, _Rules(lambda path: visible(path, apart), _is_seen))
    masks = _Rules(_everything, is_image_name)
    for key in ("mask_path", "default_mask_file"):
        place: Path | None = getattr(directory, key)
        total += 0 if place is None else _place(key, place, masks)
    return f"{total % _MODULUS:032x}"


def _place(name: str, path: Path, rules: _Rules) -> int:
    if path.is_dir():
        return sum(depth_first(_Folder(name, str(path), frozenset()), _Folder, partial(_files, rules)))
    return _file(name, path.stat)


def _files(rules: _Rules, folder: _Folder) -> Iterator[int | _Folder]:
    """The hashes of a folder's files, and its folders. A loop or a closed folder is a fact like any other."""
    try:
        here = os.stat(folder.path)
        if (here.st_dev, here.st_ino) in folder.above:
            yield _hash(f"{folder.name}\0loop")
            return
        above = folder.above | {(here.st_dev, here.st_ino)}
        for entry in rules.entries(folder.path):
            name = f"{folder.name}/{entry.name}"
            if is_folder(entry):
                yield _Folder(name, entry.path, above)
            elif rules.counts(entry.name):
                yield _file(name, entry.stat) + _beside(name, entry.path)
    except OSError as fault:
        yield _hash(f"{folder.name}\0unreadable {fault.errno}")


def _file(name: str, stat: Callable[[], os.stat_result]) -> int:
    try:
        found = stat()
    except OSError as fault:
        return _hash(f"{name}\0unreadable {fault.errno}")
    return _hash(f"{name}\0{found.st_size}\0{found.st_mtime_ns}")


def _beside(name: str, path: str) -> int:
    """Whether a Parquet file must hold pictures hangs on a folder of its name beside it."""
    stem, suffix = os.path.splitext(path)
    return _hash(f"{name}\0beside") if suffix.lower() == ".parquet" and os.path.isdir(stem) else 0


def _is_seen(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in _SEEN_SUFFIXES or name in TABLE_FILES


def _everything(path: str) -> Iterator["os.DirEntry[str]"]:
    with os.scandir(path) as entries:
        yield from entries


def _hash(text: str) -> int:
    # no name holds a zero byte, so no two different files make the same text
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest(), "little")
