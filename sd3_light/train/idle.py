"""How long a GPU waits for the host, why, and what to change."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from sd3_light.data.loader import LoadTimes
from sd3_light.engines import Engine
from sd3_light.engines.torch import TorchEngine

WARN_ABOVE = 0.1
"""Idle share above which a run prints advice."""
BOUND_ABOVE = 0.5
"""Share of steps that wait for the host above which a run prints advice."""
WARN_WINDOW = 50
"""Number of steps over which the shares are measured; the first ones, in which processes start, do not count."""


def cuda_event() -> torch.cuda.Event:
    """Record an event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class DeviceGaps:
    """Measures the device's waits for the host from three events per step; it never waits for the device.

    The device is idle between two steps if it has reached the end of the first when the host begins to queue the
    second: then the time between these events counts, with the preparation of inputs on the device, which is short.
    Inside a step single kernels may wait for the host. How long is not known, but that they do: the device has finished
    the backward pass when the host has queued the optimizer's work behind it, so the host is not ahead. ``mark``
    records an event with ``query()`` and ``elapsed_time(later)`` in milliseconds.
    """

    def __init__(self, mark: Callable[[], Any] = cuda_event) -> None:
        self._mark = mark
        self._end: Any = None  # of the last step
        self._backward: Any = None  # of the step that is being queued
        self._gaps: deque[tuple[int, Any, Any]] = deque()
        self._bound: deque[int] = deque()
        self._steps = 0
        self.sees_updates = False
        """Whether `backward_queued` was ever called, so that steps bound by the host are counted."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the step that the block queues, and the wait before it."""
        self._steps += 1
        start = self._mark()
        if self._end is not None and self._end.query():
            self._gaps.append((self._steps, self._end, start))
        self._backward = None
        yield
        if self._backward is not None and self._backward.query():
            self._bound.append(self._steps)
        self._end = self._mark()

    def backward_queued(self) -> None:
        """Mark the end of a step's backward pass, before the optimizer changes weights."""
        self.sees_updates = True
        self._backward = self._mark()

    def exclude(self) -> None:
        """Do not count the wait before the next step."""
        self._end = None

    def take(self, until: int) -> tuple[float, int]:
        """Return the idle seconds before steps, and the steps bound by the host, up to step ``until``, once.

        The device must have finished these steps.
        """
        idle = 0.0
        while self._gaps and self._gaps[0][0] <= until:
            _, end, start = self._gaps.popleft()
            idle += end.elapsed_time(start) / 1000
        bound = 0
        while self._bound and self._bound[0] <= until:
            self._bound.popleft()
            bound += 1
        return idle, bound


def watch_updates(engine: Engine, gaps: DeviceGaps) -> None:
    """Let ``gaps`` see the updates of an engine that queues them without waiting for its device.

    Some optimizers wait until the gradients are known, and so does DeepSpeed: the device has then always finished.
    """
    if isinstance(engine, TorchEngine) and engine.optimizer.skips_on_device:
        engine.optimizer.before_update = gaps.backward_queued


@dataclass
class HostTimes:
    """Seconds of some steps: in total, in which the GPU was idle between steps, and the main process's by what it does.

    It waits for ``data``, queues kernels (``launch``; ``launch_cpu`` is the CPU time of that), or does something
    ``other``. Waiting for the GPU is none of these. ``bound`` counts the steps whose kernels waited for the host.
    """

    steps: int = 0
    bound: int = 0
    seconds: float = 0.0
    idle: float = 0.0
    data: float = 0.0
    launch: float = 0.0
    launch_cpu: float = 0.0
    other: float = 0.0

    def add(self, more: "HostTimes") -> None:
        """Add the times of further steps."""
        for name, value in vars(more).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def idle_share(self) -> float:
        """Share of the time in which the GPU has nothing to do between steps."""
        return min(1.0, self.idle / self.seconds) if self.seconds else 0.0

    @property
    def bound_share(self) -> float:
        """Share of the steps whose kernels wait for the host."""
        return self.bound / max(1, self.steps)

    def per_step(self) -> dict[str, float]:
        """Return the main process's seconds per step."""
        return {name: getattr(self, name) / max(1, self.steps) for name in ("data", "launch", "other")}


@dataclass
class IdleAdvice:
    """Names the cause, once, when a GPU is idle for more than `WARN_ABOVE` of the time or most steps wait for the host.

    ``workers`` and the names of the settings are those of the run, ``load`` the times of its loader.
    """

    workers: int
    load: LoadTimes = field(default_factory=LoadTimes)
    workers_key: str = "num_dataloader_workers"
    batch_key: str = "micro_batch_size_per_gpu"
    _recent: HostTimes = field(default_factory=HostTimes)
    _started: bool = False
    _given: bool = False

    def of(self, times: HostTimes) -> str | None:
        """Add the times of further steps; return the advice when it is due."""
        self._recent.add(times)
        if self._given or self._recent.steps < WARN_WINDOW:
            return None
        recent = self._recent
        self._recent = HostTimes()
        counts = self._started
        self._started = True
        if not counts:
            return None
        text = self._text(recent)
        self._given = text is not None
        return text

    def _text(self, times: HostTimes) -> str | None:
        if times.idle_share > WARN_ABOVE:
            longest = max(("data", "launch", "other"), key=lambda name: getattr(times, name))
            cause = self._cause_in_loader() if longest == "data" else self._cause_in_process(times, longest)
            return f"the GPU was idle for {times.idle_share:.0%} of the last {times.steps} steps: {cause}"
        if times.bound_share > BOUND_ABOVE:
            cause = self._cause_in_process(times, "launch")
            return (
                f"the GPU waited for the host within {times.bound_share:.0%} of the last {times.steps} steps: {cause}"
            )
        return None

    def _cause_in_process(self, times: HostTimes, longest: str) -> str:
        milliseconds = 1000 * getattr(times, longest) / times.steps
        if longest == "other":
            return f"the main process spends {milliseconds:.1f} ms per step between steps; raise logging_steps"
        if times.launch_cpu < 0.7 * times.launch:
            share = times.launch_cpu / times.launch
            return (
                f"the main process got only {share:.0%} of a core while it queued kernels; lower {self.workers_key} "
                f"(now {self.workers} per process), or stop other programs"
            )
        step = 1000 * times.seconds / times.steps
        return (
            f"the batch is too small: queueing the kernels takes {milliseconds:.1f} of {step:.1f} ms per step; "
            f"raise {self.batch_key}"
        )

    def _cause_in_loader(self) -> str:
        load = self.load
        if not self.workers:
            return f"the main process prepares the data; raise {self.workers_key} (now 0)"
        total = load.read + load.prepare
        stalled = load.read - load.read_cpu
        if load.prepare and load.prepare_cpu < 0.7 * load.prepare:
            share = load.prepare_cpu / load.prepare
            return f"the {self.workers} workers got only {share:.0%} of a core each; lower their number, or add cores"
        if total and stalled > 0.5 * total:
            return (
                f"the workers wait for the disk {stalled / total:.0%} of the time; put the cache on a faster disk, or "
                'in memory (cache_residence = "host")'
            )
        return f"the workers are too slow; raise {self.workers_key} (now {self.workers} per process)"
