"""Measurements over the steps since the last log record: mean losses, speed, utilisation and memory."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sd3_light.data.loader import LoadTimes
from sd3_light.engines.protocol import StepNumbers, StepResult
from sd3_light.flow.objective import BAND_NAMES, NUM_BANDS
from sd3_light.system import host_bytes
from sd3_light.train.idle import DeviceGaps, HostTimes

_GIB = 1 << 30


@dataclass
class Window:
    """Sums over the steps since the last record. Checkpoints hold it, so a resumed run logs the same means."""

    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    bands: list[float] = field(default_factory=lambda: [0.0] * NUM_BANDS)
    counts: list[float] = field(default_factory=lambda: [0.0] * NUM_BANDS)

    def add(self, numbers: StepNumbers) -> None:
        """Add a step that was taken."""
        self.steps += 1
        for name, value in {**numbers.losses, "grad_norm": numbers.grad_norm}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.bands = [a + b for a, b in zip(self.bands, numbers.bands, strict=True)]
        self.counts = [a + b for a, b in zip(self.counts, numbers.band_counts, strict=True)]

    def means(self) -> dict[str, Any]:
        """Return mean losses and gradient norm, and the mean loss of every band of timesteps that had samples."""
        means: dict[str, Any] = {name: value / self.steps for name, value in self.sums.items()}
        if not self.steps:
            means = {"loss": math.nan, "grad_norm": math.nan}
        bands = zip(BAND_NAMES, self.bands, self.counts, strict=True)
        return {**means, "steps": self.steps, "band": {name: total / n for name, total, n in bands if n > 0}}


@dataclass(frozen=True)
class _Clock:
    """Seconds of the host since the meter was made, and the time."""

    time: float
    excluded: float = 0.0
    waited: float = 0.0
    launched: float = 0.0
    launched_cpu: float = 0.0
    synchronized: float = 0.0
    loaded: float = 0.0


@dataclass(frozen=True)
class Mark:
    """The end of a record's steps: how much was queued until then, and the host's clock."""

    step: int
    steps: int
    samples: int
    flops: int
    clock: _Clock


class Meter:
    """Counts steps and time. Results are read as they arrive from the device, without waiting for it.

    ``gaps`` measures the device's waits, and ``load`` the loader's time; without them waiting for data is the time in
    `waiting`.
    """

    def __init__(
        self,
        world_size: int = 1,
        peak_flops: float | None = None,
        window: Mapping[str, Any] | None = None,
        gaps: DeviceGaps | None = None,
        load: LoadTimes | None = None,
    ) -> None:
        self.world_size = world_size
        self.peak_flops = peak_flops
        self.window = Window(**(window or {}))
        self.times = HostTimes()
        """Of the last record; empty without a GPU."""
        self._gaps = gaps
        self._load = load
        self._pending: deque[tuple[int, StepResult]] = deque()
        self._last: StepResult | None = None  # of the steps that arrived
        self._last_recorded: StepResult | None = None
        self._clock = _Clock(0.0)
        self._step = self._steps = self._samples = self._flops = 0
        self._start = self.mark()

    def _read_clock(self) -> _Clock:
        loaded = 0.0 if self._load is None else self._load.waited
        return replace(self._clock, time=time.perf_counter(), loaded=loaded)

    def _count(self, **seconds: float) -> None:
        self._clock = replace(self._clock, **{name: getattr(self._clock, name) + s for name, s in seconds.items()})

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the block as time spent waiting for data."""
        start = time.perf_counter()
        yield
        self._count(waited=time.perf_counter() - start)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Measure the block as time spent queueing a step; data that arrive meanwhile are waited for, not launched."""
        start = self._read_clock()
        cpu = time.thread_time()
        with nullcontext() if self._gaps is None else self._gaps.step():
            yield
        stop = self._read_clock()
        launched = stop.time - start.time - (stop.loaded - start.loaded)
        self._count(launched=launched, launched_cpu=time.thread_time() - cpu)

    @contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Measure the block as time spent waiting for the device."""
        start = time.perf_counter()
        yield
        self._count(synchronized=time.perf_counter() - start)

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the block's time from the training speed."""
        start = time.perf_counter()
        yield
        self._count(excluded=time.perf_counter() - start)
        if self._gaps is not None:
            self._gaps.exclude()

    def add(self, step: int, result: StepResult, samples: int, flops: int) -> None:
        """Add a step that was sent to the device; ``samples`` and ``flops`` are those of all processes."""
        self._pending.append((step, result))
        self._step = step
        self._steps += 1
        self._samples += samples
        self._flops += flops

    def mark(self) -> Mark:
        """Return the end of a record: it covers the steps that were added until now."""
        return Mark(self._step, self._steps, self._samples, self._flops, self._read_clock())

    def has_arrived(self, until: Mark) -> bool:
        """Return whether the numbers of all steps until a mark have arrived."""
        return all(result.ready for step, result in self._pending if step <= until.step)

    def collect(self, wait: bool, until: Mark | None = None) -> list[tuple[int, StepNumbers]]:
        """Return the steps whose numbers arrived since the last call, in order; with ``wait`` wait for all of them.

        ``until`` leaves out later steps.
        """
        arrived = []
        last = self._step if until is None else until.step
        with self.synchronizing():
            while self._pending and self._pending[0][0] <= last and (wait or self._pending[0][1].ready):
                step, self._last = self._pending.popleft()
                numbers = self._last.read()
                if numbers.taken:
                    self.window.add(numbers)
                arrived.append((step, numbers))
        return arrived

    def record(self, until: Mark | None = None) -> dict[str, Any]:
        """Return everything measured since the last record, until a mark or now, and start again.

        All results until then must be collected, and none after it.
        """
        until = self.mark() if until is None else until
        assert not self._pending or self._pending[0][0] > until.step, "collect before a record"
        self.times = HostTimes()
        fields = {**self.window.means(), **self._speed(self._start, until), **memory()}
        self.window = Window()
        self._start = until
        self._last_recorded = self._last
        return fields

    def _speed(self, start: Mark, stop: Mark) -> dict[str, Any]:
        names = vars(stop.clock)
        first = start.clock
        last = stop.clock
        past = _Clock(**{name: getattr(last, name) - getattr(first, name) for name in names})
        seconds = max(self._device_seconds(first) - past.excluded, 1e-9)
        steps = stop.steps - start.steps
        rate = (stop.samples - start.samples) / seconds
        flops = stop.flops - start.flops
        flops_per_second = flops / seconds / self.world_size
        speed = {
            "samples_per_second": rate,
            "images_per_second_per_gpu": rate / self.world_size,
            **self._waits(past, seconds, start, stop),
            "seconds": seconds / max(1, steps),
            "tflops_per_gpu": flops_per_second / 1e12,
        }
        return speed if self.peak_flops is None else {**speed, "mfu": flops_per_second / self.peak_flops}

    def _device_seconds(self, start: _Clock) -> float:
        """Return the seconds from the last step of the last record to that of this one, by the device's own clock.

        A record may be written before or after the host has queued further steps, so the host's clock would be wrong.
        It is used on CPUs, and for the first record, until now: the numbers of its last step have just arrived.
        """
        seconds = None
        if self._last is not None and self._last_recorded is not None:
            seconds = self._last.seconds_since(self._last_recorded)
        return time.perf_counter() - start.time if seconds is None else seconds

    def _waits(self, past: _Clock, seconds: float, start: Mark, stop: Mark) -> dict[str, Any]:
        """Return ``data_wait``; with a GPU also which steps waited for the host, and what the main process does."""
        if self._gaps is None:
            return {"data_wait": min(1.0, past.waited / seconds)}
        steps = stop.steps - start.steps
        idle, bound = self._gaps.take(stop.steps)
        data = past.waited if self._load is None else past.loaded
        other = max(0.0, seconds - data - past.launched - past.synchronized)
        times = HostTimes(steps, bound, seconds, idle, data, past.launched, past.launched_cpu, other)
        self.times = times
        bound_by_host = {"host_bound": times.bound_share} if self._gaps.sees_updates else {}
        return {"data_wait": times.idle_share, **bound_by_host, "host_seconds": times.per_step()}


def memory() -> dict[str, float]:
    """Return the host memory of this process and its workers, and the peak GPU memory since the last call, in GiB."""
    used = {"host_memory_gib": host_bytes() / _GIB}
    if torch.cuda.is_available():
        used["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / _GIB
        used["gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / _GIB
        torch.cuda.reset_peak_memory_stats()
    return used
