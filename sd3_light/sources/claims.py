"""Claims on work items among processes that share only a folder.

A claim is a file that is created exclusively and names its owner. Owners keep a heartbeat file fresh; on the same
machine the end of a process is noticed immediately. Claims save work but are not locks: results are deterministic and
appear by rename, so an item that two processes happen to build is only written twice.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from sd3_light.config.faults import UserError
from sd3_light.inputs import read_limited
from sd3_light.system import machine, process_start

POLL_SECONDS = 0.2
"""Interval at which processes check for the results of others."""
HEARTBEAT_SECONDS = 5.0
STALE_AFTER_SECONDS = 60.0
"""An owner on another machine counts as dead when its heartbeat is older than this."""

_CLOCK_STEP_SECONDS = 0.001
_ALIVE = ".alive"
_CLAIM = ".claim"
_GONE = ".gone"


class Claims:
    """The claims of one process in a folder. Times are the file system's, so clocks need not agree."""

    def __init__(self, folder: Path, heartbeat: float = HEARTBEAT_SECONDS) -> None:
        self.folder = folder
        self._interval = heartbeat
        self.owner = f"{machine()}-{os.getpid()}-{process_start(os.getpid())}-{uuid.uuid4().hex[:6]}"
        self._heartbeat_file = folder / f"{self.owner}{_ALIVE}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._heartbeat, daemon=True)
        self._owned: set[str] = set()
        self._done: set[str] = set()

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            before = self._now()
        except OSError as error:
            raise UserError(
                f"cannot write to {self.folder}: {error.strerror}; make it writable, or use a finished cache with "
                "--trust-cache"
            ) from error
        # file times have a resolution of milliseconds or more: start at a time that no earlier file can have
        while (now := self._now()) == before:
            time.sleep(_CLOCK_STEP_SECONDS)
        self.started = now
        self._thread.start()
        self._sweep()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()  # otherwise its last heartbeat could create the file again
        for name in tuple(self._owned):
            self.release(name)
        with suppress(OSError):  # the next run removes the files of dead processes
            self._heartbeat_file.unlink(missing_ok=True)

    def take(self, name: str) -> bool:
        """Claim the item ``name``. Return False if a living process owns it."""
        path = self._path(name)
        for _ in range(2):
            if self._create(path):
                self._owned.add(name)
                return True
            owner = _read(path)
            if self._is_owned(path, owner):
                return False
            # a claim that was released in between may belong to another process by now: leave it
            if owner is not None:
                self._clear(path)
        return False

    def release(self, name: str) -> None:
        """Release an item, finished or not."""
        self._owned.discard(name)
        # another process may have taken it over while this one seemed dead: remove only our own claim
        with suppress(OSError):  # a claim that stays is that of a dead process when this one ends
            if _read(self._path(name)) == self.owner:
                self._path(name).unlink(missing_ok=True)

    def divide(self, names: Sequence[str], is_done: Callable[[str], bool], do: Callable[[str], None]) -> None:
        """Do the items that no other process does and wait for the others; items of dead processes are taken over."""
        while names := [name for name in names if not self._try(name, is_done, do)]:
            time.sleep(POLL_SECONDS)

    def _try(self, name: str, is_done: Callable[[str], bool], do: Callable[[str], None]) -> bool:
        """Do an item unless it is done or claimed by another process. Return whether it is done now."""
        if is_done(name):
            return True
        if not self.take(name):
            return False
        if not is_done(name):
            do(name)
            self._done.add(name)
        self.release(name)
        return is_done(name)

    def is_newer(self, path: Path, item: str | None = None) -> bool:
        """Return whether a file was written after this context was entered, or is of an ``item`` done here.

        Of the latter it does not ask the clock, which may have been set back.
        """
        if item in self._done:
            return True
        try:
            return path.stat().st_mtime >= self.started
        except FileNotFoundError:
            return False

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{_CLAIM}"

    def _create(self, path: Path) -> bool:
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(self.owner)
        except FileExistsError:
            return False
        except OSError as error:
            path.unlink(missing_ok=True)
            raise UserError(f"cannot write {path}: {error.strerror}; free disk space or check the disk") from error
        return True

    def _clear(self, path: Path) -> None:
        """Remove a dead owner's claim; if several processes try, one succeeds."""
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{_GONE}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return
        aside.unlink(missing_ok=True)

    def _is_owned(self, path: Path, owner: str | None) -> bool:
        """Return whether a claim with this owner (None: there is no claim) belongs to a living process."""
        if owner == "":
            # the owner's name follows, unless the owner was killed before it could write it
            return self._is_recent(path)
        return owner is not None and self._is_alive(owner)

    def _is_alive(self, owner: str) -> bool:
        parts = owner.rsplit("-", 3)
        if len(parts) != 4:
            return False  # not written by `Claims`
        owner_machine, pid, start, _ = parts
        if owner_machine == machine() and start and pid.isdecimal():
            return process_start(int(pid)) == start
        return self._is_recent(self.folder / f"{owner}{_ALIVE}")

    def _is_recent(self, path: Path) -> bool:
        try:
            # a heartbeat in the future is as old: the clock was set back, and a living owner would have written since
            return abs(self._now() - path.stat().st_mtime) < STALE_AFTER_SECONDS
        except FileNotFoundError:
            return False

    def _now(self) -> float:
        self._heartbeat_file.touch()
        return self._heartbeat_file.stat().st_mtime

    def _heartbeat(self) -> None:
        while not self._stop.wait(self._interval):
            # the folder may have been deleted, or the disk may be full: the next heartbeat tries again
            with suppress(OSError):
                self._heartbeat_file.touch()

    def _sweep(self) -> None:
        """Remove the files of dead processes."""
        for heartbeat in self.folder.glob(f"*{_ALIVE}"):
            if not self._is_alive(heartbeat.name.removesuffix(_ALIVE)):
                heartbeat.unlink(missing_ok=True)
        for claim in self.folder.glob(f"*{_CLAIM}"):
            if (owner := _read(claim)) is not None and not self._is_owned(claim, owner):
                self._clear(claim)
        for aside in self.folder.glob(f"*{_GONE}"):
            aside.unlink(missing_ok=True)


def _read(path: Path) -> str | None:
    try:
        return read_limited(path).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError:  # a pipe, or another file that no process of ours wrote
        return ""
