"""Caption tables beside the pictures: ``captions.json`` and ``metadata.csv``, ``.json`` or ``.jsonl``.

A table answers "which captions has this file" and, after the walk, "which files did you name that nobody asked for".
Its rows lie in a temporary database, so a table of any length needs little memory.
"""

import json
import os
import posixpath
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sd3_light.data.preprocess import Reject
from sd3_light.data.sources.captions import Columns, texts
from sd3_light.data.sources.name_store import temporary_database
from sd3_light.data.sources.rows import BrokenRow, TableRow, read_rows

Fetch = Callable[[], Sequence[str]]


class Leftover(NamedTuple):
    """Something in a table that is no caption of any picture that was met."""

    name: str
    reason: str
    detail: str


class CaptionTable:
    """Captions by file name, relative to the table's folder. Several rows of one file are several captions of it.

    Raises Reject when the file is no table. To be closed after use.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        self._folder = os.fspath(path.parent)
        self._column = columns.caption
        self._rows = temporary_database()
        try:
            # a row that is broken has its fault in place of a value; `met` says that a picture asked for it
            self._rows.execute("CREATE TABLE rows (name TEXT, value TEXT, fault TEXT, met INTEGER)")
            entries = (self._entry(row) for row in read_rows(path, columns))
            self._rows.executemany("INSERT INTO rows VALUES (?, ?, ?, 0)", entries)
            self._rows.execute("CREATE INDEX by_name ON rows (name) WHERE fault IS NULL")
        except Reject:
            self.close()
            raise
        except RecursionError as fault:
            self.close()
            raise Reject("broken_table", str(fault)) from fault

    def claim(self, name: str) -> Fetch | None:
        """What fetches this file's captions (it may raise Reject), or None; marks the rows as met."""
        for candidate in _spellings(name):
            found = "FROM rows WHERE fault IS NULL AND name = ?"
            values = self._rows.execute(f"SELECT value {found} ORDER BY rowid", (candidate,)).fetchall()
            if values:
                self._rows.execute("UPDATE rows SET met = 1 WHERE fault IS NULL AND name = ?", (candidate,))
                return lambda: [text for (value,) in values for text in texts(json.loads(value), self._column)]
        return None

    def leftovers(self) -> Iterator[Leftover]:
        """Rows that could not be read; then the files that no picture was met of, each once."""
        for name, fault in self._rows.execute("SELECT name, fault FROM rows WHERE fault IS NOT NULL ORDER BY rowid"):
            yield Leftover(name, "broken_row", fault)
        query = """
            SELECT name FROM rows AS row WHERE fault IS NULL AND NOT met AND NOT EXISTS
            (SELECT 1 FROM rows AS other WHERE fault IS NULL AND other.name = row.name AND other.rowid < row.rowid)
            ORDER BY rowid"""
        for (name,) in self._rows.execute(query):
            yield Leftover(name, "missing_file", "")

    def close(self) -> None:
        """Give the disk back."""
        self._rows.close()

    def _entry(self, row: TableRow | BrokenRow) -> tuple[str, str | None, str | None]:
        if isinstance(row, BrokenRow):
            return row.name, None, row.detail.encode("utf-8", "backslashreplace").decode()
        return _normal(row.name, self._folder), json.dumps(row.value), None


def _normal(name: str, folder: str) -> str:
    """A file name as the walk spells it: relative to the folder, forward slashes, composed characters."""
    name = posixpath.normpath(name.strip().replace("\\", "/"))
    name = name.removeprefix(folder.rstrip("/") + "/")
    return unicodedata.normalize("NFC", name).encode("utf-8", "backslashreplace").decode()


def _spellings(name: str) -> tuple[str, ...]:
    """How a table may call the file: by its whole name, or without the suffix."""
    whole = _normal(name, "")
    return whole, posixpath.splitext(whole)[0]
