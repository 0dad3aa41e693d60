"""Progress: a live bar on a terminal, occasional plain lines elsewhere, nothing on other ranks."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from sd3_light.runlog.console import console, info, is_main_process

LINE_EVERY = 10.0
"""Minimum seconds between plain lines, unless a bar has its own."""
_FRAME_EVERY = 0.2  # minimum seconds between updates of a live bar
_POINT_EVERY = 0.5  # minimum seconds between the points from which the rate is measured
_NUM_POINTS = 60
_SEPARATOR = " · "
_WIDE = 110  # columns; narrower terminals get a short bar, so that the numbers fit

Field = float | int | str


class Bar:
    """The progress of a job. `done`, `total` and `fields` can be read at any time."""

    def __init__(self, title: str, total: int | None, unit: str, done: int):
        self.title = title
        self.total = total
        self.unit = unit
        self.done = done
        self.fields: dict[str, Field] = {}
        self._first = (time.monotonic(), done)
        self._points = deque([self._first], maxlen=_NUM_POINTS)
        self._display = _Display()
        self._next_update = 0.0

    def advance(self, n: int = 1, **fields: Field) -> None:
        """Add ``n`` to the count; the latest value of each field (loss=0.5) is shown after it."""
        self.fields.update(fields)
        self.set_done(self.done + n)

    def set_done(self, done: int, total: int | None = None) -> None:
        """Set the count; can be used as an `on_progress(done, total)` callback."""
        self.done = done
        self.total = self.total if total is None else total
        now = time.monotonic()
        if now - self._points[-1][0] >= _POINT_EVERY:
            self._points.append((now, done))
        if now >= self._next_update:
            self._next_update = now + self._display.update(self)

    def restart_rate(self) -> None:
        """Measure the rate from now on, after a start that is slower than the rest."""
        self._points = deque([(time.monotonic(), self.done)], maxlen=_NUM_POINTS)

    def status(self, finished: bool = False, brief: bool = False) -> str:
        """Return the progress as text: `120/1000 · 12% · 103 samples/s · 8:02 left · loss 0.51`.

        A field `samples_per_second` replaces the rate. ``brief`` omits the percentage, which a bar shows.
        """
        now = time.monotonic()
        start, done_at_start = self._first if finished else self._points[0]
        rate = (self.done - done_at_start) / (now - start) if now > start else 0.0
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
            parts.append(f"took {_duration(now - start)}")
        elif self.total is not None and rate > 0:
            parts.append(f"{_duration((self.total - self.done) / rate)} left")
        return _SEPARATOR.join(parts + [f"{name} {_number(value)}" for name, value in fields.items()])


@contextmanager
def progress(
    title: str, total: int | None, unit: str = "it", done: int = 0, line_every: float = LINE_EVERY
) -> Iterator[Bar]:
    """Show the progress of a job while the block runs; `done` of `total` units may be finished already.

    Bars may be nested. Without a terminal, a first line, a last line and at most one line per ``line_every`` seconds
    are printed; 0 prints one at every update. The last line says "stopped" where an exception ended the block. Nothing
    is shown if all is done already.
    """
    bar = Bar(title, total, unit, done)
    is_complete = total is not None and 0 < total <= done
    if is_main_process() and not is_complete:
        is_live = console.is_terminal and not console.is_dumb_terminal
        bar._display = _LiveDisplay(bar) if is_live else _LineDisplay(bar, line_every)
    finished = False
    try:
        yield bar
        finished = True
    finally:
        bar._display.close(bar, finished)


class _Display:
    """An output for a bar; this one shows nothing."""

    def update(self, bar: Bar) -> float:
        """Show the current state of the bar and return the seconds until the next update."""
        return float("inf")

    def close(self, bar: Bar, finished: bool) -> None:
        """Show the final state of the bar."""


class _LineDisplay(_Display):
    """Plain lines; the first is printed before any work, so that a slow start is visible."""

    def __init__(self, bar: Bar, line_every: float):
        self._line_every = line_every
        info(f"{bar.title} {bar.status()}")
        bar._next_update = time.monotonic() + line_every

    def update(self, bar: Bar) -> float:
        info(f"{bar.title} {bar.status()}")
        return self._line_every

    def close(self, bar: Bar, finished: bool) -> None:
        info(f"{bar.title} {bar.status(finished=True)}{'' if finished else ' · stopped'}")


class _LiveDisplay(_Display):
    """A line of the live display that all bars share; a nested bar is below its parent and disappears when it ends."""

    _screen: Progress | None = None

    def __init__(self, bar: Bar):
        self._outermost = _LiveDisplay._screen is None
        _LiveDisplay._screen = self._own_screen = _LiveDisplay._screen or _new_screen()
        self._task: TaskID = self._own_screen.add_task(bar.title, total=bar.total, completed=bar.done, status="")
        self.update(bar)
        self._own_screen.start()

    def update(self, bar: Bar) -> float:
        status = bar.status(brief=True)
        self._own_screen.update(self._task, total=bar.total, completed=bar.done, status=status, refresh=True)
        return _FRAME_EVERY

    def close(self, bar: Bar, finished: bool) -> None:
        if not self._outermost:
            self._own_screen.remove_task(self._task)
            return
        status = bar.status(finished=True) + ("" if finished else " · stopped")
        self._own_screen.update(self._task, total=bar.total, completed=bar.done, status=status)
        self._own_screen.stop()
        _LiveDisplay._screen = None


class _Status:
    """The status in one line; the last parts are left out where the terminal is too narrow, so no number is cut."""

    def __init__(self, status: str):
        self._parts = status.split(_SEPARATOR)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = list(self._parts)
        while len(parts) > 1 and cell_len(_SEPARATOR.join(parts)) > options.max_width:
            parts.pop()
        yield Text(_SEPARATOR.join(parts), style="none", no_wrap=True, overflow="ignore")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(cell_len(self._parts[0]), cell_len(_SEPARATOR.join(self._parts)))


class _StatusColumn(ProgressColumn):
    def render(self, task: Task) -> _Status:
        return _Status(task.fields["status"])


def _new_screen() -> Progress:
    width = 24 if console.width >= _WIDE else 8
    bar = Column(min_width=width, max_width=width)
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None, table_column=bar),
        _StatusColumn(),
        console=console,
        # no refresh thread: a worker forked while that thread holds the console's lock could never print
        auto_refresh=False,
        # rich would redirect stdout to stderr, and a pipe that reads stdout would get nothing
        redirect_stdout=sys.stdout.isatty(),
    )


def _number(value: Field, digits: int = 4) -> str:
    """Return a float with a few digits; other values unchanged."""
    if not isinstance(value, float):
        return str(value)
    if 1000 <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e")


def _duration(seconds: float) -> str:
    """Return `8:02`, or `1:08:02` from one hour on."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
