"""Read a run's log into a `RunReport`, in bounded memory however long the log is.

The log is read twice. The first pass collects the rare events (starts, saves, evaluations): they show which records a
resumed run repeated, and how many records there are. The second pass builds the curves. Of a log that has grown, a
`RunReader` reads the new lines only.
"""

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from sd3_light.config.faults import UserError
from sd3_light.report.curves import Curve, CurveBuilder
from sd3_light.report.log_lines import STEP_PREFIX, LineMark, LineMarks, LogEvent, chosen_lines, scan_step
from sd3_light.runlog.log import (
    LOSS_TERMS,
    MEASUREMENTS,
    METRIC_GROUPS,
    REWARD_FIELDS,
    complete_lines,
    open_log,
    parse_event,
)

STEP_FIELDS = (
    *("loss", *LOSS_TERMS, "lr", "grad_norm", "param_norm", "samples_per_second", "data_wait"),
    *("mfu", "tflops_per_gpu", "gpu_memory_gib", "gpu_reserved_gib", "host_memory_gib", "seconds", "samples", "time"),
)
"""The fields of a step that become curves, where present."""

STEP_GROUPS = ("band", "ema_decay")
EVAL_FIELDS = tuple(
    field
    for name in ("flow", "fixed")
    for field in (name, f"{name}_se", *(f"{name}@0.{tenth}" for tenth in range(1, 10)))
)
_RARE_FIELDS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "eval": (EVAL_FIELDS, ()),
    "metrics": ((), METRIC_GROUPS),
    "reward": (REWARD_FIELDS, ()),
}
"""The fields, and groups of fields, of other events that become curves."""

MOST_EVENTS = 300
"""About this many events of one kind are kept, spread evenly."""

MOST_PARSED = 50_000
"""Up to twice this many steps, every line is parsed as JSON; beyond that an even choice, and the other lines are only
scanned for the fields that may spike."""

QUICK_BYTES = 1 << 23
"""Up to this many new bytes are read while a page waits; more in the background."""

PREVIEW_LINES = 500
"""Lines of a preview; each may be a read of the disk."""

MOST_FINE_BYTES = 1 << 28
"""Longest part of a log that is read for finer curves."""

MOST_FINE_PARSED = 4000
"""Of such a part about this many lines are parsed; the others are only scanned."""

_PAUSE_SECONDS = 0.5
_ONE_READS = threading.Lock()
_SEGMENT_STARTS = ("start", "resume")
_COMPARED_BYTES = 1000  # of the first and the last line of a log that has changed
_NUMBERS = frozenset((*MEASUREMENTS, *REWARD_FIELDS))
_RareKey = tuple[str, str, str]
"""Kind of an event, set and weights."""


@dataclass
class RunSegment:
    """The part of a log that one process wrote: from a start or resume to the next."""

    begin: LogEvent
    end: float
    """Time of its last line."""
    limit: float = math.inf
    """A later segment repeated the steps beyond this one."""


class EvenSample:
    """Events of one kind: all of them up to a number, beyond that an even choice that includes the last one."""

    def __init__(self) -> None:
        self.seen = 0
        self._every = 1
        self._events: list[LogEvent] = []
        self._last: LogEvent | None = None

    def add(self, event: LogEvent) -> None:
        """Add an event."""
        if self.seen % self._every == 0:
            self._events.append(event)
        self.seen += 1
        self._last = event
        if len(self._events) > 2 * MOST_EVENTS:
            self._events = self._events[::2]
            self._every *= 2

    def __iter__(self) -> Iterator[LogEvent]:
        yield from self._events
        if self._last is not None and self._events[-1] is not self._last:
            yield self._last

    def copy(self) -> "EvenSample":
        """Return a sample to which later events are not added."""
        other = copy(self)
        other._events = list(self._events)
        return other


@dataclass
class RunReport:
    """The last run of a log. Steps that a resumed run repeated count once, as last logged."""

    folder: Path
    is_running: bool | None = None
    """Whether a process trains in the folder now; None where that is not known."""
    is_preview: bool = False
    """Whether only a few lines of a long log were read."""
    earlier_runs: int = 0
    """Runs of the same log before the last start, as after `train --restart`; nothing else here is theirs."""
    segments: list[RunSegment] = field(default_factory=list)
    last: dict[str, LogEvent] = field(default_factory=dict)
    """The last valid event of each kind."""
    events: dict[str, EvenSample] = field(default_factory=dict)
    """Events other than steps, evaluations and samples, by kind."""
    samples: dict[str, EvenSample] = field(default_factory=dict)
    """Sample grids, by weights."""
    steps: dict[str, Curve] = field(default_factory=dict)
    evals: dict[tuple[str, str], dict[str, Curve]] = field(default_factory=dict)
    """Curves of the validation loss, by set and weights."""
    metrics: dict[tuple[str, str], dict[str, Curve]] = field(default_factory=dict)
    """Curves of the measurements against true images, by set and weights."""
    rewards: dict[str, Curve] = field(default_factory=dict)
    """Curves of the images that a run with [reward] drew."""

    @property
    def begin(self) -> LogEvent:
        """The last start or resume; empty where the log has none."""
        return self.segments[-1].begin if self.segments else {}

    @property
    def resumes(self) -> list[tuple[float, float]]:
        """Step and time of every resume."""
        begins = (segment.begin for segment in self.segments)
        return [(begin.get("step", 0), begin["time"]) for begin in begins if begin["event"] == "resume"]

    @cached_property
    def step_range(self) -> list[float]:
        """The first and last step of any curve; empty where there is none."""
        curves = [*self.steps.values(), *(curve for each in self.evals.values() for curve in each.values())]
        steps = [step for curve in curves for step in (*curve.nonfinite, *(x for x, _ in curve.extremes))]
        return [min(steps), max(steps)] if steps else []

    @property
    def seconds(self) -> float:
        """The total time of its processes."""
        return sum(float(segment.end - segment.begin["time"]) for segment in self.segments)

    @property
    def seconds_left(self) -> float | None:
        """The time to the last step at the speed since the last start; None if it does not run or logged no step."""
        step = self.last.get("step", {})
        begin = self.begin
        steps = step.get("step", 0) - begin.get("step", 0)
        seconds = step.get("time", 0.0) - begin.get("time", 0.0)
        if self.is_running is False or self.has_ended or "total" not in begin or steps <= 0 or seconds <= 0:
            return None
        return float(seconds / steps * max(0, begin["total"] - step["step"]))

    @property
    def has_ended(self) -> bool:
        """Whether the last process logged that it stopped, or reached the last step."""
        stop = self.last.get("stop")
        step = self.last.get("step")
        if stop is not None and stop["time"] >= self.begin.get("time", -math.inf):
            return True
        return step is not None and bool(step["step"] >= self.begin.get("total", math.inf))

    @property
    def skipped(self) -> int:
        """The number of steps skipped because they were not finite."""
        return int(self.last.get("step", {}).get("skipped", 0))

    @property
    def status(self) -> str:
        """Whether the run has ended, and why."""
        stop = self.last.get("stop")
        step = self.last.get("step")
        if stop is not None and stop["time"] >= self.begin.get("time", -math.inf):
            reason = stop.get("reason", "unknown reason")
            verb = "finished" if reason == "finished" else "stopped"
            return f"{verb} at step {stop.get('step', 0):,}" + ("" if verb == "finished" else f": {reason}")
        if step is None:
            return "no step yet"
        if step["step"] >= self.begin.get("total", math.inf):
            return f"finished at step {step['step']:,}"
        state = {None: "running, or killed", True: "running", False: "not running"}[self.is_running]
        return f"at step {step['step']:,}; {state}"


def read_preview(folder: Path, most_lines: int = PREVIEW_LINES) -> RunReport:
    """Return what a choice of lines of a long log says: spikes, evaluations and resumes between them are missing."""
    lines = chosen_lines(folder / "log.jsonl", most_lines)
    try:
        return replace(_ReadLog(folder, BytesIO(b"".join(lines))).report(), is_preview=True)
    except UserError as error:  # its line number is not that of the log
        raise UserError(f"{folder / 'log.jsonl'}: a line is damaged; `sd3-light report` says which") from error


def read_run(folder: Path) -> RunReport:
    """Read the log.jsonl of a run. Raises UserError where there is none."""
    return RunReader(folder).read()


class RunReader:
    """Reads the log.jsonl of a run, later only the lines that were added. Several threads may use it.

    The whole log is read again after a start or resume, which may repeat steps, and after another log has replaced it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._version: tuple[int, ...] = ()
        self._log: _ReadLog | None = None
        self._result: RunReport | str = ""
        self._thread: threading.Thread | None = None
        self._preview: RunReport | None = None

    def read(self) -> RunReport:
        """Return what the log says now; the same object while the log is the same. Raises UserError."""
        with self._lock, open_log(self.folder / "log.jsonl") as file:
            version = _version(file)
            if version != self._version:
                self._result = self._read(file)
                self._version = version
            if isinstance(self._result, str):
                raise UserError(self._result)
            return self._result

    def look(self, quick_bytes: int = QUICK_BYTES) -> RunReport:
        """Return what the log says now; a preview while a thread reads very many new bytes. Raises UserError."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._preview = None
            return self.read()
        if self._thread is None:
            if self._num_new_bytes() <= quick_bytes:
                return self.read()
            self._preview = read_preview(self.folder, max(50, PREVIEW_LINES * quick_bytes // QUICK_BYTES))
            self._thread = threading.Thread(target=self._read_alone, daemon=True)
            self._thread.start()
        return self._preview or self.read()

    def window(self, first: float, last: float, names: Iterable[str]) -> dict[str, Curve]:
        """Return finer curves of some fields between two steps; none while the log is being read."""
        if not self._lock.acquire(blocking=False):
            return {}
        try:
            with open_log(self.folder / "log.jsonl") as file:
                return self._log.window(file, first, last, names) if self._log is not None else {}
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Wait for the thread that reads the log, if there is one."""
        if self._thread is not None:
            self._thread.join()

    def _num_new_bytes(self) -> int:
        with self._lock, open_log(self.folder / "log.jsonl") as file:
            if _version(file) == self._version:
                return 0
            return self._log.num_new_bytes(file) if self._log is not None else os.fstat(file.fileno()).st_size

    def _read_alone(self) -> None:
        """Read the log while no other thread does: several would only slow the pages down."""
        time.sleep(_PAUSE_SECONDS)  # the page is sent first
        with _ONE_READS, suppress(UserError, OSError):  # the next look raises it
            self.read()

    def _read(self, file: BinaryIO) -> RunReport | str:
        """Return the report, or why the log cannot be read."""
        log = self._log
        self._log = None
        try:
            if log is None or not log.extend(file):
                file.seek(0)
                log = _ReadLog(self.folder, file)
        except UserError as error:
            return str(error)
        self._log = log
        return log.report()


def _version(file: BinaryIO) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class _ReadLog:
    """What the lines of a log say that were read so far."""

    def __init__(self, folder: Path, file: BinaryIO) -> None:
        self._path = folder / "log.jsonl"
        self._read = RunReport(folder)
        self._counts = counts = _FirstPass(self._read)
        for number, line in complete_lines(file):
            counts.add(None if line.startswith(STEP_PREFIX) else parse_line(self._path, number, line))
        counts.set_limits()
        self._steps = CurveBuilder(counts.steps, STEP_FIELDS, STEP_GROUPS)
        self._rare = {key: CurveBuilder(count, *_RARE_FIELDS[key[0]]) for key, count in counts.rare.items()}
        self._num_steps = 0
        self._last_step = (0, b"")
        self._end = 0
        self._first_line = b""
        self._last_line = b""
        self._segment: RunSegment | None = None
        self._marks = LineMarks()
        file.seek(0)
        segments = iter(self._read.segments)
        for number, line in islice(complete_lines(file), counts.lines):  # the run may have logged more meanwhile
            self._pass(line)
            if number > counts.first_line:
                event = self._event(number, line)
                if event["event"] in _SEGMENT_STARTS:
                    self._segment = next(segments, None)
                self._add(event, number, line)

    def extend(self, file: BinaryIO) -> bool:
        """Add the lines after those that were read. Returns False where the log must be read from its start."""
        if not self._is_start_of(file):
            return False
        file.seek(self._end)
        for number, line in complete_lines(file, self._counts.lines + 1):
            event = self._event(number, line)
            if event["event"] in _SEGMENT_STARTS:
                return False
            self._pass(line)
            self._counts.add(event)
            self._add(event, number, line)
        return True

    def num_new_bytes(self, file: BinaryIO) -> int:
        """Return how many bytes `extend` would read, or those of the whole log if it is another one."""
        size = file.seek(0, os.SEEK_END)
        return size - self._end if self._is_start_of(file) else size

    def window(self, file: BinaryIO, first: float, last: float, names: Iterable[str]) -> dict[str, Curve]:
        """Return the curves of fields between two steps; none where the log is another one or they are too long."""
        begin, end, num_lines = self._marks.range_of(first, last)
        if not self._is_start_of(file) or not num_lines or (end or self._end) - begin.offset > MOST_FINE_BYTES:
            return {}
        names = list(names)
        groups = {name.partition("/")[0] for name in names if "/" in name} & {*STEP_GROUPS}
        builder = CurveBuilder(num_lines, [name for name in names if name in STEP_FIELDS], sorted(groups))
        segments = iter(self._read.segments[begin.segment :])
        segment = next(segments, None)
        every = max(1, num_lines // MOST_FINE_PARSED)
        file.seek(begin.offset)
        offset = begin.offset
        for number, line in complete_lines(file, begin.number):
            if offset >= (end or self._end):
                break
            offset += len(line)
            scanned = scan_step(line) if number % every and line.startswith(STEP_PREFIX) else None
            event = scanned or parse_line(self._path, number, line)
            if event["event"] in _SEGMENT_STARTS and number > begin.number:
                segment = next(segments, segment)
            is_kept = segment is None or event.get("step", 0) <= segment.limit
            if event["event"] == "step" and is_kept and first <= event["step"] <= last:
                builder.add(event["step"], event)
        return {name: curve for name, curve in builder.curves.items() if name in names}

    def report(self) -> RunReport:
        """Return the report of the lines so far; later lines do not change it."""
        read = self._read
        last = dict(self._read.last)
        if self._last_step[1]:
            last["step"] = parse_line(self._path, *self._last_step)
        return replace(
            read,
            segments=[replace(segment) for segment in read.segments],
            last=last,
            events={kind: events.copy() for kind, events in read.events.items()},
            samples={weights: events.copy() for weights, events in read.samples.items()},
            steps=self._steps.curves,
            evals=self._rare_curves("eval"),
            metrics=self._rare_curves("metrics"),
            rewards=self._rare_curves("reward").get(("", ""), {}),
        )

    def _rare_curves(self, kind: str) -> dict[tuple[str, str], dict[str, Curve]]:
        """Return the curves of a kind of event by set and weights."""
        builders = ((key[1:], builder) for key, builder in self._rare.items() if key[0] == kind)
        return {key: curves for key, builder in builders if (curves := builder.curves)}

    def _is_start_of(self, file: BinaryIO) -> bool:
        """Return whether a log starts with the lines that were read: two with their times are enough to compare."""
        file.seek(0)
        if file.read(len(self._first_line)) != self._first_line:
            return False
        file.seek(self._end - len(self._last_line))
        return file.read(len(self._last_line)) == self._last_line

    def _pass(self, line: bytes) -> None:
        self._first_line = self._first_line or line[:_COMPARED_BYTES]
        self._last_line = line[-_COMPARED_BYTES:]
        self._end += len(line)

    def _event(self, number: int, line: bytes) -> LogEvent:
        """Return the event of a line; of very many steps most are scanned instead of parsed."""
        if line.startswith(STEP_PREFIX):
            self._num_steps += 1
            every = max(1, self._counts.steps // MOST_PARSED)
            scanned = scan_step(line) if self._num_steps % every else None
            if scanned is not None:
                return scanned
        return parse_line(self._path, number, line)

    def _add(self, event: LogEvent, number: int, line: bytes) -> None:
        """Add an event to the curves, unless a resumed run repeated it."""
        segment = self._segment
        kind = event["event"]
        if segment is not None:
            segment.end = max(segment.end, event.get("time", segment.end))
            if event.get("step", 0) > segment.limit:
                return
        if kind == "step":
            self._steps.add(event["step"], event)
            self._last_step = number, line
            index = self._read.segments.index(segment) if segment is not None and self._marks.is_due else 0
            self._marks.add(LineMark(event["step"], self._end - len(line), number, index))
        elif kind in _RARE_FIELDS:
            builder = self._rare.setdefault(_rare_key(event), CurveBuilder(0, *_RARE_FIELDS[kind]))
            builder.add(event.get("step", 0), event)
            if kind == "eval":
                self._read.last["eval"] = event


def parse_line(path: Path, number: int, line: bytes) -> LogEvent:
    """Return the event of a line, which must have its time, and its step if it is one. Measurements are floats."""
    event = parse_event(path, number, line)
    missing = [name for name in ("time", "step") if name not in event and (name == "time" or event["event"] == name)]
    if missing:
        raise UserError(f"{path}: line {number} has no {missing[0]}; remove that line")
    for name in [name for name in event if name in _NUMBERS and not isinstance(event[name], int | float)]:
        value = event.pop(name)
        if value is not None:  # null: not measured
            event[name] = float(value)
    return event


@dataclass
class _FirstPass:
    """Collects the rare events into ``report`` and counts the frequent ones."""

    report: RunReport
    lines: int = 0
    first_line: int = 0
    steps: int = 0
    rare: Counter[_RareKey] = field(default_factory=Counter)

    def add(self, event: LogEvent | None) -> None:
        """Add a line; None is a step that was not parsed."""
        self.lines += 1
        if event is None or event["event"] == "step":
            self.steps += 1
            return
        kind = event["event"]
        if kind in _RARE_FIELDS:
            self.rare[_rare_key(event)] += 1
            return
        if kind == "start":
            self._forget_earlier_run()
        if kind in _SEGMENT_STARTS:
            self.report.segments.append(RunSegment(event, event["time"]))
        if kind == "sample":
            self.report.samples.setdefault(str(event.get("weights", "")), EvenSample()).add(event)
        else:
            self.report.events.setdefault(kind, EvenSample()).add(event)
        self.report.last[kind] = event

    def _forget_earlier_run(self) -> None:
        report = self.report
        report.earlier_runs += bool(report.segments)
        report.segments.clear()
        for events in (report.last, report.events, report.samples, self.rare):
            events.clear()
        self.steps = 0
        self.first_line = self.lines - 1

    def set_limits(self) -> None:
        """Limit each segment to the steps before every later segment."""
        limit = math.inf
        for segment in reversed(self.report.segments):
            segment.limit = limit
            limit = min(limit, segment.begin.get("step", math.inf))


def _rare_key(event: LogEvent) -> _RareKey:
    return event["event"], str(event.get("set", "")), str(event.get("weights", ""))
