"""Lines of a long log without reading all of it: where steps are, a choice of lines, its last lines."""

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sd3_light.runlog.log import open_log

LogEvent = dict[str, Any]

STEP_PREFIX = b'{"event": "step",'
"""How `RunLog` starts a step's line."""

_SCANNED = {name: f'"{name}": '.encode() for name in ("step", "loss", "grad_norm")}
_MOST_MARKS = 20_000
_HEAD_BYTES = 1 << 16
_TAIL_BYTES = 1 << 18
_PREVIEW_BYTES = 1 << 15  # at each end
_CHOSEN_BYTES = 1 << 14  # in which such a line is looked for


def scan_step(line: bytes) -> LogEvent | None:
    """Return the fields of a step that may spike, without parsing JSON, which is slow; None for an unusual line."""
    event: LogEvent = {"event": "step"}
    for name, prefix in _SCANNED.items():
        start = line.find(prefix) + len(prefix)
        try:
            event[name] = float(line[start : line.find(b",", start)].strip(b'"'))
        except ValueError:
            return None
    return event if float(event["step"]).is_integer() else None


def chosen_lines(path: Path, most: int) -> list[bytes]:
    """Return the lines at both ends of a log, and ``most`` evenly spaced ones; repeated steps as last logged."""
    with open_log(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = min(size, _PREVIEW_BYTES)
        tail = max(head, size - _PREVIEW_BYTES)
        os.posix_fadvise(file.fileno(), head, tail - head, os.POSIX_FADV_RANDOM)  # reads no more than the lines
        lines = _lines_between(file, 0, head)
        for index in range(1, most if tail > head else 0):
            start = head + (tail - head) * index // most
            lines += _lines_between(file, start, min(tail, start + _CHOSEN_BYTES))[:1]
        lines += _lines_between(file, tail, size)
    return _without_repeats(lines)


def ends_of(path: Path, most: int, kinds: Iterable[str]) -> tuple[bytes, list[bytes]]:
    """Return the first line of a log, and its last ``most`` lines after the last ones of some kinds further up.

    Only the ends of the file are read. Repeated steps are as last logged.
    """
    with open_log(path) as file:
        first = file.readline(_HEAD_BYTES)
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, len(first) - 1, size - _TAIL_BYTES))
        rest, *last = file.read().rsplit(b"\n", most + 1)
    starts = [rest.rfind(f'\n{{"event": "{kind}"'.encode()) + 1 for kind in kinds]
    rare = [rest[start:].partition(b"\n")[0] for start in sorted(starts) if start]
    return first, rare + _without_repeats(last[:-1])


def _without_repeats(lines: Sequence[bytes]) -> list[bytes]:
    """Return the lines without those of steps that later lines repeat."""
    kept: list[bytes] = []
    limit = math.inf
    for line in reversed(lines):
        scanned = scan_step(line) if line.startswith(STEP_PREFIX) else None
        if scanned is None or scanned["step"] < limit:
            kept.append(line)
            limit = scanned["step"] if scanned else limit
    return kept[::-1]


def _lines_between(file: BinaryIO, start: int, end: int) -> list[bytes]:
    """Return the complete lines between two offsets."""
    file.seek(max(0, start - 1))  # with the line break before a line that begins at the start
    lines = file.read(max(0, end - file.tell())).split(b"\n")
    return [line + b"\n" for line in lines[1 if start > 0 else 0 : -1]]


class LineMark(NamedTuple):
    """Where the line of a step is: its offset, its number, and that of its segment."""

    step: float
    offset: int
    number: int
    segment: int


class LineMarks:
    """Where steps are in a log: every 64th of them, of very many fewer."""

    def __init__(self) -> None:
        self._every = 64
        self._seen = 0
        self._marks: list[LineMark] = []

    @property
    def is_due(self) -> bool:
        """Whether the next step is marked."""
        return self._seen % self._every == 0

    def add(self, mark: LineMark) -> None:
        """Add a step."""
        if self.is_due:
            self._marks.append(mark)
        self._seen += 1
        if len(self._marks) > _MOST_MARKS:
            self._marks = self._marks[::2]
            self._every *= 2

    def range_of(self, first: float, last: float) -> tuple[LineMark, int | None, int]:
        """Return the mark before the first step, the offset after the last one (None: the end), and their number."""
        if not self._marks:
            return LineMark(0, 0, 1, 0), None, 0
        start = max(0, bisect_left(self._marks, first, key=attrgetter("step")) - 1)
        stop = bisect_right(self._marks, last, key=attrgetter("step"))
        end = self._marks[stop].offset if stop < len(self._marks) else None
        return self._marks[start], end, (stop - start) * self._every
