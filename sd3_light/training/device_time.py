"""How long a GPU works on a step, without the time in which it waits for the host."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

FIRST_PROBES = (3, 10, 30)
"""Numbers of steps after which there may be a probe."""
PROBE_EVERY = 100
"""Steps between later probes."""
_LONGEST_SLEEP = 2.0
_CYCLES_PER_SECOND = 2e9  # no less than a GPU's clock, so a sleep is long enough


class DeviceQueue(Protocol):
    """The work that the host queues for a device, in order."""

    def mark(self) -> Any:
        """Queue an event with ``query()`` and ``elapsed_time(later)`` in milliseconds."""

    def sleep(self, seconds: float) -> None:
        """Let the device do nothing for a while."""


class CudaQueue:
    """The CUDA stream that is current where this is made; autograd's threads may have others."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def sleep(self, seconds: float) -> None:
        """Queue a kernel that spins."""
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))


class StepTimer:
    """Measures the device's own time per unit of work, from events between the parts of a step.

    The time between two events is the device's own if it had not reached the first one when the host had queued the
    second, because then no kernel waited for the host. A part is shorter than a step because a queue is limited, to
    about 1,000 kernels on NVIDIA GPUs: a host that is far ahead of its device is still never ahead by a long step.
    The first part of a step is what was queued since the previous step, such as the next inputs; while it is not
    measured, it counts as zero.

    A host that is slower than its device is not ahead at all. Then a probe makes the device sleep before each part
    that was not measured, while the host queues it. A part that is longer than the queue stays unmeasured, and its
    sleep is as long as the part, because the host waits for the device while it queues it. So there is no other probe
    before twice the number of steps after which one failed. Events and queries do not wait for the device.

    A rank's sleep makes the others wait for its gradients. So ranks probe only after these numbers of steps, and a rank
    that does not probe discards its measurement of that step.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._step: list[_Interval] = []
        self._last_step: list[_Interval] = []
        self._pending: deque[tuple[list[_Interval], float]] = deque()
        self._parts: list[_Part] = []
        self._sleeps: list[float] = []  # before each part of a probe, from the last step; 0: it was measured
        self._num_steps, self._probe_from = 0, 0
        self._probes = self._discards = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the step that the block queues."""
        if not self._step:
            self._begin_part(self._queue.mark())
        self.split()
        yield
        stop = self._end_part()
        self._last_step, self._step = self._step, []
        self._plan_probe(self._last_step)
        self._begin_part(stop)

    def exclude(self) -> None:
        """Do not count what was queued since the last step."""
        if self._step:
            self._step[0].is_excluded = True

    def _plan_probe(self, step: "list[_Interval]") -> None:
        """Decide whether the next step is a probe, of this or other ranks, and where it sleeps."""
        is_measured = [part.is_own or part.is_excluded for part in step]
        needed = [min(1.25 * part.queueing, _LONGEST_SLEEP) for part in step]
        self._sleeps = [0.0 if known else sleep for known, sleep in zip(is_measured, needed, strict=True)]
        if all(is_measured):
            self._probe_from = self._num_steps + PROBE_EVERY // 2
        elif self._probes:
            self._probe_from = 2 * self._num_steps
        self._num_steps += 1
        may_probe = self._num_steps in FIRST_PROBES or self._num_steps % PROBE_EVERY == 0
        self._probes = may_probe and self._num_steps >= self._probe_from
        self._discards = may_probe and not self._probes

    def split(self) -> None:
        """End a part of the step and begin the next, from any thread. Another number of parts discards all rates."""
        self._begin_part(self._end_part())

    def _begin_part(self, start: Any) -> None:
        number = len(self._step)
        if self._probes and number < len(self._sleeps) and self._sleeps[number]:
            self._queue.sleep(self._sleeps[number])
            start = self._queue.mark()
        self._step.append(_Interval(start, time.perf_counter()))

    def _end_part(self) -> Any:
        interval = self._step[-1]
        interval.stop = self._queue.mark()
        interval.is_own = not (self._discards or interval.is_excluded or interval.start.query())
        interval.queueing = time.perf_counter() - interval.began
        return interval.stop

    def add(self, work: float) -> None:
        """Set the amount of work of the last step."""
        if any(interval.is_own for interval in self._last_step):
            self._pending.append((self._last_step, work))
        self._read_events()

    def own_seconds(self, work: float) -> float | None:
        """Return the device's own time for an amount of work, by the latest measurements; None before the first."""
        self._read_events()
        for part in self._parts:
            part.conclude()
        between_steps, *rates = [part.rate for part in self._parts] or [None]
        known = [rate for rate in rates if rate is not None]
        return (sum(known) + (between_steps or 0.0)) * work if known and len(known) == len(rates) else None

    def _read_events(self) -> None:
        """Add the measured parts of the steps that the device has finished."""
        while self._pending and self._pending[0][0][-1].stop.query():
            step, amount = self._pending.popleft()
            if len(step) != len(self._parts):
                self._parts = [_Part() for _ in step]
            for part, interval in zip(self._parts, step, strict=True):
                if interval.is_own:
                    part.seconds += interval.start.elapsed_time(interval.stop) / 1000
                    part.work += amount


@dataclass
class _Interval:
    """A part of one step: the events around it, and when the host began to queue it and how long it took."""

    start: Any
    began: float
    stop: Any = None
    is_own: bool = False
    is_excluded: bool = False
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
