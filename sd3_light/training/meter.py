"""Measurements over the steps since the last log record: mean losses, speed, utilisation and memory."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from sd3_light.data.loader import LoadTimes
from sd3_light.engines.protocol import StepNumbers, StepResult
from sd3_light.flow.objective import BAND_NAMES, NUM_BANDS
from sd3_light.system import host_bytes
from sd3_light.training.device_time import StepTimer
from sd3_light.training.idle import HostTimes

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


class Meter:
    """Counts steps and time. Results are read as they arrive from the device, without waiting for it.

    ``timer`` measures the device's own time, and ``load`` the loader's; without them waiting for data is the time in
    `waiting`.
    """

    def __init__(
        self,
        world: int = 1,
        peak_flops: float | None = None,
        window: Mapping[str, Any] | None = None,
        timer: StepTimer | None = None,
        load: LoadTimes | None = None,
    ) -> None:
        self.world, self.peak_flops = world, peak_flops
        self.window = Window(**(window or {}))
        self.times = HostTimes()
        """Of the last record; empty as long as the device's own time is unknown."""
        self._timer, self._load = timer, load
        self._pending: deque[tuple[int, StepResult]] = deque()
        self._reset()

    def _reset(self) -> None:
        self._since, self._excluded, self._waited, self._synchronized = time.perf_counter(), 0.0, 0.0, 0.0
        self._launched = self._launched_cpu = 0.0
        self._loaded = self._load_waits()
        self._samples = self._steps = self._flops = 0

    def _load_waits(self) -> float:
        return 0.0 if self._load is None else self._load.waited

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the block as time spent waiting for data."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Measure the block as time spent queueing a step; data that arrive meanwhile are waited for, not launched."""
        start, cpu, loaded = time.perf_counter(), time.thread_time(), self._load_waits()
        with nullcontext() if self._timer is None else self._timer.step():
            yield
        self._launched += time.perf_counter() - start - (self._load_waits() - loaded)
        self._launched_cpu += time.thread_time() - cpu

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the block's time from the training speed."""
        start = time.perf_counter()
        yield
        self._excluded += time.perf_counter() - start
        if self._timer is not None:
            self._timer.exclude()

    def add(self, step: int, result: StepResult, samples: int, flops: int) -> None:
        """Add a step that was sent to the device; ``samples`` and ``flops`` are those of all processes."""
        self._pending.append((step, result))
        self._steps += 1
        self._samples += samples
        self._flops += flops
        if self._timer is not None:
            self._timer.add(flops or 1)

    def collect(self, wait: bool) -> list[tuple[int, StepNumbers]]:
        """Return the steps whose numbers arrived since the last call, in order; with ``wait`` wait for all of them."""
        arrived, start = [], time.perf_counter()
        while self._pending and (wait or self._pending[0][1].ready):
            step, result = self._pending.popleft()
            numbers = result.read()
            if numbers.taken:
                self.window.add(numbers)
            arrived.append((step, numbers))
        self._synchronized += time.perf_counter() - start
        return arrived

    def record(self) -> dict[str, Any]:
        """Return everything measured since the last record and start again; all results must be collected."""
        assert not self._pending, "collect before a record"
        seconds = max(time.perf_counter() - self._since - self._excluded, 1e-9)
        self.times = HostTimes()
        fields = {**self.window.means(), **self._speed(seconds), **memory()}
        self.window = Window()
        self._reset()
        return fields

    def _speed(self, seconds: float) -> dict[str, Any]:
        rate = self._samples / seconds
        flops = self._flops / seconds / self.world
        speed = {
            "samples_per_second": rate,
            "images_per_second_per_gpu": rate / self.world,
            **self._waits(seconds),
            "seconds": seconds / max(1, self._steps),
            "tflops_per_gpu": flops / 1e12,
        }
        return speed if self.peak_flops is None else {**speed, "mfu": flops / self.peak_flops}

    def _waits(self, seconds: float) -> dict[str, Any]:
        """Return ``data_wait``; where the GPU's own time is known, also what GPU and main process do in a step."""
        own = None if self._timer is None else self._timer.own_seconds(self._flops or self._steps)
        if own is None:
            return {"data_wait": min(1.0, self._waited / seconds)}
        data = self._waited if self._load is None else self._load.waited - self._loaded
        other = max(0.0, seconds - data - self._launched - self._synchronized)
        self.times = HostTimes(self._steps, seconds, own, data, self._launched, self._launched_cpu, other)
        gpu = own / max(1, self._steps)
        return {"data_wait": self.times.idle, "gpu_seconds": gpu, "host_seconds": self.times.per_step()}


def memory() -> dict[str, float]:
    """Return the host memory of this process and its workers, and the peak GPU memory since the last call, in GiB."""
    used = {"host_memory_gib": host_bytes() / _GIB}
    if torch.cuda.is_available():
        used["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / _GIB
        used["gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / _GIB
        torch.cuda.reset_peak_memory_stats()
    return used
