"""Sets of names on disk, so that scanning a folder of a million files needs no more memory than a small one.

They are stored in a private temporary SQLite database in the system's temp folder (or `SQLITE_TMPDIR`, `TMPDIR`). It is
written to disk only when its cache is full, and disappears with the process.
"""

import itertools
import os
import sqlite3
from collections.abc import Iterator

_CACHE_KIB = 8192
_WRITE = 10_000  # names collected in memory, so that they are inserted in sorted order
_READ = 1_000
_FEW = 8


def temporary_database() -> sqlite3.Connection:
    """Open a new private database of bounded memory. A full disk raises sqlite3.OperationalError."""
    # a scan may be continued by another thread, never by two at once
    database = sqlite3.connect("", check_same_thread=False)
    # nothing is ever rolled back
    for pragma in ("journal_mode = OFF", f"cache_size = -{_CACHE_KIB}", "temp_store = FILE"):
        database.execute(f"PRAGMA {pragma}")
    return database


class NameStore:
    """Creates sets of names in one temporary database."""

    def __init__(self) -> None:
        self._database = temporary_database()
        self._database.execute(
            "CREATE TABLE names (number INT, name BLOB, note TEXT, PRIMARY KEY (number, name)) WITHOUT ROWID"
        )
        self._numbers = itertools.count()

    def names(self) -> "NameSet":
        """Create an empty set."""
        return NameSet(self._database, next(self._numbers))

    def close(self) -> None:
        """Delete the database and all sets."""
        self._database.close()


class NameSet:
    """A set of names, iterated in sorted order (by code points, as Python sorts texts)."""

    def __init__(self, database: sqlite3.Connection, number: int) -> None:
        self._database = database
        self._number = number
        self._pending: list[tuple[int, bytes, str]] = []

    def add(self, name: str, note: str = "") -> None:
        """Add a name and a short text about it."""
        self._pending.append((self._number, _encode(name), note))
        if len(self._pending) >= _WRITE:
            self._flush()

    def add_new(self, name: str) -> bool:
        """Add a name; return whether it was new."""
        self._flush()
        row = self._number, _encode(name)
        return self._database.execute("INSERT OR IGNORE INTO names VALUES (?, ?, '')", row).rowcount > 0

    def __contains__(self, name: str) -> bool:
        return bool(self._notes(name))

    def note(self, name: str) -> str:
        """Return the text that was added with a name, "" if there is none."""
        return next((note for (note,) in self._notes(name)), "")

    def _notes(self, name: str) -> list[tuple[str]]:
        self._flush()
        query = "SELECT note FROM names WHERE number = ? AND name = ?"
        return self._database.execute(query, (self._number, _encode(name))).fetchall()

    def __iter__(self) -> Iterator[str]:
        yield from self._from(b"", None)

    def with_stem(self, stem: str) -> Iterator[str]:
        """Yield the names that are ``stem`` plus one suffix, or ``stem`` alone."""
        if stem in self and not os.path.splitext(stem)[1]:
            yield stem
        # "/", which no name contains, is the character after "."
        for name in self._from(_encode(f"{stem}."), _encode(f"{stem}/")):
            if os.path.splitext(name)[0] == stem:
                yield name

    def clear(self) -> None:
        """Remove all names."""
        self._pending.clear()
        self._database.execute("DELETE FROM names WHERE number = ?", (self._number,))

    def _from(self, first: bytes, end: bytes | None) -> Iterator[str]:
        """Yield the names from ``first`` up to ``end``."""
        self._flush()
        below, bounds = ("", ()) if end is None else (" AND name < ?", (end,))
        query = f"SELECT name FROM names WHERE number = ? AND name >= ?{below} ORDER BY name LIMIT ?"
        size = _READ if end is None else _FEW
        # page by page, so that other sets can be written meanwhile
        while page := self._database.execute(query, (self._number, first, *bounds, size)).fetchall():
            yield from (_decode(name) for (name,) in page)
            if len(page) < size:
                return
            first = page[-1][0] + b"\0"
            size = _READ

    def _flush(self) -> None:
        if self._pending:
            self._pending.sort()
            self._database.executemany("INSERT OR IGNORE INTO names VALUES (?, ?, ?)", self._pending)
            self._pending.clear()


def _encode(name: str) -> bytes:
    # names that are not UTF-8 contain surrogates and keep their position in the order
    return name.encode("utf-8", "surrogatepass")


def _decode(name: bytes) -> str:
    return name.decode("utf-8", "surrogatepass")
