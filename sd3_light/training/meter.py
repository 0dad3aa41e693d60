"""What the log says of the steps since its last record: means, speed, utilisation and memory."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from sd3_light.engines.protocol import StepNumbers, StepResult
from sd3_light.flow.bands import BAND_NAMES, NUM_BANDS
from sd3_light.system import host_bytes

_GIB = 1 << 30


@dataclass
class Window:
    """Sums over the steps since the last record. It is in the checkpoint, so that a resumed run logs the same."""

    steps: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    bands: list[float] = field(default_factory=lambda: [0.0] * NUM_BANDS)
    counts: list[float] = field(default_factory=lambda: [0.0] * NUM_BANDS)

    def add(self, numbers: StepNumbers) -> None:
        """Take in a step that was taken."""
        self.steps += 1
        for name, value in {**numbers.losses, "grad_norm": numbers.grad_norm}.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.bands = [a + b for a, b in zip(self.bands, numbers.bands, strict=True)]
        self.counts = [a + b for a, b in zip(self.counts, numbers.band_counts, strict=True)]

    def means(self) -> dict[str, Any]:
        """Losses and gradient norm as means over the steps, and the loss by bands of time that had samples."""
        found: dict[str, Any] = {name: value / self.steps for name, value in self.sums.items()}
        if not self.steps:
            found = {"loss": math.nan, "grad_norm": math.nan}
        bands = zip(BAND_NAMES, self.bands, self.counts, strict=True)
        return {**found, "steps": self.steps, "band": {name: total / n for name, total, n in bands if n > 0}}

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which keeps every digit."""
        return asdict(self)


class Meter:
    """Counts steps and time. Results are read when they are there; only a record, or who asks to, waits for them."""

    def __init__(
        self, world: int = 1, peak_flops: float | None = None, window: Mapping[str, Any] | None = None
    ) -> None:
        self.world, self.peak_flops = world, peak_flops
        self.window = Window(**(window or {}))
        self._pending: deque[tuple[int, StepResult]] = deque()
        self._start_anew()

    def _start_anew(self) -> None:
        self._since, self._excluded, self._waited = time.perf_counter(), 0.0, 0.0
        self._samples = self._steps = self._flops = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for data."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Around what is not training: its time does not count."""
        start = time.perf_counter()
        yield
        self._excluded += time.perf_counter() - start

    def add(self, step: int, result: StepResult, samples: int, flops: int) -> None:
        """A step was asked of the device: ``samples`` and ``flops`` of all processes."""
        self._pending.append((step, result))
        self._steps += 1
        self._samples += samples
        self._flops += flops

    @property
    def is_idle(self) -> bool:
        """Whether the device has done all that was asked of it."""
        return not self._pending or self._pending[-1][1].ready

    def settle(self, wait: bool) -> list[tuple[int, StepNumbers]]:
        """The steps whose numbers have arrived since the last call, in order; all of them where ``wait``."""
        found = []
        while self._pending and (wait or self._pending[0][1].ready):
            step, result = self._pending.popleft()
            numbers = result.read()
            if numbers.taken:
                self.window.add(numbers)
            found.append((step, numbers))
        return found

    def record(self) -> dict[str, Any]:
        """All of it since the last record, which then begins anew; every result has been settled."""
        assert not self._pending, "settle before a record"
        seconds = max(time.perf_counter() - self._since - self._excluded, 1e-9)
        fields = {**self.window.means(), **self._speed(seconds), **memory()}
        self.window = Window()
        self._start_anew()
        return fields

    def _speed(self, seconds: float) -> dict[str, float]:
        rate = self._samples / seconds
        flops = self._flops / seconds / self.world
        found = {
            "samples_per_second": rate,
            "images_per_second_per_gpu": rate / self.world,
            "data_wait": min(1.0, self._waited / seconds),
            "seconds": seconds / max(1, self._steps),
            "tflops_per_gpu": flops / 1e12,
        }
        return found if self.peak_flops is None else {**found, "mfu": flops / self.peak_flops}


def memory() -> dict[str, float]:
    """Peak GPU memory since the last call (where there is a GPU) and the host memory of this process and its workers,
    in GiB."""
    found = {"host_memory_gib": host_bytes() / _GIB}
    if torch.cuda.is_available():
        found["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / _GIB
        found["gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / _GIB
        torch.cuda.reset_peak_memory_stats()
    return found
