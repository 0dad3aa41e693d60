"""Which entries of a folder a scan sees, and how it goes down into folders."""

import os
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

from sd3_light.config import DirectoryConfig

_Found = TypeVar("_Found")
_Folder = TypeVar("_Folder")

# fmt: off
IMAGE_SUFFIXES = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif",
    ".jp2", ".j2k", ".jpx", ".ppm", ".pgm", ".pnm",
))
"""Names that are taken for pictures; what they hold is decided by their bytes."""

UNREAD_SUFFIXES = frozenset((
    ".heic", ".heif", ".jxl", ".svg", ".svgz", ".psd", ".ico", ".tga", ".eps", ".exr", ".hdr", ".dng", ".cr2", ".nef",
    ".arw", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".zip", ".7z",
))
"""Pictures and archives that someone may expect to be used: they are named, not passed over in silence."""
# fmt: on

TABLE_FILES = ("captions.json", "metadata.jsonl", "metadata.csv", "metadata.json")
"""What a caption table is called; an earlier one wins where two know the same file."""


def is_image_name(name: str) -> bool:
    """Whether a file's name is a picture's."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def mask_paths(directory: DirectoryConfig) -> frozenset[str]:
    """Paths that hold masks, and no pictures even where they lie below the directory."""
    return frozenset(str(place) for place in (directory.mask_path, directory.default_mask_file) if place)


def visible(path: str, apart: frozenset[str]) -> Iterator["os.DirEntry[str]"]:
    """The entries of a folder, in no order: neither hidden ones nor masks. Raises OSError."""
    with os.scandir(path) as entries:
        for entry in entries:
            if not (entry.name.startswith(".") or entry.path in apart or entry.name == "__MACOSX"):
                yield entry


def is_folder(entry: "os.DirEntry[str]") -> bool:
    """Whether the entry is a folder or a link to one; a link that cannot be followed is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def depth_first(
    root: _Folder, kind: type[_Folder], visit: Callable[[_Folder], Iterator[_Found | _Folder]]
) -> Iterator[_Found]:
    """What ``visit`` yields of a folder and, in place of each folder it yields, what it yields of that one.

    Without recursion: folders may lie deeper than Python's stack reaches.
    """
    visits = [visit(root)]
    while visits:
        for item in visits[-1]:
            if isinstance(item, kind):
                visits.append(visit(item))
                break
            yield cast(_Found, item)
        else:
            visits.pop()
