"""Wishes from outside, agreed by all processes: signals, the files `save` and `save_quit`, and the clock."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from sd3_light.engines.processes import SharedFlags
from sd3_light.runlog import info

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVE_QUIT = "save_quit"
LOOK_EVERY = 1.0
"""Seconds between two looks for the files."""
NUM_FLAGS = 3
"""What ranks agree on: to save, to quit for a file, to quit for a signal."""
IMPATIENT = 3.0
"""Seconds after which a second Ctrl-C means at once. Launchers pass the first one on, so it may come twice."""


class RunRequests:
    """Asked once a step, it says whether to ``save`` and whether to ``quit`` after this step, the same on all ranks.

    Files are looked for in ``folder`` (None on ranks that do not speak for the run) and removed when seen; a checkpoint
    is wished for when the last one is ``minutes`` old. Inside its block SIGTERM and SIGINT are wishes to save and quit.
    """

    def __init__(self, folder: Path | None, minutes: float | None, agreement: SharedFlags) -> None:
        self.folder, self.minutes, self.agreement = folder, minutes, agreement
        self.save = self.quit = False
        self.reason: str | None = None  # of the end; whether it is a file's wish is the same on all ranks
        self.signal: str | None = None
        self._last_save = self._last_look = time.monotonic()
        self._signalled = 0.0
        self._before: dict[signal.Signals, Callable[..., Any] | int | None] = {}

    def ask(self) -> None:
        """Look at all wishes and agree."""
        save, leave = self._files()
        asked = (save or self._is_time(), leave, self.signal is not None)
        wishes_save, by_file, by_signal = self.agreement.exchange(asked)
        self.quit = by_file or by_signal
        self.save = wishes_save or self.quit
        if self.quit and self.reason is None:
            self.reason = SAVE_QUIT if by_file else self.signal or "another process was asked to stop"

    def saved(self) -> None:
        """A checkpoint was made, for whatever reason."""
        self._last_save = time.monotonic()

    def _is_time(self) -> bool:
        """Whether the last checkpoint is old; only once, for with several ranks the answer comes a step later."""
        now = time.monotonic()
        if self.folder is None or self.minutes is None or now - self._last_save < 60 * self.minutes:
            return False
        self._last_save = now
        return True

    def _files(self) -> tuple[bool, bool]:
        now = time.monotonic()
        if self.folder is None or now - self._last_look < LOOK_EVERY:
            return False, False
        self._last_look = now
        return self._take("save"), self._take(SAVE_QUIT)

    def _take(self, name: str) -> bool:
        assert self.folder is not None
        file = self.folder / name
        if not file.is_file():
            return False
        file.unlink(missing_ok=True)
        return True

    # --- signals -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if kind is None:
            self.agreement.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._signalled = signal.Signals(number).name, time.monotonic()
            return
        if number == signal.SIGINT and time.monotonic() - self._signalled > IMPATIENT:
            raise KeyboardInterrupt

    def tell(self) -> None:
        """Say, once the wish is agreed, what happens now."""
        if self.quit:
            info(f"{self.reason}: saving a checkpoint, then stopping")
