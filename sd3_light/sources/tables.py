"""Caption tables next to the images: ``captions.json`` and ``metadata.csv``, ``.json``, ``.jsonl``, or other names.

A table returns the captions of a file and, after the walk, the rows without an image. Rows are stored in a temporary
database, so a table of any length needs little memory.
"""

import json
import posixpath
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from sd3_light.sources.captions import Columns, texts
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.rows import BrokenRow, TableRow, read_rows
from sd3_light.sources.selection import Selection
from sd3_light.sources.temporary_database import temporary_database


class ClaimedRows(NamedTuple):
    """The rows of one file: a function that fetches its captions, and one for the columns that `where` uses."""

    captions: Callable[[], Sequence[str]]
    columns: Callable[[], dict[str, Any]]


class CaptionTable:
    """Captions by file name, relative to the table's folder, one per row. Raises Reject if the file is not a table."""

    def __init__(self, path: str, columns: Columns, selection: Selection | None = None) -> None:
        self._folder = posixpath.dirname(path)
        self._column = columns.caption
        self._rows = temporary_database()
        try:
            # a broken row has an error instead of a value; `used` is set when an image claims the row
            self._rows.execute("CREATE TABLE rows (name TEXT, value TEXT, error TEXT, columns TEXT, used INTEGER)")
            entries = (self._entry(row) for row in read_rows(path, columns, selection))
            self._rows.executemany("INSERT INTO rows VALUES (?, ?, ?, ?, 0)", entries)
            self._rows.execute("CREATE INDEX by_name ON rows (name) WHERE error IS NULL")
        except Reject:
            self.close()
            raise
        except RecursionError as error:
            self.close()
            raise Reject("broken_table", str(error)) from error

    def claim(self, name: str) -> ClaimedRows | None:
        """Mark the rows of a file as used and return them; None if there are none."""
        full = normal_name(name, "")
        for candidate in (full, posixpath.splitext(full)[0]):  # a table may omit the suffix
            query = "SELECT value, columns FROM rows WHERE error IS NULL AND name = ? ORDER BY rowid"
            rows = self._rows.execute(query, (candidate,)).fetchall()
            if rows:
                self._rows.execute("UPDATE rows SET used = 1 WHERE error IS NULL AND name = ?", (candidate,))
                return self._claimed(rows)
        return None

    def _claimed(self, rows: Sequence[tuple[str, str | None]]) -> ClaimedRows:
        return ClaimedRows(
            lambda: [text for value, _ in rows for text in texts(json.loads(value), self._column)],
            lambda: merged(json.loads(columns) for _, columns in rows if columns),
        )

    def leftovers(self) -> Iterator[tuple[str, str, str]]:
        """Yield (name, reason, detail) of the rows that could not be read; then of the files without an image, once."""
        for name, error in self._rows.execute("SELECT name, error FROM rows WHERE error IS NOT NULL ORDER BY rowid"):
            yield name, "broken_row", error
        query = """
            SELECT name FROM rows AS row WHERE error IS NULL AND NOT used AND NOT EXISTS
            (SELECT 1 FROM rows AS other WHERE error IS NULL AND other.name = row.name AND other.rowid < row.rowid)
            ORDER BY rowid"""
        for (name,) in self._rows.execute(query):
            yield name, "missing_file", ""

    def first_name(self) -> str:
        """Return the first file name of the table, "" if it has none."""
        row = self._rows.execute("SELECT name FROM rows WHERE error IS NULL ORDER BY rowid LIMIT 1").fetchone()
        return str(row[0]) if row else ""

    def close(self) -> None:
        """Delete the temporary database."""
        self._rows.close()

    def _entry(self, row: TableRow | BrokenRow) -> tuple[str, str | None, str | None, str | None]:
        if isinstance(row, BrokenRow):
            return row.name, None, row.detail.encode("utf-8", "backslashreplace").decode(), None
        return (
            normal_name(row.name, self._folder),
            json.dumps(row.value),
            None,
            json.dumps(row.columns) if row.columns else None,
        )


def merged(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of several rows, of which the first takes precedence."""
    values: dict[str, Any] = {}
    for row in rows:
        values = {**row, **values}
    return values


def normal_name(name: str, folder: str) -> str:
    """Return a file name in the spelling of the walk: relative to the folder, forward slashes, NFC."""
    name = posixpath.normpath(name.strip().replace("\\", "/"))
    name = name.removeprefix(folder.rstrip("/") + "/")
    return unicodedata.normalize("NFC", name).encode("utf-8", "backslashreplace").decode()
