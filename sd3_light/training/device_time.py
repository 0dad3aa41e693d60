"""How long a GPU works on a step, without the time in which it waits for the host."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

FIRST_PROBE = 3
"""Steps before the first probe of a device whose own time is unknown."""
PROBE_EVERY = 100
"""Steps between probes."""
_LONGEST_SLEEP = 2.0
_CYCLES_PER_SECOND = 2e9  # no less than a GPU's clock, so a sleep is long enough


class DeviceQueue(Protocol):
    """The work that the host queues for a device, in order."""

    def mark(self) -> Any:
        """Queue an event with ``query()`` and ``elapsed_time(later)`` in milliseconds."""

    def sleep(self, seconds: float) -> None:
        """Let the device do nothing for a while."""


class CudaQueue:
    """The current CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def sleep(self, seconds: float) -> None:
        """Queue a kernel that spins."""
        torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))


class StepTimer:
    """Measures the device's own time per unit of work, from events between the parts of a step.

    The time between two events is the device's own if it had not reached the first one when the host had queued the
    second, because then no kernel waited for the host. A part is shorter than a step because a queue is limited, to
    about 1,000 kernels on NVIDIA GPUs: a host that is far ahead of its device is still never ahead by a long step. A
    host that is slower than its device is not ahead at all: then, every `PROBE_EVERY` steps, the device sleeps before
    each part while the host queues it.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._step: list[_Interval] = []
        self._pending: deque[tuple[list[_Interval], float]] = deque()
        self._parts: list[_Part] = []
        self._queueing: list[float] = []  # seconds to queue each part of the last step
        self._unmeasured, self._probes = 0, False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the step that the block queues."""
        is_known = bool(self._parts) and all(part.rate is not None for part in self._parts)
        self._probes = self._unmeasured >= (PROBE_EVERY if is_known else FIRST_PROBE)
        self._step = []
        self._begin_part()
        yield
        self._end_part()
        self._queueing = [interval.queueing for interval in self._step]
        is_measured = self._probes or all(interval.is_own for interval in self._step)
        self._unmeasured = 0 if is_measured else self._unmeasured + 1

    def split(self) -> None:
        """End a part of the step and begin the next. All steps have the same number of parts."""
        self._end_part()
        self._begin_part()

    def _begin_part(self) -> None:
        if self._probes and len(self._step) < len(self._queueing):
            self._queue.sleep(min(1.25 * self._queueing[len(self._step)], _LONGEST_SLEEP))
        self._step.append(_Interval(self._queue.mark(), time.perf_counter()))

    def _end_part(self) -> None:
        interval = self._step[-1]
        interval.stop = self._queue.mark()
        interval.is_own = not interval.start.query()
        interval.queueing = time.perf_counter() - interval.began

    def add(self, work: float) -> None:
        """Set the amount of work of the last step."""
        if any(interval.is_own for interval in self._step):
            self._pending.append((self._step, work))

    def own_seconds(self, work: float) -> float | None:
        """Return the device's own time for an amount of work, by the latest measurements; None before the first."""
        while self._pending and self._pending[0][0][-1].stop.query():
            step, amount = self._pending.popleft()
            if len(step) != len(self._parts):
                self._parts = [_Part() for _ in step]
            for part, interval in zip(self._parts, step, strict=True):
                if interval.is_own:
                    part.seconds += interval.start.elapsed_time(interval.stop) / 1000
                    part.work += amount
        for part in self._parts:
            part.conclude()
        rates = [part.rate for part in self._parts if part.rate is not None]
        return sum(rates) * work if rates and len(rates) == len(self._parts) else None


@dataclass
class _Interval:
    """A part of one step: the events around it, and when the host began to queue it and how long it took."""

    start: Any
    began: float
    stop: Any = None
    is_own: bool = False
    queueing: float = 0.0


@dataclass
class _Part:
    """What was measured of a part since the last record, and its seconds per unit of work when last measured."""

    seconds: float = 0.0
    work: float = 0.0
    rate: float | None = None

    def conclude(self) -> None:
        """Turn new measurements into a rate."""
        if self.work:
            self.rate, self.seconds, self.work = self.seconds / self.work, 0.0, 0.0
