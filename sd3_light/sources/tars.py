"""WebDataset tars as img2dataset writes them: ``KEY.jpg``, ``KEY.txt``, ``KEY.json``, members of a sample adjacent.

A scan reads only headers and captions; a record keeps the offset of its image, so later reads have random access.
"""

import posixpath
import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from io import SEEK_END
from types import SimpleNamespace
from typing import Any, BinaryIO

from sd3_light.inputs import parse_json
from sd3_light.sources.access import open_container
from sd3_light.sources.captions import MAX_CAPTION_BYTES, Columns, decode_text, texts
from sd3_light.sources.listing import IMAGE_SUFFIXES
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import FileRange, ScanItem
from sd3_light.sources.scan_context import ScanContext

_Group = dict[str, FileRange]
_ERRORS = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError)
_MAX_HEADER = 1 << 24


def scan_tar(context: ScanContext, path: str, name: str) -> Iterator[ScanItem]:
    """Yield the samples of a tar in order."""
    seen = set[str]()
    groups = _groups(path)
    while True:
        try:
            base, members = next(groups)
        except StopIteration:
            break
        except _ERRORS as error:
            yield context.reject_container(name, "broken_tar", f"{type(error).__name__}: {error}")
            break
        yield from _sample(context, name, base, members, seen)


def _sample(context: ScanContext, tar: str, base: str, members: _Group, seen: set[str]) -> Iterator[ScanItem]:
    # a still next to a video of the same name is its preview
    known = sorted((suffix for suffix in members if suffix in context.media.suffixes), key=IMAGE_SUFFIXES.__contains__)
    image = next(iter(known), None)
    if image is None:
        detail = f"no {context.media.name} among {', '.join(members)}; a sample's name ends at its first dot"
        yield from context.reject(f"{tar}/{base}", "missing_file", detail)
        return
    name = f"{tar}/{base}{image}"
    if base in seen:
        yield from context.reject(name, "duplicate_key", image=members[image])
        return
    seen.add(base)
    # masks are in a folder with the name of the tar
    mask_name = f"{posixpath.splitext(tar)[0]}/{base}{image}"
    captions = partial(_captions, members, context.columns)
    columns = partial(_columns, members, context)
    yield from context.sample(name, members[image], captions, mask_name, columns)


def _captions(members: _Group, columns: Columns) -> Sequence[str]:
    # a configured column is a key of the .json; the .txt may contain another key's value
    prefers_json = bool(columns.captions) and ".json" in members
    if ".txt" in members and not prefers_json:
        return (decode_text(_small(members[".txt"])),)
    if ".json" in members:
        return texts(columns.caption_value(_json_row(_small(members[".json"]))), columns.caption)
    raise Reject("no_caption", "no .txt or .json next to it in the tar")


def _columns(members: _Group, context: ScanContext) -> dict[str, Any]:
    """Return the values in the .json that ``where`` uses."""
    if not context.selection or not context.selection.kinds or ".json" not in members:
        return {}
    try:
        return context.selection.take(_json_row(_small(members[".json"])))
    except Reject as reject:
        raise Reject("bad_column" if reject.reason != "unreadable" else reject.reason, reject.detail) from reject


def _small(member: FileRange) -> bytes:
    return FileRange(member.path, member.offset, min(member.size, MAX_CAPTION_BYTES + 1)).read()


def _json_row(data: bytes) -> dict[str, Any]:
    try:
        row = parse_json(decode_text(data))
    except ValueError as error:
        raise Reject("bad_caption", f"its .json: {error}") from error
    if not isinstance(row, dict):
        raise Reject("bad_caption", "its .json is not an object")
    return row


def _groups(path: str) -> Iterator[tuple[str, _Group]]:
    """Yield groups of neighbouring members with the same name up to the first dot, by lower-case suffix."""
    base = ""
    members = _Group()
    error: Exception | None = None
    try:
        for name, member in _members(path):
            folder, file = posixpath.split(name)
            stem, dot, rest = file.partition(".")
            if not stem:
                continue
            suffix = (dot + rest).lower()
            # a repeated member starts another sample of the same name
            if posixpath.join(folder, stem) != base or suffix in members:
                if members:
                    yield base, members
                base = posixpath.join(folder, stem)
                members = _Group()
            members[suffix] = member
    except _ERRORS as caught:
        error = caught
    # the members before the damage are complete
    if members:
        yield base, members
    if error is not None:
        raise error


def _bounded(file: BinaryIO) -> Any:
    """Return the file for `tarfile`, which reads only headers: one that declares a huge size is cut short."""
    return SimpleNamespace(tell=file.tell, seek=file.seek, read=lambda size: file.read(min(size, _MAX_HEADER)))


def _members(path: str) -> Iterator[tuple[str, FileRange]]:
    with open_container(path) as file, tarfile.open(fileobj=_bounded(file), mode="r:") as tar:
        while (info := tar.next()) is not None:
            # tarfile keeps every member it has seen; a long tar would fill the memory
            tar.members = []  # type: ignore[attr-defined]
            if info.isreg() and not info.issparse():
                yield posixpath.normpath(info.name), FileRange(path, info.offset_data, info.size)
        # tarfile mistakes garbage between members for the end of the tar, which has only zeros or nothing
        file.seek(tar.offset)
        if any(file.read(tarfile.BLOCKSIZE)):
            size = file.seek(0, SEEK_END)
            raise tarfile.ReadError(f"damaged at byte {tar.offset} of {size}")
