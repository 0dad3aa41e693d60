"""Folder listings: which entries a scan sees, and the depth-first walk."""

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from sd3_light.config import DirectoryConfig
from sd3_light.config.base import is_url
from sd3_light.remote_file import RemoteEntry
from sd3_light.sources.access import FolderEntry, folder_entries

_Item = TypeVar("_Item")
_Subfolder = TypeVar("_Subfolder")

# fmt: off
IMAGE_SUFFIXES = frozenset((
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif",
    ".jp2", ".j2k", ".jpx", ".ppm", ".pgm", ".pnm",
))
"""Suffixes of image files; the format is detected from the bytes."""

UNREAD_SUFFIXES = frozenset((
    ".heic", ".heif", ".jxl", ".svg", ".svgz", ".psd", ".ico", ".tga", ".eps", ".exr", ".hdr", ".dng", ".cr2", ".nef",
    ".arw", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".zip", ".7z",
))
"""Image and archive formats that users may expect to work: they are rejected by name instead of ignored."""
# fmt: on


@dataclass(frozen=True)
class Media:
    """A kind of sample: its suffixes, those to reject by name, and column names that only it has."""

    name: str
    suffixes: frozenset[str]
    unread: frozenset[str]
    columns: tuple[str, ...] = ()


IMAGES = Media("image", IMAGE_SUFFIXES, UNREAD_SUFFIXES)
VIDEOS = Media(
    "video",
    frozenset((".mp4", ".m4v", ".mov", ".webm", ".mkv", ".gif")),
    frozenset((".avi", ".wmv", ".flv", ".mpg", ".mpeg", ".ts", ".m2ts", ".ogv", ".3gp", ".tgz", ".gz", ".zip", ".7z")),
    ("video", "video_path", "video_file", "video_name", "mp4", "webm", "gif"),
)

IMAGES_AND_VIDEOS = Media(
    "image or video",
    IMAGES.suffixes | VIDEOS.suffixes,
    IMAGES.unread | VIDEOS.unread,
    VIDEOS.columns,
)


def media_of(directory: DirectoryConfig) -> Media:
    """Return what a directory's samples are."""
    return IMAGES if directory.frames is None else IMAGES_AND_VIDEOS


TABLE_FILES = ("captions.json", "metadata.jsonl", "metadata.csv", "metadata.json")
"""Names of caption tables; the earlier one wins if two have captions for the same file."""

CAPTION_SUFFIXES = (".txt", ".caption")
"""Suffixes of an image's own caption file in order of precedence, in any case."""

_WRITTEN_HERE = frozenset(("rejects.jsonl", "duplicates.jsonl", "log.jsonl"))  # by caches and runs, which may be inside
_KOHYA_TABLE = re.compile(r"meta_.*\.json")


def is_other_table(name: str) -> bool:
    """Return whether a file of this name may be a caption table although it has none of the `TABLE_FILES` names."""
    lowered = name.lower()
    if name in TABLE_FILES or lowered in _WRITTEN_HERE:
        return False
    return lowered.endswith((".csv", ".jsonl", ".parquet")) or is_kohya_table(name) or lowered in TABLE_FILES


def is_kohya_table(name: str) -> bool:
    """Return whether sd-scripts writes captions to files of this name: `meta_cap.json`, `meta_lat.json`, ..."""
    return _KOHYA_TABLE.fullmatch(name.lower()) is not None


def is_image_name(name: str) -> bool:
    """Return whether a file name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def mask_paths(directory: DirectoryConfig) -> frozenset[str]:
    """Return the paths of masks, rejected images and references: they are no samples, even below the directory."""
    paths = (directory.mask_path, directory.default_mask_file, directory.rejected, *directory.references)
    return frozenset(str(path) for path in paths if path)


def visible(path: str, excluded: frozenset[str]) -> Iterator[FolderEntry]:
    """Yield the entries of a folder in any order, without hidden and excluded ones. Raises OSError."""
    with folder_entries(path) as entries:
        for entry in entries:
            if not (entry.name.startswith(".") or entry.path in excluded or entry.name == "__MACOSX"):
                yield entry


FolderIdentity = tuple[int, int] | str
"""Device and inode of a folder on disk, the URL of one at a URL: links cannot loop there."""


def folder_identity(path: str) -> FolderIdentity:
    """Return what distinguishes a folder from all others. Raises OSError."""
    if is_url(path):
        return path
    status = os.stat(path)
    return status.st_dev, status.st_ino


def listed_version(entry: FolderEntry) -> str:
    """Return the version of a file as far as its listing has it: at a URL, where asking for each takes a request."""
    return entry.version if isinstance(entry, RemoteEntry) else ""


def is_folder(entry: FolderEntry) -> bool:
    """Return whether the entry is a folder or a link to one; a broken link is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


class FolderNames:
    """The names in a folder, sorted by code points, each with a note."""

    def __init__(self, notes: Mapping[str, str]) -> None:
        self._notes = notes
        self._sorted = sorted(notes)

    def __contains__(self, name: str) -> bool:
        return name in self._notes

    def __iter__(self) -> Iterator[str]:
        return iter(self._sorted)

    def note(self, name: str) -> str:
        """Return the note of a name, "" if there is none."""
        return self._notes.get(name, "")

    def with_stem(self, stem: str) -> Iterator[str]:
        """Yield the names that are ``stem`` plus one suffix, or ``stem`` alone."""
        if stem in self and not os.path.splitext(stem)[1]:
            yield stem
        # "/", which no name contains, is the character after "."
        start = bisect_left(self._sorted, f"{stem}.")
        end = bisect_left(self._sorted, f"{stem}/", start)
        for name in self._sorted[start:end]:
            if os.path.splitext(name)[0] == stem:
                yield name


def depth_first(
    root: _Subfolder, kind: type[_Subfolder], visit: Callable[[_Subfolder], Iterator[_Item | _Subfolder]]
) -> Iterator[_Item]:
    """Yield the items of ``visit(root)``; each folder (an instance of ``kind``) among them is visited in its place."""
    # not recursive: folders may be nested deeper than Python's stack allows
    visits = [visit(root)]
    while visits:
        for item in visits[-1]:
            if isinstance(item, kind):
                visits.append(visit(item))
                break
            yield cast(_Item, item)
        else:
            visits.pop()
