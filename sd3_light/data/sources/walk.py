"""Folders of pictures, captioned by tables or by ``NAME.txt`` beside ``NAME.jpg``; tars and Parquet on the way.

The names of the folders that are being walked lie on a shelf, not in memory.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from sd3_light.data.preprocess import Reject
from sd3_light.data.sources.captions import MAX_CAPTION_BYTES, decode_text
from sd3_light.data.sources.listing import (
    IMAGE_SUFFIXES,
    TABLE_FILES,
    UNREAD_SUFFIXES,
    depth_first,
    is_folder,
    visible,
)
from sd3_light.data.sources.name_store import NameSet
from sd3_light.data.sources.parquet import scan_parquet
from sd3_light.data.sources.records import FileBytes, ScanItem
from sd3_light.data.sources.scope import Scope
from sd3_light.data.sources.tables import CaptionTable
from sd3_light.data.sources.tars import scan_tar

_PIECE = 4096


@dataclass(frozen=True)
class _Folder:
    """A folder on the walk: its path, its name below the root ("" or ending in "/"), and the tables above it."""

    path: str
    name: str
    tables: tuple[tuple[str, CaptionTable], ...] = ()
    above: frozenset[tuple[int, int]] = frozenset()


def scan_folder(scope: Scope, root: Path) -> Iterator[ScanItem]:
    """All samples below ``root``: in each folder its files by name, then its folders by name."""
    return depth_first(_Folder(str(root), ""), _Folder, partial(_scan, scope))


def _scan(scope: Scope, folder: _Folder) -> Iterator[ScanItem | _Folder]:
    files, folders = scope.name_store.names(), scope.name_store.names()
    try:
        here = os.stat(folder.path)
        if (here.st_dev, here.st_ino) in folder.above:
            yield scope.broken(folder.name.rstrip("/"), "folder_loop", folder.path)
            return
        _list(scope, folder.path, files, folders)
    except OSError as fault:
        yield scope.broken(folder.name.rstrip("/"), "unreadable", str(fault))
        return
    with ExitStack() as stack:
        tables: list[tuple[str, CaptionTable]] = []
        for table in (name for name in TABLE_FILES if name in files):
            try:
                opened = CaptionTable(Path(folder.path, table), scope.columns)
                tables.append((folder.name, stack.enter_context(closing(opened))))
            except Reject as reject:
                yield scope.broken(folder.name + table, reject.reason, reject.detail)
        # the nearest table is asked first
        known, above = (*tables, *folder.tables), folder.above | {(here.st_dev, here.st_ino)}
        yield from _scan_files(scope, _Folder(folder.path, folder.name, known), files)
        files.clear()
        for name in folders:
            yield _Folder(f"{folder.path}/{name}", f"{folder.name}{name}/", known, above)
        folders.clear()
        for base, table_here in tables:
            yield from _leftovers(scope, folder.path, base, table_here)


def _list(scope: Scope, path: str, files: NameSet, folders: NameSet) -> None:
    for entry in visible(path, scope.apart):
        (folders if is_folder(entry) else files).add(entry.name)


def _scan_files(scope: Scope, folder: _Folder, files: NameSet) -> Iterator[ScanItem]:
    last = ""  # the stem of the last file that is no caption
    for file in files:
        stem, suffix = os.path.splitext(file)
        path, name = f"{folder.path}/{file}", folder.name + file
        match suffix.lower():
            case known if known in IMAGE_SUFFIXES:
                yield from scope.found(name, FileBytes(path), _captions(folder, file))
            case ".tar" | ".parquet" if not os.path.isfile(path):
                yield from scope.rejected(name, "unreadable", "no regular file")
            case ".tar":
                yield from scan_tar(scope, path, name)
            case ".parquet":
                # img2dataset leaves a table of what it did beside each tar or folder of the same name
                beside = f"{stem}.tar" in files or os.path.isdir(f"{folder.path}/{stem}")
                yield from scan_parquet(scope, path, name, may_lack_images=beside)
            case unread if unread in UNREAD_SUFFIXES:
                yield from scope.rejected(name, "unsupported_format", suffix)
            case ".txt" if stem != last and not _has_picture(files, stem):
                yield from scope.rejected(name, "missing_file", "a caption without a picture of its name")
        if suffix.lower() != ".txt":
            last = stem


def _has_picture(files: NameSet, stem: str) -> bool:
    """Whether a caption file stands beside any other file of its name."""
    return any(os.path.splitext(name)[1].lower() != ".txt" for name in files.with_stem(stem))


def _captions(folder: _Folder, file: str) -> Callable[[], Sequence[str]]:
    """What fetches the captions of one picture: from the nearest table that names it, else from its text file."""
    name = folder.name + file
    # every table is asked, so that each knows which of its entries were met
    fetches = [fetch for base, table in folder.tables if (fetch := table.claim(name.removeprefix(base))) is not None]
    if fetches:
        return fetches[0]
    return lambda: (_read_text(f"{folder.path}/{os.path.splitext(file)[0]}.txt"),)


def _read_text(path: str) -> str:
    try:
        # in small pieces: a buffer for the longest caption costs more than the reading
        with open(path, "rb", buffering=0) as file:
            pieces = iter(partial(file.read, _PIECE), b"")
            return decode_text(b"".join(islice(pieces, MAX_CAPTION_BYTES // _PIECE + 1)))
    except OSError as fault:
        if not os.path.lexists(path):
            raise Reject("no_caption", "no text file of its name, and no table names it") from fault
        raise Reject("unreadable", str(fault)) from fault


def _leftovers(scope: Scope, path: str, base: str, table: CaptionTable) -> Iterator[ScanItem]:
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
