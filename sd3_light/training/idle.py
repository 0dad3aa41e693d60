"""Why a GPU is idle, and what to change."""

from dataclasses import dataclass, field

from sd3_light.data.loader import LoadTimes

WARN_ABOVE = 0.1
"""Idle share above which a run prints advice."""
WARN_WINDOW = 50
"""Number of steps over which the share is measured; the first ones, in which processes start, do not count."""


@dataclass
class HostTimes:
    """Seconds of some steps: in total, the GPU's own, and the main process's by what it does.

    It waits for ``data``, queues kernels (``launch``; ``launch_cpu`` is the CPU time of that), or does something
    ``other``. Waiting for the GPU is none of these.
    """

    steps: int = 0
    seconds: float = 0.0
    gpu: float = 0.0
    data: float = 0.0
    launch: float = 0.0
    launch_cpu: float = 0.0
    other: float = 0.0

    def add(self, more: "HostTimes") -> None:
        """Add the times of further steps."""
        for name, value in vars(more).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def idle(self) -> float:
        """Share of the time in which the GPU has nothing to do."""
        return min(1.0, max(0.0, 1 - self.gpu / self.seconds)) if self.seconds else 0.0

    def per_step(self) -> dict[str, float]:
        """Return the main process's seconds per step."""
        return {name: getattr(self, name) / max(1, self.steps) for name in ("data", "launch", "other")}


@dataclass
class IdleAdvice:
    """Names the cause when a GPU is idle for more than `WARN_ABOVE` of the time, once.

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
        recent, self._recent = self._recent, HostTimes()
        counts, self._started = self._started, True
        if not counts or recent.idle <= WARN_ABOVE:
            return None
        self._given = True
        return f"the GPU was idle for {recent.idle:.0%} of the last {recent.steps} steps: {self._cause(recent)}"

    def _cause(self, times: HostTimes) -> str:
        longest = max(("data", "launch", "other"), key=lambda name: getattr(times, name))
        if longest == "data":
            return self._cause_in_loader()
        milliseconds = 1000 * getattr(times, longest) / times.steps
        if longest == "other":
            return f"the main process spends {milliseconds:.1f} ms per step between steps; raise logging_steps"
        if times.launch_cpu < 0.7 * times.launch:
            share = times.launch_cpu / times.launch
            return (
                f"the main process got only {share:.0%} of a core while it queued kernels; lower {self.workers_key} "
                f"(now {self.workers} per process), or stop other programs"
            )
        gpu = 1000 * times.gpu / times.steps
        return (
            f"the batch is too small: the main process needs {milliseconds:.1f} ms to queue the kernels of a step, the "
            f"GPU {gpu:.1f} ms to run them; raise {self.batch_key}"
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
