"""The rows of a caption table's file: a JSON document, JSON lines or CSV, one row in memory at a time."""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sd3_light.data.preprocess import Reject
from sd3_light.data.sources.captions import MAX_CAPTION_BYTES, Columns, named
from sd3_light.data.sources.json_stream import MAX_MEMBER, members

FILE_NAMES = ("file_name", "filename", "file", "image", "path", "image_path", "file_path", "image_file", "image_name")
"""Column names of a picture's file, in order of precedence, compared in lower case."""


class TableRow(NamedTuple):
    """A file, as the table spells its name, and what the table holds for its captions."""

    name: str
    value: Any


class BrokenRow(NamedTuple):
    """A row that cannot be used: the table's name with the row's place in it, and what is wrong."""

    name: str
    detail: str


_Raw = tuple[str, Any]  # a row's place; then a row as a dict, a Row, or a Reject


def read_rows(path: Path, columns: Columns) -> Iterator[TableRow | BrokenRow]:
    """All rows of a table, in its order. Raises Reject("broken_table"), perhaps late, when it is none."""
    read = {".json": _document, ".jsonl": _json_lines, ".csv": _csv_rows}[path.suffix]
    lacking = _Lacking(columns)
    try:
        for place, raw in read(path, columns):
            if isinstance(raw, Mapping):
                lacking.look_at(raw)
            try:
                yield _row(raw, columns)
            except Reject as reject:
                yield BrokenRow(f"{path.name}:{place}", reject.detail)
    except (OSError, ValueError, RecursionError, csv.Error) as fault:
        raise Reject("broken_table", str(fault)) from fault
    lacking.check()


def _row(raw: Any, columns: Columns) -> TableRow:
    if isinstance(raw, Reject):
        raise raw
    name: Any
    if isinstance(raw, TableRow):
        name, value = raw
        value = named(value, columns.caption_names()) if isinstance(value, dict) else value
    elif isinstance(raw, Mapping):
        name, value = named(raw, columns.image_names(FILE_NAMES)), named(raw, columns.caption_names())
    else:
        raise Reject("broken_row", "not an object")
    if not isinstance(name, str) or not name.strip():
        where = f" in {columns.image!r} (image_column)" if columns.image else ""
        raise Reject("broken_row", f"it names no file{where}")
    return TableRow(name, value)


class _Lacking:
    """Notices a configured column that no row of a whole table has."""

    def __init__(self, columns: Columns) -> None:
        self._unmet = {column: key for key, column in _configured(columns)}
        self._rows = 0

    def look_at(self, row: Mapping[str, Any]) -> None:
        self._rows += 1
        for column in [column for column in self._unmet if named(row, (column,)) is not None]:
            del self._unmet[column]

    def check(self) -> None:
        if self._rows and self._unmet:
            lacking = ", ".join(f"{column!r} ({key})" for column, key in self._unmet.items())
            raise Reject("broken_table", f"no row has a value in {lacking}")


def _configured(columns: Columns) -> list[tuple[str, str]]:
    pairs = ("image_column", columns.image), ("caption_column", columns.caption)
    return [(key, column) for key, column in pairs if column]


def _document(path: Path, columns: Columns) -> Iterator[_Raw]:
    """``{file: caption(s)}``, ``{file: row}``, or a list of rows."""
    with path.open(encoding="utf-8-sig") as file:
        for number, (key, value) in enumerate(members(file)):
            yield str(number), value if key is None else TableRow(key, value)


def _json_lines(path: Path, columns: Columns) -> Iterator[_Raw]:
    with path.open("rb") as file:
        lines = _Lines(file)
        place = lines.place
        for line in lines:
            if line.strip():
                yield place, _json_line(line)
            place = lines.place


def _json_line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as fault:
        return Reject("broken_row", str(fault))


def _csv_rows(path: Path, columns: Columns) -> Iterator[_Raw]:
    before = csv.field_size_limit(MAX_CAPTION_BYTES)
    try:
        with path.open("rb") as file:
            lines = _Lines(file)
            header = [column.strip() for column in next(csv.reader(lines), [])]
            _check_header(header, columns)
            place = lines.place
            while (cells := _csv_row(lines)) is not None:
                if cells:
                    yield place, cells if isinstance(cells, Reject) else dict(zip(header, cells, strict=False))
                place = lines.place
    finally:
        csv.field_size_limit(before)


def _csv_row(lines: "_Lines") -> list[str] | Reject | None:
    """The next row's cells, none for a blank line; None at the end."""
    # a reader a row: one that has failed cannot go on
    try:
        return next(csv.reader(lines), None)
    except csv.Error as fault:
        return Reject("broken_row", str(fault))


def _check_header(header: list[str], columns: Columns) -> None:
    lowered = {column.lower() for column in header}
    for key, column in _configured(columns):
        if column.lower() not in lowered:
            raise Reject("broken_table", f"it has no column {column!r} ({key}); it has {', '.join(header)!a:.200}")
    for names in (columns.image_names(FILE_NAMES), columns.caption_names()):
        if lowered.isdisjoint(name.lower() for name in names):
            raise Reject("broken_table", f"none of its columns {header!a:.200} is one of {', '.join(names)}")


class _Lines:
    """The lines of a file as text, keeping count of where the next one starts."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._offset = file, 0

    @property
    def place(self) -> str:
        return f"byte {self._offset}"

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        # a file without line ends must not be read whole; in pieces it is as broken
        line = self._file.readline(MAX_MEMBER)
        if not line:
            raise StopIteration
        first = self._offset == 0
        self._offset += len(line)
        # bytes that are not UTF-8 travel as surrogates, and are refused with the caption or name that holds them
        return line.decode("utf-8-sig" if first else "utf-8", "surrogateescape")
