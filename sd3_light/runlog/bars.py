"""How far a job is: a live bar on a terminal, plain lines now and then elsewhere, nothing on other ranks."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from sd3_light.runlog.console import console, info, is_main_process

LINE_EVERY = 10.0  # seconds between plain lines, at least
_FRAME_EVERY = 0.2  # seconds between updates of a live bar, at least
_POINT_EVERY = 0.5  # seconds between the points that the rate is measured from, at least
_NUM_POINTS = 60
_WIDE = 110  # columns: on a narrower terminal the numbers need the room more than the bar does

Field = float | int | str


class Bar:
    """The count of a running job. `done`, `total` and `fields` may be read at any time."""

    def __init__(self, title: str, total: int | None, unit: str, done: int):
        self.title = title
        self.total = total
        self.unit = unit
        self.done = done
        self.fields: dict[str, Field] = {}
        self._first = (time.monotonic(), done)
        self._points = deque([self._first], maxlen=_NUM_POINTS)
        self._display: _Display = _Silent()
        self._next_update = 0.0

    def advance(self, n: int = 1, **fields: Field) -> None:
        """Count `n` more; the latest value of each field (loss=0.5) is shown behind the count."""
        self.fields.update(fields)
        self.reach(self.done + n)

    def reach(self, done: int, total: int | None = None) -> None:
        """Set the count; made to be given as an `on_progress(done, total)` callback."""
        self.done = done
        self.total = self.total if total is None else total
        now = time.monotonic()
        if now - self._points[-1][0] >= _POINT_EVERY:
            self._points.append((now, done))
        if now >= self._next_update:
            self._next_update = now + self._display.update(self)

    def status(self, finished: bool = False, brief: bool = False) -> str:
        """The count in words: `120/1000 · 12% · 103 samples/s · 8:02 left · loss 0.51`.

        A field `samples_per_second` takes the place of the rate. ``brief`` leaves out the share, which a bar shows.
        """
        now = time.monotonic()
        since, before = self._first if finished else self._points[0]
        rate = (self.done - before) / (now - since) if now > since else 0.0
        parts = [str(self.done) if self.total is None else f"{self.done}/{self.total}"]
        fields = dict(self.fields)
        samples = fields.pop("samples_per_second", None)
        if self.total and not brief:
            parts.append(f"{100 * self.done // self.total}%")
        if samples is not None:
            parts.append(f"{_number(samples, digits=3)} samples/s")
        elif rate > 0:
            parts.append(f"{_number(rate, digits=3)} {self.unit}/s")
        if finished:
            parts.append(f"took {_duration(now - since)}")
        elif self.total is not None and rate > 0:
            parts.append(f"{_duration((self.total - self.done) / rate)} left")
        return " · ".join(parts + [f"{name} {_number(value)}" for name, value in fields.items()])


@contextmanager
def progress(title: str, total: int | None, unit: str = "it", done: int = 0) -> Iterator[Bar]:
    """Show how far a job is while the block runs; `done` of `total` units may be behind us already.

    Bars may follow or contain one another. Elsewhere than on a terminal a first line, a last one and at most one every
    ten seconds are printed; a block that is left by an exception says so on its last line.
    """
    bar = Bar(title, total, unit, done)
    bar._display = _display_for(bar)
    finished = False
    try:
        yield bar
        finished = True
    finally:
        bar._display.close(bar, finished)


class _Display(Protocol):
    """Where a bar is shown."""

    def update(self, bar: Bar) -> float:
        """Show the bar as it is now; how many seconds it may stay so is returned."""

    def close(self, bar: Bar, finished: bool) -> None:
        """Show the bar for the last time."""


class _Silent:
    def update(self, bar: Bar) -> float:
        return float("inf")

    def close(self, bar: Bar, finished: bool) -> None:
        pass


class _Lines:
    """Plain lines; the first one is printed before any work is done, so that a slow start is seen to be one."""

    def __init__(self, bar: Bar):
        info(f"{bar.title} {bar.status()}")
        bar._next_update = time.monotonic() + LINE_EVERY

    def update(self, bar: Bar) -> float:
        info(f"{bar.title} {bar.status()}")
        return LINE_EVERY

    def close(self, bar: Bar, finished: bool) -> None:
        info(f"{bar.title} {bar.status(finished=True)}{'' if finished else ' · stopped'}")


class _Live:
    """A line of the one live display that all bars share: a bar in a bar stands below it, and goes when it ends."""

    _screen: Progress | None = None

    def __init__(self, bar: Bar):
        self._outermost = _Live._screen is None
        screen = _Live._screen or _new_screen()
        _Live._screen = self._mine = screen
        self._task: TaskID = screen.add_task(
            bar.title, total=bar.total, completed=bar.done, status=bar.status(brief=True)
        )
        screen.start()

    def update(self, bar: Bar) -> float:
        status = bar.status(brief=True)
        self._mine.update(self._task, total=bar.total, completed=bar.done, status=status, refresh=True)
        return _FRAME_EVERY

    def close(self, bar: Bar, finished: bool) -> None:
        if not self._outermost:
            self._mine.remove_task(self._task)
            return
        status = bar.status(finished=True) + ("" if finished else " · stopped")
        self._mine.update(self._task, total=bar.total, completed=bar.done, status=status)
        self._mine.stop()
        _Live._screen = None


def _new_screen() -> Progress:
    status = Column(no_wrap=True, overflow="ellipsis")
    width = 24 if console.width >= _WIDE else 8
    bar = Column(min_width=width, max_width=width)
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None, table_column=bar),
        TextColumn("{task.fields[status]}", markup=False, table_column=status),
        console=console,
        # no thread that draws: a loader's worker that is forked while it holds the console's lock would never print
        auto_refresh=False,
        # rich would send prints to stderr, where they are no longer what a pipe is waiting for
        redirect_stdout=sys.stdout.isatty(),
    )


def _display_for(bar: Bar) -> _Display:
    if not is_main_process():
        return _Silent()
    return _Live(bar) if console.is_terminal and not console.is_dumb_terminal else _Lines(bar)


def _number(value: Field, digits: int = 4) -> str:
    """A float in a few digits, anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    if 1000 <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e")


def _duration(seconds: float) -> str:
    """`8:02`, or `1:08:02` from an hour on."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
