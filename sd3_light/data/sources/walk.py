"""Folders of pictures, captioned by tables or by ``NAME.txt`` beside ``NAME.jpg``; tars and Parquet on the way.

One folder's listing at a time is held, as sorted names.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sd3_light.data.preprocess import Reject
from sd3_light.data.sources.captions import MAX_CAPTION_BYTES, decode_text
from sd3_light.data.sources.parquet import scan_parquet
from sd3_light.data.sources.records import FileBytes, Found
from sd3_light.data.sources.scope import IMAGE_SUFFIXES, Scope
from sd3_light.data.sources.tables import TABLE_FILES, CaptionTable, open_table
from sd3_light.data.sources.tars import scan_tar

# fmt: off
_UNREAD_SUFFIXES = frozenset((
    ".heic", ".heif", ".jxl", ".svg", ".svgz", ".psd", ".ico", ".tga", ".eps", ".exr", ".hdr", ".dng", ".cr2", ".nef",
    ".arw", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".zip", ".7z",
))
# fmt: on
"""Pictures and archives that someone may expect to be used: they are named, not passed over in silence."""


@dataclass(frozen=True)
class _Folder:
    """A folder on the walk: its path, its name below the root ("" or ending in "/"), and the tables above it."""

    path: str
    name: str
    tables: tuple[tuple[str, CaptionTable], ...] = ()
    above: frozenset[tuple[int, int]] = frozenset()


def scan_folder(scope: Scope, root: Path) -> Iterator[Found]:
    """All samples below ``root``: in each folder its files by name, then its folders by name."""
    yield from _scan(scope, _Folder(str(root), ""))


def _scan(scope: Scope, folder: _Folder) -> Iterator[Found]:
    try:
        here = os.stat(folder.path)
        files, folders = _listing(folder.path, scope)
    except OSError as fault:
        yield scope.broken(folder.name.rstrip("/"), "unreadable", str(fault))
        return
    if (here.st_dev, here.st_ino) in folder.above:
        yield scope.broken(folder.name.rstrip("/"), "folder_loop", folder.path)
        return
    tables: list[tuple[str, CaptionTable]] = []
    for table in (name for name in TABLE_FILES if name in files):
        try:
            tables.append((folder.name, open_table(Path(folder.path, table))))
        except Reject as reject:
            yield scope.broken(folder.name + table, reject.reason, reject.detail)
    # the nearest table is asked first
    inner = _Folder(folder.path, folder.name, (*tables, *folder.tables), folder.above | {(here.st_dev, here.st_ino)})
    yield from _scan_files(scope, inner, files)
    for name in folders:
        yield from _scan(scope, _Folder(f"{folder.path}/{name}", f"{folder.name}{name}/", inner.tables, inner.above))
    for base, table_here in tables:
        yield from _leftovers(scope, folder.path, base, table_here)


def _listing(path: str, scope: Scope) -> tuple[dict[str, None], list[str]]:
    """Names of the files (sorted, quick to look up) and of the folders; neither hidden ones nor masks."""
    directory = scope.directory
    apart = {str(place) for place in (directory.mask_path, directory.default_mask_file) if place}
    files: list[str] = []
    folders: list[str] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.path in apart or entry.name == "__MACOSX":
                continue
            (folders if entry.is_dir() else files).append(entry.name)
    return dict.fromkeys(sorted(files)), sorted(folders)


def _scan_files(scope: Scope, folder: _Folder, files: dict[str, None]) -> Iterator[Found]:
    stems = {stem for stem, suffix in map(os.path.splitext, files) if suffix.lower() != ".txt"}
    for file in files:
        stem, suffix = os.path.splitext(file)
        path, name = f"{folder.path}/{file}", folder.name + file
        match suffix.lower():
            case known if known in IMAGE_SUFFIXES:
                yield from scope.found(name, FileBytes(path), _captions(folder, file, files))
            case ".tar":
                yield from scan_tar(scope, path, name)
            case ".parquet":
                # img2dataset leaves a table of what it did beside each tar or folder of the same name
                beside = f"{stem}.tar" in files or os.path.isdir(f"{folder.path}/{stem}")
                yield from scan_parquet(scope, path, name, may_lack_images=beside)
            case unread if unread in _UNREAD_SUFFIXES:
                yield from scope.rejected(name, "unsupported_format", suffix)
            case ".txt" if stem not in stems:
                yield from scope.rejected(name, "missing_file", "a caption without a picture of its name")


def _captions(folder: _Folder, file: str, files: dict[str, None]) -> Callable[[], Sequence[str]]:
    """What fetches the captions of one picture: from the nearest table that names it, else from its text file."""
    name = folder.name + file
    # every table is asked, so that each knows which of its entries were met
    fetches = [fetch for base, table in folder.tables if (fetch := table.claim(name.removeprefix(base))) is not None]
    if fetches:
        return fetches[0]
    text = f"{os.path.splitext(file)[0]}.txt"
    if text in files:
        return lambda: (_read_text(f"{folder.path}/{text}"),)
    return _no_caption


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return decode_text(file.read(MAX_CAPTION_BYTES + 1))
    except OSError as fault:
        raise Reject("unreadable", str(fault)) from fault


def _no_caption() -> Sequence[str]:
    raise Reject("no_caption", "no text file of its name, and no table names it")


def _leftovers(scope: Scope, path: str, base: str, table: CaptionTable) -> Iterator[Found]:
    try:
        for name, reason, detail in table.leftovers():
            # a table may name what is there but is no picture
            if reason == "missing_file" and _is_file(f"{path}/{name}"):
                reason, detail = "unsupported_format", "a caption table names it"
            yield from scope.rejected(base + name, reason, detail)
    except Reject as reject:
        yield scope.broken(base, reject.reason, reject.detail)


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False
