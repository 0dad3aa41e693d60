"""Locations as short texts, for catalogues, shards and lists of rejects.

A path below the dataset's root is written relative to it, so that the texts stay valid when the dataset is moved.
"""

import json
import os

from sd3_light.config.base import DataLocation, is_url
from sd3_light.sources.captions import is_utf8
from sd3_light.sources.parquet import ParquetCell
from sd3_light.sources.records import FileBytes, FileRange, Location


def location_text(location: Location | None, root: DataLocation) -> str:
    """Return a location as compact JSON, ``""`` for None. `location_from_text` with the same root is the inverse."""
    match location:
        case None:
            return ""
        case FileRange(_, offset, size):
            rest: list[str | int] = [offset, size]
        case ParquetCell(_, column, group, row, limit):
            rest = [column, group, row, *([limit] if limit else [])]
        case _:
            rest = []
    fields = [_shorten(location.path, root), *rest]
    # names that are not UTF-8 contain surrogates, which need escapes
    is_plain = all(is_utf8(field) for field in fields if isinstance(field, str))
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=not is_plain)


def location_from_text(text: str, root: DataLocation) -> Location | None:
    """Parse a text written by `location_text`; None for ``""``."""
    if not text:
        return None
    match json.loads(text):
        case [str(path)]:
            return FileBytes(_lengthen(path, root))
        case [str(path), int(offset), int(size)]:
            return FileRange(_lengthen(path, root), offset, size)
        case [str(path), str(column), int(group), int(row), *limit]:
            return ParquetCell(_lengthen(path, root), column, group, row, *map(int, limit))
    raise ValueError(f"{text:.200} is not a location")


def _shorten(path: str, root: DataLocation) -> str:
    """Return the path relative to the root, "" for the root itself, an absolute path outside of it."""
    if path == str(root):
        return ""
    rest = path.removeprefix(os.path.join(root, ""))
    # the rest of a path that contains "//" would look like an absolute path
    if rest != path and rest and not rest.startswith("/"):
        return rest
    return path if os.path.isabs(path) or is_url(path) else os.path.abspath(path)


def _lengthen(path: str, root: DataLocation) -> str:
    return path if is_url(path) else os.path.join(root, path) if path else str(root)
