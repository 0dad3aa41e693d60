"""Waiting for other processes and threads: events and polling, with a limit that only a hang reaches."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

HANG_SECONDS = 240.0
"""Much longer than any step of a test takes on a slow or busy machine; below the time limit of a test."""

T = TypeVar("T")


def wait_until(check: Callable[[], T | None], message: Callable[[], object] = lambda: "", pause: float = 0.01) -> T:
    """Return the first true result of ``check``; fail with ``message`` if there is none for a long time."""
    deadline = time.monotonic() + HANG_SECONDS
    while not (result := check()):
        assert time.monotonic() < deadline, f"timed out: {message()}"
        time.sleep(pause)
    return result


def is_running(pid: int) -> bool:
    """Whether a process exists that is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
