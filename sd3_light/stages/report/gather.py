"""What a run's log tells, in bounded memory however long it is.

It is read twice: first for what is rare (starts, saves, evaluations), which says which records were repeated by a
resumed run and do not count, and how many there are; then for the curves.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from sd3_light.runlog.log import log_lines, read_event
from sd3_light.stages.report.thin import Curve, Thinner

Event = dict[str, Any]

STEP_NAMES = (
    *("loss", "flow", "text_recon", "lr", "grad_norm", "param_norm", "samples_per_second", "data_wait", "mfu"),
    *("tflops_per_gpu", "gpu_memory_gib", "gpu_reserved_gib", "host_memory_gib", "seconds"),
)
"""The fields of a step that are drawn, if they are there."""

STEP_GROUPS = ("band", "ema_decay")
MOST_EVENTS = 300
"""Of one kind of event about so many are kept, spread evenly."""

MOST_WHOLE = 50_000
"""Of up to twice this many steps every line is read whole; of more an even choice, and of the others what may spike."""

_SHARP = {name: f'"{name}": '.encode() for name in ("step", "loss", "grad_norm")}
_STEP = b'{"event": "step",'  # how the log writes the lines that are many
_BEGINS = ("start", "resume")


@dataclass
class Part:
    """What one process did: from a start or resume to the next."""

    begin: Event
    end: float
    """Time of its last line."""
    limit: float = math.inf
    """Steps beyond it were repeated by a later part."""


class Kept:
    """Events of one kind: all of them up to a number, beyond that an even choice with the last one."""

    def __init__(self) -> None:
        self.seen = 0
        self._every = 1
        self._kept: list[Event] = []
        self._last: Event | None = None

    def add(self, event: Event) -> None:
        """One more."""
        if self.seen % self._every == 0:
            self._kept.append(event)
        self.seen += 1
        self._last = event
        if len(self._kept) > 2 * MOST_EVENTS:
            self._kept = self._kept[::2]
            self._every *= 2

    def __iter__(self) -> Iterator[Event]:
        yield from self._kept
        if self._last is not None and self._kept[-1] is not self._last:
            yield self._last


@dataclass
class RunReport:
    """A run as its log tells it. Steps that a resumed run repeated count once, as last logged."""

    folder: Path
    parts: list[Part] = field(default_factory=list)
    last: dict[str, Event] = field(default_factory=dict)
    """The last event of each kind that counts."""
    events: dict[str, Kept] = field(default_factory=dict)
    """Events that are neither points of curves nor samples, by kind."""
    samples: dict[str, Kept] = field(default_factory=dict)
    """Sample grids, by weights."""
    steps: dict[str, Curve] = field(default_factory=dict)
    evals: dict[tuple[str, str], dict[str, Curve]] = field(default_factory=dict)
    """Curves of the validation loss by set and weights."""

    @property
    def resumes(self) -> list[tuple[float, float]]:
        """Step and time of every resume."""
        return [(part.begin.get("step", 0), part.begin["time"]) for part in self.parts if _is_resume(part.begin)]

    @cached_property
    def span(self) -> list[float]:
        """The first and the last step of any curve; nothing where there is none."""
        curves = [*self.steps.values(), *(curve for each in self.evals.values() for curve in each.values())]
        ends = [at for curve in curves for at in (*curve.broken, *(x for x, _ in curve.extremes))]
        return [min(ends), max(ends)] if ends else []

    @property
    def seconds(self) -> float:
        """How long its processes were at work."""
        return sum(float(part.end - part.begin["time"]) for part in self.parts)

    @property
    def skipped(self) -> int:
        """Steps that were not finite."""
        return int(self.last.get("step", {}).get("skipped", 0))


def read_run(folder: Path) -> RunReport:
    """Read a run's log.jsonl. Raises UserError where there is none."""
    path = folder / "log.jsonl"
    report = RunReport(folder)
    survey = _Survey(report)
    for number, line in log_lines(path):
        survey.take(None if line.startswith(_STEP) else read_event(path, number, line))
    survey.finish()
    _draw(path, report, survey)
    return report


class _Survey:
    """The first reading."""

    def __init__(self, report: RunReport) -> None:
        self.report = report
        self.lines = 0
        self.steps = 0
        self.evals: Counter[tuple[str, str]] = Counter()

    def take(self, event: Event | None) -> None:
        """A line; a step is given as None, being one of many."""
        self.lines += 1
        kind = "step" if event is None else event["event"]
        if kind == "step":
            self.steps += 1
        elif event is not None and kind == "eval":
            self.evals[_eval_key(event)] += 1
        elif event is not None:
            if kind in _BEGINS:
                self.report.parts.append(Part(event, event["time"]))
            group, key = self.report.events, kind
            if kind == "sample":
                group, key = self.report.samples, str(event.get("weights", ""))
            group.setdefault(key, Kept()).add(event)
            self.report.last[kind] = event

    def finish(self) -> None:
        """A part's steps count up to where any later part began."""
        limit = math.inf
        for part in reversed(self.report.parts):
            part.limit = limit
            limit = min(limit, part.begin.get("step", math.inf if _is_resume(part.begin) else 0))


def _draw(path: Path, report: RunReport, survey: _Survey) -> None:
    """The second reading: curves of what counts."""
    steps = Thinner(survey.steps, STEP_NAMES, STEP_GROUPS)
    evals = {key: Thinner(count, _eval_names()) for key, count in survey.evals.items()}
    parts = iter(report.parts)
    part: Part | None = None
    last: tuple[int, bytes] | None = None
    for number, line, event in _events(path, survey):
        if event["event"] in _BEGINS:
            part = next(parts)
        if part is not None:
            part.end = max(part.end, event.get("time", part.end))
            if event.get("step", 0) > part.limit:
                continue
        if event["event"] == "step":
            steps.add(event["step"], event)
            last = number, line
        elif event["event"] == "eval":
            evals[_eval_key(event)].add(event.get("step", 0), event)
            report.last["eval"] = event
    for thinner in (steps, *evals.values()):
        thinner.finish()
    report.steps = steps.curves
    report.evals = {key: thinner.curves for key, thinner in evals.items() if thinner.curves}
    if last is not None:
        report.last["step"] = read_event(path, *last)


def _events(path: Path, survey: _Survey) -> Iterator[tuple[int, bytes, Event]]:
    """Every line that was surveyed; of very many steps all but some are only glimpsed at."""
    every, steps = max(1, survey.steps // MOST_WHOLE), 0
    for number, line in islice(log_lines(path), survey.lines):  # the run may have gone on meanwhile
        glimpsed = None
        if line.startswith(_STEP):
            steps += 1
            glimpsed = _glimpse(line) if steps % every else None
        yield number, line, glimpsed or read_event(path, number, line)


def _glimpse(line: bytes) -> Event | None:
    """Of a step only what may spike: reading JSON is what takes the time. None where it is not as expected."""
    found: Event = {"event": "step"}
    for name, mark in _SHARP.items():
        start = line.find(mark) + len(mark)
        try:
            found[name] = float(line[start : line.find(b",", start)].strip(b'"'))
        except ValueError:
            return None
    return found


def _eval_key(event: Event) -> tuple[str, str]:
    return str(event.get("set", "")), str(event.get("weights", ""))


def _eval_names() -> list[str]:
    return ["flow", *(f"flow@0.{tenth}" for tenth in range(1, 10))]


def _is_resume(event: Event) -> bool:
    return bool(event["event"] == "resume")
