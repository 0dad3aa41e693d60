"""Changes captions in the bytes of a file and leaves every other byte as it is: text files, CSV tables, JSON lines."""

import io
import json
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.inputs import parse_json
from sd3_light.sources.captions import MAX_CAPTION_BYTES, Columns, is_utf8, named, texts
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.rows import FILE_NAMES, LineReader, csv_row
from sd3_light.sources.tables import normal_name

Change = tuple[int, str, str]
"""Number of a caption among those of its image, its text before, and after."""

_BOM = "\ufeff"
_DECODER = json.JSONDecoder()
_STALE = "the caption has changed since the page read it; nothing was written. Reload the page"
_ODD = "this row cannot be changed without changing others; edit the table with another program"


def require_caption(text: str) -> None:
    """Raise UserError unless a text can be a caption."""
    if not is_utf8(text) or "\0" in text:
        raise UserError("the caption contains half of a surrogate pair or a NUL character; remove it")
    if len(text.encode()) > MAX_CAPTION_BYTES:
        raise UserError(f"the caption is longer than {MAX_CAPTION_BYTES:,} bytes; shorten it")


def shown_text(data: bytes) -> str:
    """Return the caption of a text file as it is edited: without its last line end, lines ending in LF."""
    try:
        return _split_text(data)[1]
    except UnicodeDecodeError as error:
        raise UserError(f"the file is not UTF-8 text (byte {error.start}); save it as UTF-8 first") from error


def changed_text(data: bytes, old: str, new: str) -> bytes:
    """Return the bytes of a text file with another caption; byte order mark and line ends stay. Raises UserError."""
    require_caption(new)
    if shown_text(data) != old:
        raise UserError(_STALE)
    mark, _, end = _split_text(data)
    ending = "\r\n" if "\r\n" in data.decode("utf-8-sig") else "\n"
    lines = with_lf(new).rstrip("\n")
    return (mark + lines.replace("\n", ending) + end).encode()


def _split_text(data: bytes) -> tuple[str, str, str]:
    text = data.decode("utf-8")
    mark = _BOM if text.startswith(_BOM) else ""
    body = text.removeprefix(_BOM).rstrip("\r\n")
    return mark, with_lf(body), text[len(mark) + len(body) :]


def with_lf(text: str) -> str:
    """Return a text whose lines end in LF."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


class TableText:
    """The bytes of a table, `.csv` or `.jsonl`, whose captions are changed row by row."""

    def __init__(self, data: bytes, path: str, columns: Columns) -> None:
        self._columns = columns
        self._folder = posixpath.dirname(path)
        self._is_csv = path.lower().endswith(".csv")
        self._header: list[str] = []
        self._rows = list(self._csv_rows(data) if self._is_csv else io.BytesIO(data))
        self._by_name: dict[str, list[int]] = {}
        for number, row in enumerate(self._rows):
            if (name := self._name(number, row)) is not None:
                self._by_name.setdefault(name, []).append(number)

    def change(self, name: str, changes: Sequence[Change]) -> None:
        """Change captions of the image that the table lists as ``name``. Raises UserError; then none is changed."""
        pending = dict(self._captions(name))
        new_rows: dict[int, bytes] = {}
        for number, old, new in changes:
            require_caption(new)
            if number not in pending or pending[number][2] != old:
                raise UserError(_STALE)
            row, item, _ = pending[number]
            new_rows[row] = self._changed(row, new_rows.get(row, self._rows[row]), item, new)
        for row, data in new_rows.items():
            self._rows[row] = data

    @property
    def data(self) -> bytes:
        """The bytes with all changes."""
        return b"".join(self._rows)

    def _captions(self, name: str) -> Iterator[tuple[int, tuple[int, int, str]]]:
        """Yield number -> (row, item in the row, text) of an image's captions, in the order of a scan."""
        number = 0
        candidates = (name, posixpath.splitext(name)[0])
        rows = next((self._by_name[each] for each in candidates if each in self._by_name), [])
        for row in rows:
            for item, text in enumerate(self._texts(self._cells(self._rows[row], row))):
                yield number, (row, item, text)
                number += 1

    def _texts(self, cells: Mapping[str, Any]) -> Sequence[str]:
        try:
            return texts(self._columns.caption_value(cells), self._columns.caption)
        except Reject:
            return ()

    def _name(self, number: int, row: bytes) -> str | None:
        try:
            name = named(self._cells(row, number), self._columns.image_names(FILE_NAMES))
        except (UserError, ValueError):
            return None
        return normal_name(name, self._folder) if isinstance(name, str) and name.strip() else None

    def _cells(self, row: bytes, number: int) -> dict[str, Any]:
        """Return the values of a row by column. Raises UserError or ValueError for one that is none."""
        text = _decode(row).removeprefix(_BOM if number == 0 else "")
        if self._is_csv:
            if number == 0:
                raise UserError("the first row has the names of the columns")
            return dict(zip(self._header, _parse_csv(text), strict=False))
        cells = parse_json(text) if text.strip() else None
        if not isinstance(cells, dict):
            raise UserError("not a row")
        return cells

    def _changed(self, number: int, row: bytes, item: int, new: str) -> bytes:
        cells = self._cells(row, number)
        names = self._columns.caption_names()
        column = self._columns.captions[item] if len(self._columns.captions) > 1 else None
        key = next((key for name in ([column] if column else names) if (key := _key_of(cells, name)) is not None), None)
        if key is None:
            raise UserError(_ODD)
        value: Any = [*cells[key][:item], new, *cells[key][item + 1 :]] if isinstance(cells[key], list) else new
        text = _decode(row)
        changed = self._with_cell(text, key, value) if self._is_csv else _with_member(text, key, value)
        data = changed.encode("utf-8", "surrogateescape")
        if self._cells(data, number) != {**cells, key: value}:
            raise UserError(_ODD)
        return data

    def _with_cell(self, row: str, key: str, value: str) -> str:
        spans = _cell_spans(row)
        start, end = spans[len(self._header) - 1 - self._header[::-1].index(key)]
        is_quoted = row[start:end].startswith('"') or any(character in value for character in ',"\r\n')
        is_quoted = is_quoted or value != value.strip()
        cell = '"' + value.replace('"', '""') + '"' if is_quoted else value
        return row[:start] + cell + row[end:]

    def _csv_rows(self, data: bytes) -> Iterator[bytes]:
        """Yield the bytes of each row with its line end; a quoted cell may have several lines."""
        lines = LineReader(io.BytesIO(data))
        start = 0
        while (cells := csv_row(lines)) is not None:
            if not start and isinstance(cells, list):
                self._header = [cell.strip() for cell in cells]
            yield data[start : lines.offset]
            start = lines.offset


def _decode(row: bytes) -> str:
    return row.decode("utf-8", "surrogateescape")


def _parse_csv(row: str) -> list[str]:
    cells = csv_row(LineReader(io.BytesIO(row.encode("utf-8", "surrogateescape"))))
    if not isinstance(cells, list):
        raise UserError(_ODD)
    return cells


def _cell_spans(row: str) -> list[tuple[int, int]]:
    """Return the start and end of each cell of a row, with its quotes."""
    spans: list[tuple[int, int]] = []
    at = len(row) - len(row.removeprefix(_BOM))
    while True:
        start = at
        if row[at : at + 1] == '"':
            at = _after_quotes(row, at + 1)
        while at < len(row) and row[at] not in ",\r\n":
            at += 1
        spans.append((start, at))
        if row[at : at + 1] != ",":
            return spans
        at += 1


def _after_quotes(row: str, at: int) -> int:
    while (quote := row.find('"', at)) >= 0:
        if row[quote + 1 : quote + 2] != '"':
            return quote + 1
        at = quote + 2
    return len(row)


def _key_of(cells: Mapping[str, Any], name: str) -> str | None:
    """Return the key under which a row has a value for a column, as `captions.named` finds it."""
    if cells.get(name) is not None:
        return name
    keys = [key for key in cells if key.lower() == name.lower()]
    return keys[-1] if keys and cells[keys[-1]] is not None else None


def _with_member(line: str, key: str, value: object) -> str:
    """Return a line of JSON with another value of a key; everything else stays as it is written."""
    span = None
    at = _skip(line, len(line) - len(line.removeprefix(_BOM)))
    while line[at : at + 1] in ("{", ","):
        try:
            name, at = _DECODER.raw_decode(line, _skip(line, at + 1))
            start = _skip(line, _skip(line, at) + 1)
            _, at = _DECODER.raw_decode(line, start)
        except ValueError as error:
            raise UserError(_ODD) from error
        if name == key:
            span = start, at
        at = _skip(line, at)
    if span is None:
        raise UserError(_ODD)
    return line[: span[0]] + json.dumps(value, ensure_ascii=line.isascii()) + line[span[1] :]


def _skip(line: str, at: int) -> int:
    while at < len(line) and line[at] in " \t\r\n":
        at += 1
    return at


Transform = Callable[[str], str]
"""Changes the text of a caption."""


def make_transform(mode: str, find: str, put: str, delimiter: str) -> Transform:
    """Return the change of a find-and-replace form. Raises UserError for values that are not valid."""
    for text in (find, put):
        require_caption(text)
    if mode in ("text", "tag") and not find:
        raise UserError("write what to find")
    if mode in ("start", "end") and not put:
        raise UserError("write what to add")
    separator = delimiter.strip() or delimiter
    match mode:
        case "text":
            return lambda text: text.replace(find, put)
        case "tag":
            return lambda text: _with_tag(text, separator, find.strip(), put.strip())
        case "start":
            return lambda text: delimiter.join(filter(None, (put, text)))
        case "end":
            return lambda text: delimiter.join(filter(None, (text, put)))
    raise UserError(f"unknown change {mode!r:.40}; choose one of the list")


def _with_tag(text: str, separator: str, find: str, put: str) -> str:
    """Replace whole tags, or remove them; the spaces around the others stay as they are."""
    parts = text.split(separator)
    if not any(part.strip() == find for part in parts):
        return text
    changed = [part.replace(find, put) if part.strip() == find else part for part in parts]
    kept = [new for new, part in zip(changed, parts, strict=True) if put or part.strip() != find]
    return separator.join(kept).lstrip() if kept and kept[0] is not parts[0] else separator.join(kept)
