"""Names kept on disk while a scan needs them: a folder of a million files takes no more memory than a small one.

The disk is a private temporary database of SQLite. It lies in the system's temporary folder (`SQLITE_TMPDIR` or
`TMPDIR` names another), is written only when its cache is full, and is gone with the process.
"""

import itertools
import os
import sqlite3
from collections.abc import Iterator

_CACHE_KIB = 8192
_WRITE = 10_000  # names gathered in memory, so that they are inserted in order
_READ = 1_000
_FEW = 8


def temporary_database() -> sqlite3.Connection:
    """A database of its own, bounded in memory. Whoever runs out of disk gets sqlite3.OperationalError."""
    # a scan may be continued by another thread than began it, never by two at once
    database = sqlite3.connect("", check_same_thread=False)
    # nothing is ever rolled back
    for pragma in ("journal_mode = OFF", f"cache_size = -{_CACHE_KIB}", "temp_store = FILE"):
        database.execute(f"PRAGMA {pragma}")
    return database


class NameStore:
    """Any number of sets of names, in one temporary database."""

    def __init__(self) -> None:
        self._database = temporary_database()
        self._database.execute("CREATE TABLE names (place INTEGER, name BLOB, PRIMARY KEY (place, name)) WITHOUT ROWID")
        self._places = itertools.count()

    def names(self) -> "NameSet":
        """A new, empty set."""
        return NameSet(self._database, next(self._places))

    def close(self) -> None:
        """Give the disk back; the sets are gone."""
        self._database.close()


class NameSet:
    """A set of names, read in their order (that of code points, as Python sorts texts)."""

    def __init__(self, database: sqlite3.Connection, place: int) -> None:
        self._database, self._place = database, place
        self._waiting: list[tuple[int, bytes]] = []

    def add(self, name: str) -> None:
        """Put a name into the set."""
        self._waiting.append((self._place, _encode(name)))
        if len(self._waiting) >= _WRITE:
            self._flush()

    def add_new(self, name: str) -> bool:
        """Put a name into the set; whether it was new."""
        self._flush()
        row = self._place, _encode(name)
        return self._database.execute("INSERT OR IGNORE INTO names VALUES (?, ?)", row).rowcount > 0

    def __contains__(self, name: str) -> bool:
        self._flush()
        row = self._place, _encode(name)
        return bool(self._database.execute("SELECT 1 FROM names WHERE place = ? AND name = ?", row).fetchall())

    def __iter__(self) -> Iterator[str]:
        yield from self._from(b"", None)

    def with_stem(self, stem: str) -> Iterator[str]:
        """The names that are ``stem`` and one suffix, or ``stem`` alone."""
        if stem in self and not os.path.splitext(stem)[1]:
            yield stem
        # "/", which no name holds, is the character after "."
        for name in self._from(_encode(f"{stem}."), _encode(f"{stem}/")):
            if os.path.splitext(name)[0] == stem:
                yield name

    def clear(self) -> None:
        """Empty the set."""
        self._waiting.clear()
        self._database.execute("DELETE FROM names WHERE place = ?", (self._place,))

    def _from(self, first: bytes, end: bytes | None) -> Iterator[str]:
        """The names from ``first`` on, as far as ``end``."""
        self._flush()
        below, bounds = ("", ()) if end is None else (" AND name < ?", (end,))
        query = f"SELECT name FROM names WHERE place = ? AND name >= ?{below} ORDER BY name LIMIT ?"
        size = _READ if end is None else _FEW
        # page by page, so that other sets may be written meanwhile
        while page := self._database.execute(query, (self._place, first, *bounds, size)).fetchall():
            yield from (_decode(name) for (name,) in page)
            if len(page) < size:
                return
            first, size = page[-1][0] + b"\0", _READ

    def _flush(self) -> None:
        if self._waiting:
            self._waiting.sort()
            self._database.executemany("INSERT OR IGNORE INTO names VALUES (?, ?)", self._waiting)
            self._waiting.clear()


def _encode(name: str) -> bytes:
    # names that are not UTF-8 come as surrogates, and keep their place in the order
    return name.encode("utf-8", "surrogatepass")


def _decode(name: bytes) -> str:
    return name.decode("utf-8", "surrogatepass")
