"""How long a GPU works on a step, without the time in which it waits for the host."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Measures the device's own time per unit of work, from events before and after a step.

    The time between them is the device's own if it had not reached the first one when the host had queued the last
    kernel, because then no kernel waited for the host. A host that is slower than its device never gets that far ahead:
    then, every `PROBE_EVERY` steps, the device sleeps while the host queues a step.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._pending: deque[tuple[Any, Any, float]] = deque()
        self._last: tuple[Any, Any] | None = None
        self._seconds = self._work = 0.0
        self._rate: float | None = None  # seconds per unit of work, when last measured
        self._unmeasured, self._queueing = 0, 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the step that the block queues."""
        probes = self._unmeasured >= (FIRST_PROBE if self._rate is None else PROBE_EVERY)
        if probes:
            self._queue.sleep(min(1.25 * self._queueing, _LONGEST_SLEEP))
        start, began = self._queue.mark(), time.perf_counter()
        yield
        stop = self._queue.mark()
        self._queueing = time.perf_counter() - began
        measured = not start.query()
        self._last = (start, stop) if measured else None
        self._unmeasured = 0 if measured or probes else self._unmeasured + 1

    def add(self, work: float) -> None:
        """Set the amount of work of the last step."""
        if self._last is not None:
            self._pending.append((*self._last, work))
            self._last = None

    def own_seconds(self, work: float) -> float | None:
        """Return the device's own time for an amount of work, by the latest measurements; None before the first."""
        while self._pending and self._pending[0][1].query():
            start, stop, amount = self._pending.popleft()
            self._seconds += start.elapsed_time(stop) / 1000
            self._work += amount
        if self._work:
            self._rate, self._seconds, self._work = self._seconds / self._work, 0.0, 0.0
        return None if self._rate is None else self._rate * work
