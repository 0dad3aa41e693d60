"""Folders of images, captioned by tables or by ``NAME.txt`` next to ``NAME.jpg``; also tars and Parquet files.

The names in the folders that are being walked are stored in a `NameStore`, not in memory.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import islice

from sd3_light.config.base import DataLocation, is_url
from sd3_light.data.preprocess import Reject
from sd3_light.data.sources.captions import MAX_CAPTION_BYTES, decode_text
from sd3_light.data.sources.listing import (
    TABLE_FILES,
    FolderIdentity,
    depth_first,
    folder_identity,
    is_folder,
    listed_version,
    visible,
)
from sd3_light.data.sources.name_store import NameSet
from sd3_light.data.sources.parquet import scan_parquet
from sd3_light.data.sources.records import FileBytes, ScanItem
from sd3_light.data.sources.scan_context import ScanContext
from sd3_light.data.sources.tables import CaptionTable, ClaimedRows, merged
from sd3_light.data.sources.tars import scan_tar
from sd3_light.inputs import open_regular

_PIECE = 4096
_NO_CAPTION = "no text file of the same name, and no table lists it"


@dataclass(frozen=True)
class _WalkedFolder:
    """A folder of the walk: its path, its name below the root ("" or ending in "/") and the tables of its parents."""

    path: str
    name: str
    tables: tuple[tuple[str, CaptionTable], ...] = ()
    above: frozenset[FolderIdentity] = frozenset()


def scan_folder(context: ScanContext, root: DataLocation) -> Iterator[ScanItem]:
    """Yield all samples below ``root``: in each folder its files by name, then its folders by name."""
    return depth_first(_WalkedFolder(str(root), ""), _WalkedFolder, partial(_scan, context))


def _scan(context: ScanContext, folder: _WalkedFolder) -> Iterator[ScanItem | _WalkedFolder]:
    files, folders = context.name_store.names(), context.name_store.names()
    try:
        identity = folder_identity(folder.path)
        if identity in folder.above:
            yield context.reject_container(folder.name.rstrip("/"), "folder_loop", folder.path)
            return
        for entry in visible(folder.path, context.excluded):
            (folders if is_folder(entry) else files).add(entry.name, listed_version(entry))
    except OSError as error:
        yield context.reject_container(folder.name.rstrip("/"), "unreadable", str(error))
        return
    with ExitStack() as stack:
        tables: list[tuple[str, CaptionTable]] = []
        for file in (name for name in TABLE_FILES if name in files):
            try:
                table = CaptionTable(f"{folder.path}/{file}", context.columns, context.selection)
                tables.append((folder.name, stack.enter_context(closing(table))))
            except Reject as reject:
                yield context.reject_container(folder.name + file, reject.reason, reject.detail)
        # the nearest table comes first
        all_tables, above = (*tables, *folder.tables), folder.above | {identity}
        yield from _scan_files(context, _WalkedFolder(folder.path, folder.name, all_tables), files, folders)
        files.clear()
        for name in folders:
            yield _WalkedFolder(f"{folder.path}/{name}", f"{folder.name}{name}/", all_tables, above)
        folders.clear()
        for base, caption_table in tables:
            yield from _leftovers(context, folder.path, base, caption_table)


def _scan_files(context: ScanContext, folder: _WalkedFolder, files: NameSet, folders: NameSet) -> Iterator[ScanItem]:
    last_stem, is_remote = "", is_url(folder.path)  # the stem of the last file that is not a caption
    for file in files:
        stem, suffix = os.path.splitext(file)
        path, name = f"{folder.path}/{file}", folder.name + file
        match suffix.lower():
            case known if known in context.media.suffixes:
                claimed = _claim(folder, file, files)
                image = FileBytes(path, files.note(file) if is_remote else "")
                yield from context.sample(name, image, claimed.captions, raw_columns=claimed.columns)
            case ".tar" | ".parquet" if not is_remote and not os.path.isfile(path):
                yield from context.reject(name, "unreadable", "not a regular file")
            case ".tar":
                yield from scan_tar(context, path, name)
            case ".parquet":
                # img2dataset writes a table of its work next to each tar or folder of the same name
                is_log = f"{stem}.tar" in files or stem in folders or os.path.isdir(f"{folder.path}/{stem}")
                yield from scan_parquet(context, path, name, may_lack_images=is_log)
            case unread if unread in context.media.unread:
                yield from context.reject(name, "unsupported_format", suffix)
            case ".txt" if stem != last_stem and not _has_image(files, stem):
                yield from context.reject(name, "missing_file", f"a caption without {context.media.name}")
        if suffix.lower() != ".txt":
            last_stem = stem


def _has_image(files: NameSet, stem: str) -> bool:
    """Return whether a file other than a caption has this stem."""
    return any(os.path.splitext(name)[1].lower() != ".txt" for name in files.with_stem(stem))


def _claim(folder: _WalkedFolder, file: str, files: NameSet) -> ClaimedRows:
    """Return an image's captions from the nearest table, else from its text file, and its columns from all tables."""
    name = folder.name + file
    # all tables are searched, so that each marks its rows as used
    claims = [rows for base, table in folder.tables if (rows := table.claim(name.removeprefix(base))) is not None]
    if claims:
        if len(claims) == 1:
            return claims[0]
        return ClaimedRows(claims[0].captions, lambda: merged(rows.columns() for rows in claims))
    text = f"{os.path.splitext(file)[0]}.txt"
    if is_url(folder.path):
        caption = FileBytes(f"{folder.path}/{text}", files.note(text)) if text in files else None
        return ClaimedRows(lambda: (_read_remote_text(caption),), dict)
    return ClaimedRows(lambda: (_read_text(f"{folder.path}/{text}"),), dict)


def _read_text(path: str) -> str:
    try:
        # in small pieces: allocating a buffer for the longest caption would cost more than reading
        with open_regular(path) as file:
            pieces = iter(partial(file.read, _PIECE), b"")
            return decode_text(b"".join(islice(pieces, MAX_CAPTION_BYTES // _PIECE + 1)))
    except OSError as error:
        if not os.path.lexists(path):
            raise Reject("no_caption", _NO_CAPTION) from error
        raise Reject("unreadable", str(error)) from error


def _read_remote_text(caption: FileBytes | None) -> str:
    if caption is None:
        raise Reject("no_caption", _NO_CAPTION)
    if (size := caption.num_bytes()) > MAX_CAPTION_BYTES:
        raise Reject("caption_too_long", f"{size} bytes or more")
    return decode_text(caption.read())


def _leftovers(context: ScanContext, path: str, base: str, table: CaptionTable) -> Iterator[ScanItem]:
    try:
        for name, reason, detail in table.leftovers():
            # a table may list existing files that are not images
            if reason == "missing_file" and not is_url(path) and os.path.isfile(f"{path}/{name}"):
                reason, detail = "unsupported_format", "listed in a caption table"
            yield from context.reject(base + name, reason, detail)
    except Reject as reject:
        yield context.reject_container(base, reject.reason, reject.detail)
