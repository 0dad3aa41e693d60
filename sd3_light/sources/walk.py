"""Folders of images, captioned by tables or by ``NAME.txt`` or ``NAME.caption`` next to ``NAME.jpg``; also tars and
Parquet files.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import islice

from sd3_light.config.base import DataLocation, is_url
from sd3_light.inputs import open_regular
from sd3_light.sources.access import suffix_of
from sd3_light.sources.captions import MAX_CAPTION_BYTES, decode_text
from sd3_light.sources.listing import (
    CAPTION_SUFFIXES,
    TABLE_FILES,
    FolderIdentity,
    FolderNames,
    depth_first,
    folder_identity,
    is_folder,
    listed_version,
    visible,
)
from sd3_light.sources.other_tables import OtherTable, choose_table
from sd3_light.sources.parquet import scan_parquet
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import FileBytes, ScanItem
from sd3_light.sources.scan_context import ScanContext
from sd3_light.sources.tables import CaptionTable, ClaimedRows, merged
from sd3_light.sources.tars import scan_tar

_PIECE = 4096
_NO_CAPTION = "no .txt or .caption file of the same name, and no table lists it"
_UNNEEDED = "as a table of captions it has none for an image here that lacks one"


@dataclass(frozen=True)
class _WalkedFolder:
    """A folder of the walk: its path, its name below the root ("" or ending in "/") and the tables of its parents.

    ``others`` are those of other file names, the nearest first.
    """

    path: str
    name: str
    tables: tuple[tuple[str, CaptionTable], ...] = ()
    others: tuple[OtherTable, ...] = ()
    above: frozenset[FolderIdentity] = frozenset()


def scan_folder(context: ScanContext, root: DataLocation) -> Iterator[ScanItem]:
    """Yield all samples below ``root``: in each folder its files by name, then its folders by name."""
    return depth_first(_WalkedFolder(str(root), ""), _WalkedFolder, partial(_scan, context))


def _scan(context: ScanContext, folder: _WalkedFolder) -> Iterator[ScanItem | _WalkedFolder]:
    notes: dict[str, str] = {}
    folders: set[str] = set()  # a web page may list a name twice
    try:
        identity = folder_identity(folder.path)
        if identity in folder.above:
            yield context.reject_container(folder.name.rstrip("/"), "folder_loop", folder.path)
            return
        for entry in visible(folder.path, context.excluded):
            if is_folder(entry):
                folders.add(entry.name)
            else:
                notes[entry.name] = listed_version(entry)
    except OSError as error:
        yield context.reject_container(folder.name.rstrip("/"), "unreadable", str(error))
        return
    with ExitStack() as stack:
        tables: list[tuple[str, CaptionTable]] = []
        for file in (name for name in TABLE_FILES if name in notes):
            try:
                table = CaptionTable(f"{folder.path}/{file}", context.columns, context.selection)
                tables.append((folder.name, stack.enter_context(closing(table))))
            except Reject as reject:
                yield context.reject_container(folder.name + file, reject.reason, reject.detail)
        other = stack.enter_context(closing(choose_table(context, folder.path, folder.name, notes)))
        # the nearest table comes first
        all_tables = (*tables, *folder.tables)
        others = (other, *folder.others)
        above = folder.above | {identity}
        yield from _scan_files(context, _WalkedFolder(folder.path, folder.name, all_tables, others), FolderNames(notes))
        notes.clear()  # its folders need the memory
        for name in sorted(folders):
            yield _WalkedFolder(f"{folder.path}/{name}", f"{folder.name}{name}/", all_tables, others, above)
        if other.needed is not None:
            tables.append((folder.name, other.needed))
        elif suffix_of(other.file) == ".parquet":
            yield context.reject_container(folder.name + other.file, "no_image_column", _UNNEEDED)
        for base, caption_table in tables:
            yield from _leftovers(context, folder.path, base, caption_table)


def _scan_files(context: ScanContext, folder: _WalkedFolder, files: FolderNames) -> Iterator[ScanItem]:
    # the stem of the last file that is not a caption
    last_stem = ""
    is_remote = is_url(folder.path)
    for file in files:
        stem, suffix = os.path.splitext(file)
        path = f"{folder.path}/{file}"
        name = folder.name + file
        match suffix.lower():
            case known if known in context.media.suffixes:
                claimed = _claim(folder, file, files)
                image = FileBytes(path, files.note(file) if is_remote else "")
                yield from context.sample(name, image, claimed.captions, raw_columns=claimed.columns)
            case ".tar" | ".parquet" if not is_remote and not os.path.isfile(path):
                yield from context.reject(name, "unreadable", "not a regular file")
            case ".tar":
                yield from scan_tar(context, path, name)
            case ".parquet" if file != folder.others[0].file:
                yield from scan_parquet(context, path, name)
            case unread if unread in context.media.unread:
                yield from context.reject(name, "unsupported_format", suffix)
            case caption if caption in CAPTION_SUFFIXES and stem != last_stem and not _has_image(files, stem):
                yield from context.reject(name, "missing_file", f"a caption without {context.media.name}")
        if suffix.lower() not in CAPTION_SUFFIXES:
            last_stem = stem


def _has_image(files: FolderNames, stem: str) -> bool:
    """Return whether a file other than a caption has this stem."""
    return any(suffix_of(name) not in CAPTION_SUFFIXES for name in files.with_stem(stem))


def _claim(folder: _WalkedFolder, file: str, files: FolderNames) -> ClaimedRows:
    """Return an image's captions and its columns from all tables.

    Captions are from the nearest table of a fixed name, else from the image's own file, else from the nearest table of
    another name.
    """
    name = folder.name + file
    # all tables are searched, so that each marks its rows as used
    claims = [rows for base, table in folder.tables if (rows := table.claim(name.removeprefix(base))) is not None]
    others = [rows for other in folder.others if (rows := other.claim(name)) is not None]
    captions = claims[0].captions if claims else partial(_own_captions, folder, file, files, others)
    return ClaimedRows(captions, lambda: merged(rows.columns() for rows in (*claims, *others)))


def _own_captions(folder: _WalkedFolder, file: str, files: FolderNames, others: Sequence[ClaimedRows]) -> Sequence[str]:
    is_remote = is_url(folder.path)
    for name in caption_files(folder.path, os.path.splitext(file)[0], files):
        path = f"{folder.path}/{name}"
        text = _read_remote_text(FileBytes(path, files.note(name))) if is_remote else read_caption(path)
        if text is not None:
            return (text,)
    if others:
        return others[0].captions()
    raise Reject("no_caption", "; ".join((_NO_CAPTION, *(note for other in folder.others for note in other.why_not()))))


def caption_files(folder: str, stem: str, files: FolderNames) -> Iterator[str]:
    """Yield the names of an image's caption files in order of precedence, which may include one that is missing."""
    first = stem + CAPTION_SUFFIXES[0]
    if not is_url(folder) or first in files:  # also one that appeared meanwhile
        yield first
    names = [name for name in files.with_stem(stem) if suffix_of(name) in CAPTION_SUFFIXES and name != first]
    yield from sorted(names, key=_precedence)


def _precedence(name: str) -> tuple[int, bool, str]:
    suffix = suffix_of(name)
    return CAPTION_SUFFIXES.index(suffix), not name.endswith(suffix), name


def read_caption(path: str) -> str | None:
    """Return the content of a caption file, None if it does not exist."""
    try:
        # in small pieces: allocating a buffer for the longest caption would cost more than reading
        with open_regular(path) as file:
            pieces = iter(partial(file.read, _PIECE), b"")
            return decode_text(b"".join(islice(pieces, MAX_CAPTION_BYTES // _PIECE + 1)))
    except OSError as error:
        if not os.path.lexists(path):
            return None
        raise Reject("unreadable", str(error)) from error


def _read_remote_text(caption: FileBytes) -> str:
    if (size := caption.num_bytes()) > MAX_CAPTION_BYTES:
        raise Reject("caption_too_long", f"{size} bytes or more")
    return decode_text(caption.read())


def _leftovers(context: ScanContext, path: str, base: str, table: CaptionTable) -> Iterator[ScanItem]:
    try:
        for name, reason, detail in table.leftovers():
            # a table may list existing files that are not images
            if reason == "missing_file" and not is_url(path) and os.path.isfile(f"{path}/{name}"):
                reason = "unsupported_format"
                detail = "listed in a caption table"
            yield from context.reject(base + name, reason, detail)
    except Reject as reject:
        yield context.reject_container(base, reject.reason, reject.detail)
