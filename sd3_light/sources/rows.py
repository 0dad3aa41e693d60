"""Read the rows of a caption table (JSON document, JSON lines, CSV or Parquet), few rows in memory at a time."""

import csv
import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from io import TextIOWrapper
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, TextIO

from sd3_light.inputs import parse_json
from sd3_light.sources.access import open_file, suffix_of
from sd3_light.sources.captions import MAX_CAPTION_BYTES, Columns, named
from sd3_light.sources.listing import is_kohya_table
from sd3_light.sources.parquet import table_rows
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.selection import Selection

FILE_NAMES = (
    "file_name", "filename", "file", "image", "path", "image_path", "file_path", "image_file", "image_name",
    "filepath", "img_path", "image_filename", "img",
)  # fmt: skip
"""Column names of the image file in order of precedence, compared in lower case."""


class TableRow(NamedTuple):
    """A file name as the table spells it, the table's value for its captions, and the columns that `where` uses."""

    name: str
    value: Any
    columns: Mapping[str, Any] = MappingProxyType({})


class BrokenRow(NamedTuple):
    """An unusable row: the table's name with the row's position, and the problem."""

    name: str
    detail: str


_Raw = tuple[str, Any]  # a row's position; then a dict, a TableRow or a Reject
_ERRORS = (OSError, ValueError, RecursionError, csv.Error)


def read_rows(path: str, columns: Columns, selection: Selection | None = None) -> Iterator[TableRow | BrokenRow]:
    """Yield all rows of a table in order. Raises Reject("broken_table"), possibly late, if the file is not a table."""
    num_objects = 0
    missing = {column: key for key, column in _configured(columns)}
    try:
        for position, raw in _raw_rows(path, columns):
            if isinstance(raw, Mapping):
                num_objects += 1
                missing = {column: key for column, key in missing.items() if named(raw, (column,)) is None}
            try:
                row = _row(raw, columns)
                cells = raw.value if isinstance(raw, TableRow) else raw
                if selection is not None and isinstance(cells, dict):
                    row = row._replace(columns=selection.take(cells, is_text=suffix_of(path) == ".csv"))
                yield row
            except Reject as reject:
                yield BrokenRow(f"{path.rpartition('/')[2]}:{position}", reject.detail)
    except _ERRORS as error:
        raise Reject("broken_table", str(error)) from error
    if num_objects and missing:
        names = ", ".join(f"{column!r} ({key})" for column, key in missing.items())
        raise Reject("broken_table", f"no row has a value in {names}")


def require_table(path: str, columns: Columns) -> None:
    """Raise Reject unless the columns (of JSON: the first row) have file names and captions."""
    try:
        with closing(_raw_rows(path, columns)) as rows:
            _, raw = next(rows, ("", None))
    except _ERRORS as error:
        raise Reject("broken_table", str(error)) from error
    if raw is None:
        raise Reject("broken_table", "it has no rows")
    if suffix_of(path) in (".json", ".jsonl") and _row(raw, columns).value is None:
        raise Reject("broken_table", f"its first row has none of the columns {', '.join(columns.caption_names())}")


def _raw_rows(path: str, columns: Columns) -> Generator[_Raw, None, None]:
    read = {".json": _document, ".jsonl": _json_lines, ".csv": _csv_rows, ".parquet": _parquet_rows}[suffix_of(path)]
    yield from read(path, columns)


def _row(raw: Any, columns: Columns) -> TableRow:
    if isinstance(raw, Reject):
        raise raw
    name: Any
    if isinstance(raw, TableRow):
        name, value, _ = raw
        value = columns.caption_value(value) if isinstance(value, dict) else value
    elif isinstance(raw, Mapping):
        name = named(raw, columns.image_names(FILE_NAMES))
        value = columns.caption_value(raw)
    else:
        raise Reject("broken_row", "not an object")
    if not isinstance(name, str) or not name.strip():
        where = f" in {columns.image!r} (image_column)" if columns.image else ""
        raise Reject("broken_row", f"no file name{where}")
    return TableRow(name, value)


def _configured(columns: Columns) -> list[tuple[str, str]]:
    pairs = ("image_column", columns.image), *(("caption_column", name) for name in columns.captions)
    return [(key, column) for key, column in pairs if column]


def _document(path: str, columns: Columns) -> Iterator[_Raw]:
    """Yield the rows of a JSON document: ``{file: caption(s)}``, ``{file: row}``, or a list of rows."""
    with open_file(path) as data, TextIOWrapper(data, encoding="utf-8-sig") as file:
        is_kohya = is_kohya_table(path.rpartition("/")[2])
        for number, (key, value) in enumerate(members(file)):
            row = _with_tags(value) if is_kohya else value
            yield str(number), row if key is None else TableRow(key, row)


def _with_tags(row: Any) -> Any:
    """Return a row of sd-scripts with its tags after the caption, as sd-scripts trains on them."""
    if not isinstance(row, dict) or not row.get("tags"):
        return row
    texts = (row.get("caption"), row["tags"])
    return {**row, "caption": ", ".join(text for text in texts if isinstance(text, str) and text)}


def _parquet_rows(path: str, columns: Columns) -> Iterator[_Raw]:
    for number, row in enumerate(table_rows(path, columns, FILE_NAMES)):
        yield f"row {number}", row


def _json_lines(path: str, columns: Columns) -> Iterator[_Raw]:
    with open_file(path) as file:
        lines = LineReader(file)
        position = lines.position
        for line in lines:
            if line.strip():
                try:
                    yield position, parse_json(line)
                except ValueError as error:
                    yield position, Reject("broken_row", str(error))
            position = lines.position


def _csv_rows(path: str, columns: Columns) -> Iterator[_Raw]:
    previous_limit = csv.field_size_limit(MAX_CAPTION_BYTES)
    try:
        with open_file(path) as file:
            lines = LineReader(file)
            header = [column.strip() for column in next(csv.reader(lines), [])]
            _check_header(header, columns)
            position = lines.position
            while (cells := csv_row(lines)) is not None:
                if cells:
                    yield position, cells if isinstance(cells, Reject) else dict(zip(header, cells, strict=False))
                position = lines.position
    finally:
        csv.field_size_limit(previous_limit)


def csv_row(lines: "LineReader") -> list[str] | Reject | None:
    """Return the cells of the next row, an empty list for a blank line, None at the end."""
    # one reader per row: a reader that has failed cannot continue
    try:
        return next(csv.reader(lines), None)
    except csv.Error as error:
        return Reject("broken_row", str(error))


def _check_header(header: list[str], columns: Columns) -> None:
    lowered = {column.lower() for column in header}
    for key, column in _configured(columns):
        if column.lower() not in lowered:
            raise Reject("broken_table", f"no column {column!r} ({key}); the columns are {', '.join(header)!a:.200}")
    for names in (columns.image_names(FILE_NAMES), columns.caption_names()):
        if lowered.isdisjoint(name.lower() for name in names):
            raise Reject("broken_table", f"none of the columns {header!a:.200} is one of {', '.join(names)}")


class LineReader:
    """Iterates over the lines of a file as text and knows the offset of the next one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.offset = 0

    @property
    def position(self) -> str:
        """Where the next line is, as text."""
        return f"byte {self.offset}"

    def __iter__(self) -> "LineReader":
        return self

    def __next__(self) -> str:
        # a file without line ends must not be read into memory at once
        line = self._file.readline(MAX_MEMBER)
        if not line:
            raise StopIteration
        first = self.offset == 0
        self.offset += len(line)
        # bytes that are not UTF-8 become surrogates, so only the caption or name that contains them is rejected
        return line.decode("utf-8-sig" if first else "utf-8", "surrogateescape")


# --- JSON documents, member by member: memory is bounded by the largest --------------------------
# Why not ijson (3.6): an integer of 5,000 digits crashes it, 100 KB of "[" exhaust the memory, unpaired surrogates
# silently become "?", and the NaN that Python's `json` writes is an error.

MAX_MEMBER = 1 << 24
"""Largest number of characters of one key or value."""

_CHUNK = 1 << 16
_DECODER = json.JSONDecoder()


def members(file: TextIO) -> Iterator[tuple[str | None, Any]]:
    """Yield (key, value) per member of an object or (None, value) per item of a list. Raises ValueError, maybe late."""
    text = _Window(file)
    is_object = text.take("{[", "neither an object nor a list") == "{"
    closing = "}" if is_object else "]"
    delimiter = text.take(closing) if text.peek() == closing else ","
    while delimiter == ",":
        key = None
        if is_object:
            if text.peek() != '"':
                raise text.error("expected a key in double quotes")
            key = text.take_value()
            text.take(":")
        yield key, text.take_value()
        delimiter = text.take("," + closing)
    if text.peek():
        raise text.error("text after the end of the document")


class _Window:
    """The part of the document that is in memory, and the position of the parser in it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self._passed = 0  # characters before the window

    def peek(self) -> str:
        """Return the next character after white space, "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\r\n":
                    return self._text[self._at]
                self._at += 1
            if not self._extend():
                return ""

    def take(self, characters: str, message: str = "") -> str:
        """Consume and return the next character, which must be one of ``characters``."""
        character = self.peek()
        if not character or character not in characters:
            raise self.error(message or f"expected {' or '.join(map(repr, characters))}")
        self._at += 1
        return character

    def take_value(self) -> Any:
        """Consume and return one whole value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                # either the text is wrong or the window ends too early
                if not self._extend():
                    raise self.error(error.msg) from error
                continue
            except ValueError as error:  # an integer of thousands of digits
                raise self.error(str(error)) from error
            # a number at the window's end may continue behind it, even if the window cuts "1.5e+7" after "." or "e+"
            if end + 2 < len(self._text) or not self._extend():
                self._at = end
                return value

    def error(self, message: str) -> ValueError:
        """Return an error that names the position."""
        return ValueError(f"{message}, at character {self._passed + self._at}")

    def _extend(self) -> bool:
        """Drop the consumed text and read more; False at the end of the file, or if one member is too large."""
        pending = len(self._text) - self._at
        if pending > MAX_MEMBER:
            return False
        # doubling keeps the number of attempts at a long member small
        chunk = self._file.read(max(_CHUNK, pending))
        if chunk:
            self._passed += self._at
            self._text = self._text[self._at :] + chunk
            self._at = 0
        return bool(chunk)
