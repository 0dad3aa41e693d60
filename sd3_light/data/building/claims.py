"""Who does which piece of work, among processes that share nothing but a folder.

A claim is a file that is created exclusively and names its owner. An owner shows that it lives by touching a file of
its own; on one machine a vanished process is noticed at once. Claims save work, they do not guard it: results appear by
rename and are the same whoever makes them, so a piece that is done twice by bad luck is written twice, no more.
"""

import os
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from sd3_light.config.faults import UserError
from sd3_light.system import machine, process_start

HEARTBEAT_SECONDS = 5.0
STALE_AFTER_SECONDS = 60.0
"""An owner on another machine counts as gone when it has not shown itself for this long."""

_STEP_SECONDS = 0.001
_ALIVE, _CLAIM, _GONE = ".alive", ".claim", ".gone"


class Claims:
    """The claims of one process in a folder. Times are the file system's, so clocks need not agree."""

    def __init__(self, folder: Path, beat: float = HEARTBEAT_SECONDS, patience: float = STALE_AFTER_SECONDS) -> None:
        self.folder, self._beat, self._patience = folder, beat, patience
        self.owner = f"{machine()}-{os.getpid()}-{process_start(os.getpid())}-{uuid.uuid4().hex[:6]}"
        self._sign = folder / f"{self.owner}{_ALIVE}"
        self._stop, self._life = threading.Event(), threading.Thread(target=self._show_life, daemon=True)
        self._held: set[str] = set()

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            before = self._now()
        except OSError as error:
            raise UserError(
                f"cannot write to {self.folder}: {error.strerror}; mend that, or take a finished cache as it is with "
                "--trust_cache"
            ) from error
        # times of files move in steps of milliseconds or more: begin at a step that no earlier file can bear
        while (now := self._now()) == before:
            time.sleep(_STEP_SECONDS)
        self.started = now
        self._life.start()
        self._sweep()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._life.join()  # else its last beat could bring the sign back
        for name in tuple(self._held):
            self.release(name)
        self._sign.unlink(missing_ok=True)

    def take(self, name: str) -> bool:
        """Whether the piece ``name`` is ours now; False when a living process has it."""
        path = self._path(name)
        for _ in range(2):
            if self._create(path):
                self._held.add(name)
                return True
            holder = _read(path)
            if self._is_held(path, holder):
                return False
            # a claim that was released meanwhile may be another's by now, and is not ours to clear
            if holder is not None:
                self._clear(path)
        return False

    def release(self, name: str) -> None:
        """Give up a piece, done or not."""
        self._held.discard(name)
        # another may have taken it over while we seemed dead: only our own claim goes
        if _read(self._path(name)) == self.owner:
            self._path(name).unlink(missing_ok=True)

    def is_taken(self, name: str) -> bool:
        """Whether a living process has the piece."""
        path = self._path(name)
        return self._is_held(path, _read(path))

    def is_newer(self, path: Path) -> bool:
        """Whether a file was written since this process began to claim."""
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
            raise UserError(f"cannot write {path}: {error.strerror}; make room or mend the disk") from error
        return True

    def _clear(self, path: Path) -> None:
        """Remove a dead owner's claim; of several that try, one succeeds."""
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{_GONE}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return
        aside.unlink(missing_ok=True)

    def _is_held(self, path: Path, holder: str | None) -> bool:
        """Whether a claim that names this holder (None: there is no claim) is a living process's."""
        if holder == "":
            # its owner's name follows, unless it was killed before it could write it
            return self._is_recent(path)
        return holder is not None and self._is_alive(holder)

    def _is_alive(self, owner: str) -> bool:
        parts = owner.rsplit("-", 3)
        if len(parts) != 4:
            return False  # nothing that a process of ours wrote
        where, pid, start, _ = parts
        if where == machine() and start and pid.isdecimal():
            return process_start(int(pid)) == start
        return self._is_recent(self.folder / f"{owner}{_ALIVE}")

    def _is_recent(self, path: Path) -> bool:
        try:
            return self._now() - path.stat().st_mtime < self._patience
        except FileNotFoundError:
            return False

    def _now(self) -> float:
        self._sign.touch()
        return self._sign.stat().st_mtime

    def _show_life(self) -> None:
        while not self._stop.wait(self._beat):
            # someone may have cleaned the folder, or the disk may be full: the next beat tries again
            with suppress(OSError):
                self._sign.touch()

    def _sweep(self) -> None:
        """Remove what dead processes left here."""
        for sign in self.folder.glob(f"*{_ALIVE}"):
            if not self._is_alive(sign.name.removesuffix(_ALIVE)):
                sign.unlink(missing_ok=True)
        for claim in self.folder.glob(f"*{_CLAIM}"):
            if (holder := _read(claim)) is not None and not self._is_held(claim, holder):
                self._clear(claim)
        for aside in self.folder.glob(f"*{_GONE}"):
            aside.unlink(missing_ok=True)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
