"""Stop and save requests from outside, agreed on by all processes: signals, the files `save` and `save_quit`, time."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from sd3_light.config.faults import UserError
from sd3_light.engines.processes import SharedFlags
from sd3_light.runlog import info

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVE_QUIT = "save_quit"
FILE_CHECK_SECONDS = 1.0
"""Seconds between two checks for the files."""
NUM_FLAGS = 4
"""The flags that ranks share: save, quit because of a file, quit because of a signal, quit because of an error."""
SECOND_SIGINT_SECONDS = 3.0
"""A Ctrl-C this long after the first one interrupts at once. Launchers forward the first, so it may arrive twice."""


class RunRequests:
    """Whether to ``save`` and whether to ``quit`` after this step, updated by `poll` once per step, equal on all ranks.

    ``failed`` is whether the run quits because of an error of some rank, whose `failure` has it.
    Request files are read from ``folder`` (None on ranks other than the main one) and removed. A checkpoint is due when
    the last one is ``minutes`` old. ``group`` is a gloo group of all ranks.
    """

    def __init__(
        self, folder: Path | None = None, minutes: float | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self.folder = folder
        self.minutes = minutes
        self.flags = SharedFlags(group, NUM_FLAGS)
        self.save = self.quit = self.failed = False
        self.reason: str | None = None  # why the run quits; a signal's name is known only to the rank that got it
        self.signal: str | None = None
        self.failure: str | None = None
        """The error for which this rank ends the run."""
        self._planned: str | None = None
        self._last_save = self._last_check = time.monotonic()
        self._signalled_at = 0.0

    def poll(self) -> None:
        """Collect the requests of all ranks."""
        save_file, quit_file = self._check_files()
        quits = quit_file or self._planned is not None
        own = (save_file or self._is_save_due(), quits, self.signal is not None, self.failure is not None)
        save, quit_by_file, quit_by_signal, self.failed = self.flags.exchange(own)
        self.quit = quit_by_file or quit_by_signal or self.failed
        self.save = save or self.quit
        if self.failed:
            self.reason = self.failure or "another process has failed"
        elif self.quit and self.reason is None:
            planned = self._planned or SAVE_QUIT
            self.reason = planned if quit_by_file else self.signal or "another process was asked to stop"

    def stop(self, reason: str) -> None:
        """Save and quit after the next step, as with the file `save_quit`; ranks need not call it at the same step."""
        self._planned = reason

    def fail(self, error: UserError) -> None:
        """Save and quit after the next step because of an error of this rank, which can still take these steps."""
        if self.failure is None:
            self.failure = str(error)

    @property
    def on_lost_worker(self) -> Callable[[UserError], None] | None:
        """What a loader calls when a worker ended, with several ranks; one rank saves when the error is raised."""
        return None if self.flags.group is None else self.fail

    @property
    def is_interrupted(self) -> bool:
        """Whether the run quits because of a signal."""
        return self.quit and not self.failed and self.reason not in (SAVE_QUIT, self._planned)

    def announce(self) -> None:
        """Print what happens now if all ranks agreed to quit."""
        if self.quit:
            info(f"{self.reason}: saving a checkpoint, then stopping")

    def checkpoint_saved(self) -> None:
        """Restart the clock for the next checkpoint by time."""
        self._last_save = time.monotonic()

    def _is_save_due(self) -> bool:
        """Return whether the last checkpoint is old; True only once, as several ranks agree a step later."""
        now = time.monotonic()
        if self.folder is None or self.minutes is None or now - self._last_save < 60 * self.minutes:
            return False
        self._last_save = now
        return True

    def _check_files(self) -> tuple[bool, bool]:
        now = time.monotonic()
        if self.folder is None or now - self._last_check < FILE_CHECK_SECONDS:
            return False, False
        self._last_check = now
        return _remove(self.folder / "save"), _remove(self.folder / SAVE_QUIT)

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Inside the block SIGTERM and SIGINT request to save and quit.

        If the run stops because of a signal, later ones find the same handlers until the process ends, so that they
        change neither what is saved nor the exit code.
        """
        previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            if self.signal is None and not self.is_interrupted:
                for number, handler in previous.items():
                    signal.signal(number, handler)
        self.flags.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number).name
            self._signalled_at = time.monotonic()
            return
        if number == signal.SIGINT and time.monotonic() - self._signalled_at > SECOND_SIGINT_SECONDS:
            raise KeyboardInterrupt


def _remove(file: Path) -> bool:
    """Remove a request file; return whether it existed."""
    if not file.is_file():
        return False
    file.unlink(missing_ok=True)
    return True
