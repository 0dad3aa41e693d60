"""Caption tables beside the pictures: ``captions.json`` and ``metadata.csv``, ``.json`` or ``.jsonl``.

A table answers "which captions has this file" and, after the walk, "which files did you name that nobody asked for".
CSV and JSON lines are indexed (17 bytes a row) and read row by row; a JSON document has to be held whole.
"""

import csv
import json
import os
import posixpath
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sd3_light.data.preprocess import Reject
from sd3_light.data.sources.captions import TEXT_NAMES, named, texts
from sd3_light.randomness import sample_id

TABLE_FILES = ("captions.json", "metadata.jsonl", "metadata.csv", "metadata.json")
"""What a table is called; an earlier one wins where two know the same file."""

FILE_NAMES = ("file_name", "filename", "file", "image", "path", "image_path", "file_path", "image_file", "image_name")
"""Column names of a picture's file, in order of precedence, compared in lower case."""

Fetch = Callable[[], Sequence[str]]
_Words = NDArray[np.uint64]


class Leftover(NamedTuple):
    """Something in a table that is no caption of any picture that was met."""

    name: str
    reason: str
    detail: str


class CaptionTable(Protocol):
    """Captions by file name, relative to the table's folder."""

    def claim(self, name: str) -> Fetch | None:
        """What fetches this file's captions (it may raise Reject), or None; marks the entry as used."""

    def leftovers(self) -> Iterator[Leftover]:
        """Rows that could not be read, and entries that were never claimed."""


def open_table(path: Path) -> CaptionTable:
    """The table in a file. Raises Reject when it is none."""
    if path.name == "captions.json" or path.suffix == ".json":
        return DocumentTable(path)
    return RowTable(path)


class DocumentTable:
    """A JSON document: ``{file: caption(s)}``, ``{file: row}``, or a list of rows."""

    def __init__(self, path: Path) -> None:
        self._entries: dict[str, list[Any]] = {}
        self._claimed: set[str] = set()
        self._faults: list[Leftover] = []
        folder = os.fspath(path.parent)
        for place, (name, value) in enumerate(_document_entries(path)):
            if isinstance(name, str) and name:
                self._entries.setdefault(_normal(name, folder), []).append(value)
            else:
                self._faults.append(Leftover(f"{path.name}:{place}", "broken_row", "it names no file"))

    def claim(self, name: str) -> Fetch | None:
        """See CaptionTable."""
        for candidate in _spellings(name):
            if candidate in self._entries:
                self._claimed.add(candidate)
                values = self._entries[candidate]
                return lambda: [text for value in values for text in texts(value)]
        return None

    def leftovers(self) -> Iterator[Leftover]:
        """See CaptionTable."""
        yield from self._faults
        yield from (_unclaimed(name) for name in self._entries if name not in self._claimed)


def _document_entries(path: Path) -> Iterator[tuple[Any, Any]]:
    try:
        document = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as fault:
        raise Reject("broken_table", str(fault)) from fault
    if isinstance(document, list):
        for row in document:
            yield (named(row, FILE_NAMES), named(row, TEXT_NAMES)) if isinstance(row, dict) else (None, None)
    elif isinstance(document, dict):
        for name, value in document.items():
            yield name, named(value, TEXT_NAMES) if isinstance(value, dict) else value
    else:
        raise Reject("broken_table", "neither an object nor a list")


class RowTable:
    """CSV with a header, or JSON lines: hashed names and byte offsets are held, rows are read when claimed.

    Several rows of one file are several captions of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = os.fspath(path.parent)
        self._faults: list[Leftover] = []
        try:
            with path.open("rb") as file:
                self._parse: _RowParser = _JsonRows() if path.suffix == ".jsonl" else _CsvRows(_Lines(file))
                hashes, offsets = self._index(file)
        except OSError as fault:
            raise Reject("broken_table", str(fault)) from fault
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._offsets = hashes[order], offsets[order]
        self._claimed = np.zeros(len(order), dtype=bool)

    def _index(self, file: BinaryIO) -> tuple[_Words, _Words]:
        hashes, offsets = array("Q"), array("Q")
        lines = _Lines(file, self._parse.start)
        while not lines.at_end():
            offset = lines.offset
            try:
                if (row := self._parse(lines)) is not None:
                    hashes.append(sample_id(_normal(row[0], self._folder)))
                    offsets.append(offset)
            except Reject as reject:
                self._faults.append(Leftover(f"{self._path.name}:byte {offset}", reject.reason, reject.detail))
        return np.asarray(hashes, dtype=np.uint64), np.asarray(offsets, dtype=np.uint64)

    def claim(self, name: str) -> Fetch | None:
        """See CaptionTable."""
        for candidate in _spellings(name):
            wanted = np.uint64(sample_id(candidate))
            first, end = (int(np.searchsorted(self._hashes, wanted, side)) for side in ("left", "right"))
            if first < end:
                self._claimed[first:end] = True
                return lambda: [text for _, value in self._rows(self._offsets[first:end]) for text in texts(value)]
        return None

    def leftovers(self) -> Iterator[Leftover]:
        """See CaptionTable."""
        yield from self._faults
        for name, _ in self._rows(np.sort(self._offsets[~self._claimed])):
            yield _unclaimed(_normal(name, self._folder))

    def _rows(self, offsets: _Words) -> Iterator["_Row"]:
        try:
            with self._path.open("rb") as file:
                for offset in offsets.tolist():
                    row = self._parse(_Lines(file, offset))
                    assert row is not None, "the index holds rows only"
                    yield row
        except OSError as fault:
            raise Reject("unreadable", str(fault)) from fault


_Row = tuple[str, Any]


class _RowParser(Protocol):
    start: int

    def __call__(self, lines: "_Lines") -> _Row | None:
        """The next row's file name and caption value; None for a blank line. Raises Reject."""


class _Lines:
    """The lines of a file from an offset on, keeping count of where the next one starts."""

    def __init__(self, file: BinaryIO, offset: int = 0) -> None:
        self._file, self.offset = file, offset
        self._size = file.seek(0, os.SEEK_END)
        file.seek(offset)

    def at_end(self) -> bool:
        return self.offset >= self._size

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            raise StopIteration
        first = self.offset == 0
        self.offset += len(line)
        # bytes that are not UTF-8 travel as surrogates, and are refused with the caption or name that holds them
        return line.decode("utf-8-sig" if first else "utf-8", "surrogateescape")


class _JsonRows:
    start = 0

    def __call__(self, lines: _Lines) -> _Row | None:
        line = next(lines)
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as fault:
            raise Reject("broken_row", str(fault)) from fault
        if not isinstance(row, dict):
            raise Reject("broken_row", "not an object")
        return _checked(named(row, FILE_NAMES), named(row, TEXT_NAMES))


class _CsvRows:
    def __init__(self, lines: _Lines) -> None:
        try:
            self._header = [column.strip() for column in next(csv.reader(lines), [])]
        except csv.Error as fault:
            raise Reject("broken_table", str(fault)) from fault
        lowered = {column.lower() for column in self._header}
        for names in (FILE_NAMES, TEXT_NAMES):
            if lowered.isdisjoint(names):
                raise Reject("broken_table", f"none of its columns {self._header!a:.200} is one of {', '.join(names)}")
        self.start = lines.offset

    def __call__(self, lines: _Lines) -> _Row | None:
        try:
            cells = next(csv.reader(lines), [])
        except csv.Error as fault:
            raise Reject("broken_row", str(fault)) from fault
        if not cells:
            return None
        row = dict(zip(self._header, cells, strict=False))
        return _checked(named(row, FILE_NAMES), named(row, TEXT_NAMES))


def _checked(name: Any, value: Any) -> _Row:
    if not isinstance(name, str) or not name.strip():
        raise Reject("broken_row", "it names no file")
    return name, value


def _unclaimed(name: str) -> Leftover:
    return Leftover(name, "missing_file", "")


def _normal(name: str, folder: str) -> str:
    """A file name as the walk spells it: relative to the folder, forward slashes, composed characters."""
    name = posixpath.normpath(name.strip().replace("\\", "/"))
    name = name.removeprefix(folder.rstrip("/") + "/")
    return unicodedata.normalize("NFC", name).encode("utf-8", "backslashreplace").decode()


def _spellings(name: str) -> tuple[str, ...]:
    """How a table may call the file: by its whole name, or without the suffix."""
    whole = _normal(name, "")
    return whole, posixpath.splitext(whole)[0]
