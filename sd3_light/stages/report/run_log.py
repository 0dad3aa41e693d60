"""Read a run's log into a `RunReport`, in bounded memory however long the log is.

The log is read twice. The first pass collects the rare events (starts, saves, evaluations): they show which records a
resumed run repeated, and how many records there are. The second pass builds the curves.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.runlog.log import log_lines, parse_event
from sd3_light.stages.report.curves import Curve, CurveBuilder

LogEvent = dict[str, Any]

STEP_FIELDS = (
    *("loss", "flow", "text_recon", "layer_sync", "lr", "grad_norm", "param_norm", "samples_per_second", "data_wait"),
    *("mfu", "tflops_per_gpu", "gpu_memory_gib", "gpu_reserved_gib", "host_memory_gib", "seconds"),
)
"""The fields of a step that become curves, where present."""

STEP_GROUPS = ("band", "ema_decay")
EVAL_FIELDS = tuple(
    field for name in ("flow", "fixed") for field in (name, *(f"{name}@0.{tenth}" for tenth in range(1, 10)))
)

METRIC_GROUPS = ("frechet", "kid", "precision", "recall", "retrieval", "distance")
"""The measurements of [metrics], each with value, low and high."""

MOST_EVENTS = 300
"""About this many events of one kind are kept, spread evenly."""

MOST_PARSED = 50_000
"""Up to twice this many steps, every line is parsed as JSON; beyond that an even choice, and the other lines are only
scanned for the fields that may spike."""

_SCANNED = {name: f'"{name}": '.encode() for name in ("step", "loss", "grad_norm")}
_STEP_PREFIX = b'{"event": "step",'  # how `RunLog` starts a step's line
_SEGMENT_STARTS = ("start", "resume")


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


@dataclass
class RunReport:
    """The last run of a log. Steps that a resumed run repeated count once, as last logged."""

    folder: Path
    is_running: bool | None = None
    """Whether a process trains in the folder now; None where that is not known."""
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
        step, begin = self.last.get("step", {}), self.begin
        steps = step.get("step", 0) - begin.get("step", 0)
        seconds = step.get("time", 0.0) - begin.get("time", 0.0)
        if self.is_running is False or self.has_ended or "total" not in begin or steps <= 0 or seconds <= 0:
            return None
        return float(seconds / steps * max(0, begin["total"] - step["step"]))

    @property
    def has_ended(self) -> bool:
        """Whether the last process logged that it stopped, or reached the last step."""
        stop, step = self.last.get("stop"), self.last.get("step")
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
        stop, step = self.last.get("stop"), self.last.get("step")
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


def read_run(folder: Path) -> RunReport:
    """Read the log.jsonl of a run. Raises UserError where there is none."""
    path = folder / "log.jsonl"
    report = RunReport(folder)
    counts = _FirstPass(report)
    for number, line in log_lines(path):
        counts.add(None if line.startswith(_STEP_PREFIX) else _parse(path, number, line))
    counts.set_limits()
    _build_curves(path, report, counts)
    return report


def _parse(path: Path, number: int, line: bytes) -> LogEvent:
    """Return the event of a line, which must have its time, and its step if it is one."""
    event = parse_event(path, number, line)
    missing = [name for name in ("time", "step") if name not in event and (name == "time" or event["event"] == name)]
    if missing:
        raise UserError(f"{path}: line {number} has no {missing[0]}; remove that line")
    return event


class _FirstPass:
    """Collects the rare events into ``report`` and counts the frequent ones."""

    def __init__(self, report: RunReport) -> None:
        self.report = report
        self.lines = 0
        self.first_line = 0
        self.steps = 0
        self.evals: Counter[tuple[str, str]] = Counter()
        self.metrics: Counter[tuple[str, str]] = Counter()

    def add(self, event: LogEvent | None) -> None:
        """Add a line; None is a step that was not parsed."""
        self.lines += 1
        if event is None or event["event"] == "step":
            self.steps += 1
            return
        kind = event["event"]
        if kind == "eval":
            self.evals[_eval_key(event)] += 1
            return
        if kind == "metrics":
            self.metrics[_eval_key(event)] += 1
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
        for events in (report.last, report.events, report.samples, self.evals, self.metrics):
            events.clear()
        self.steps, self.first_line = 0, self.lines - 1

    def set_limits(self) -> None:
        """Limit each segment to the steps before every later segment."""
        limit = math.inf
        for segment in reversed(self.report.segments):
            segment.limit = limit
            limit = min(limit, segment.begin.get("step", math.inf))


def _build_curves(path: Path, report: RunReport, counts: _FirstPass) -> None:
    """Read the log a second time and fill in the curves and the last valid step and evaluation."""
    steps = CurveBuilder(counts.steps, STEP_FIELDS, STEP_GROUPS)
    evals = {key: CurveBuilder(count, EVAL_FIELDS) for key, count in counts.evals.items()}
    metrics = {key: CurveBuilder(count, (), METRIC_GROUPS) for key, count in counts.metrics.items()}
    segments = iter(report.segments)
    segment: RunSegment | None = None
    last_step: tuple[int, bytes] | None = None
    for number, line, event in _second_pass(path, counts):
        if event["event"] in _SEGMENT_STARTS:
            segment = next(segments)
        if segment is not None:
            segment.end = max(segment.end, event.get("time", segment.end))
            if event.get("step", 0) > segment.limit:
                continue
        if event["event"] == "step":
            steps.add(event["step"], event)
            last_step = number, line
        elif event["event"] == "eval":
            evals[_eval_key(event)].add(event.get("step", 0), event)
            report.last["eval"] = event
        elif event["event"] == "metrics":
            groups = {name: value for name, value in event.items() if isinstance(value, dict)}
            metrics[_eval_key(event)].add(event.get("step", 0), groups)
    for builder in (steps, *evals.values(), *metrics.values()):
        builder.finish()
    report.steps = steps.curves
    report.evals = {key: builder.curves for key, builder in evals.items() if builder.curves}
    report.metrics = {key: builder.curves for key, builder in metrics.items() if builder.curves}
    if last_step is not None:
        report.last["step"] = _parse(path, *last_step)


def _second_pass(path: Path, counts: _FirstPass) -> Iterator[tuple[int, bytes, LogEvent]]:
    """Yield the last run's lines of the first pass; of very many steps most are scanned instead of parsed."""
    every, steps = max(1, counts.steps // MOST_PARSED), 0
    lines = islice(log_lines(path), counts.first_line, counts.lines)  # the run may have logged more meanwhile
    for number, line in lines:
        scanned = None
        if line.startswith(_STEP_PREFIX):
            steps += 1
            scanned = _scan_step(line) if steps % every else None
        yield number, line, scanned or _parse(path, number, line)


def _scan_step(line: bytes) -> LogEvent | None:
    """Return the fields of a step that may spike, without parsing JSON, which is slow; None for an unusual line."""
    event: LogEvent = {"event": "step"}
    for name, prefix in _SCANNED.items():
        start = line.find(prefix) + len(prefix)
        try:
            event[name] = float(line[start : line.find(b",", start)].strip(b'"'))
        except ValueError:
            return None
    return event


def _eval_key(event: LogEvent) -> tuple[str, str]:
    return str(event.get("set", "")), str(event.get("weights", ""))
