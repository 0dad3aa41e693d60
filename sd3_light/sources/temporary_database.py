"""Temporary tables that need little memory, however long they are.

They are stored in a private SQLite database in the system's temp folder (or `SQLITE_TMPDIR`, `TMPDIR`). It is written
to disk only when its cache is full, and disappears with the process.
"""

import sqlite3

_CACHE_KIB = 8192


def temporary_database() -> sqlite3.Connection:
    """Open a new private database of bounded memory. A full disk raises sqlite3.OperationalError."""
    # a scan may be continued by another thread, never by two at once
    database = sqlite3.connect("", check_same_thread=False)
    # nothing is ever rolled back
    for pragma in ("journal_mode = OFF", f"cache_size = -{_CACHE_KIB}", "temp_store = FILE"):
        database.execute(f"PRAGMA {pragma}")
    return database
