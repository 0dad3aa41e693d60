"""How long all steps of a run take: measured, or a range."""

from dataclasses import dataclass

from sd3_light.cost.device_peaks import kinds_with_memory, peak_flops
from sd3_light.cost.throughput import CPU_CORE_RANGE, PEAK_RANGE, measured_speed, time_range, training_seconds
from sd3_light.formats import duration, plural
from sd3_light.system import Gpu, usable_cores

_SHORT = "less than a second"
_REMEDY = (
    "`sd3-light check TOML --gpu H200` estimates it for a known kind; `train` shows the time left after a few steps"
)


@dataclass(frozen=True)
class Work:
    """The steps of a run: FLOPs in all, micro-batches per GPU, the kind and number of blocks, and GPUs.

    ``blocks`` are named by `measured_blocks`, ``graphs``: they are recorded. ``at_most`` is the prefix of numbers that
    hold for the longest captions.
    """

    flops: float
    micro_batches: int
    blocks: str
    num_blocks: int
    gpus: int = 1
    graphs: bool = False
    at_most: str = ""

    def seconds_on(self, name: str) -> float | None:
        """Return the time on a kind of GPU; None if its speed was not measured."""
        return training_seconds(
            name, self.blocks, self.flops, self.micro_batches, self.num_blocks, self.gpus, self.graphs
        )

    def time_on(self, gpu: Gpu | None) -> str:
        """Return the time on GPUs, and where it comes from."""
        name = "" if gpu is None else gpu.name
        seconds = self.seconds_on(name)
        speed = measured_speed(name, self.blocks)
        where = f"of training steps on {self.gpus} x {name}"
        if seconds is not None and speed is not None:
            several = "; several GPUs were not measured" if self.gpus > 1 else ""
            recorded = " in CUDA graphs" if self.graphs else ""
            share = f"{speed.share_of_peak:.0%} of its peak with {self.blocks} blocks{recorded}"
            return f"{self._about(seconds)} {where} ({share}, measured{several})"
        peak = peak_flops(name, "bfloat16")
        share = f"{PEAK_RANGE[0]:.0%} to {PEAK_RANGE[1]:.0%}"
        if peak is not None:
            shares = f"{share} of its peak: no speed was measured on this kind of GPU"
            return f"{self._limits(peak, peak)} {where} ({shares})"
        kinds = [] if gpu is None or gpu.total_bytes is None else kinds_with_memory(gpu.total_bytes)
        if not kinds:
            return f"unknown: no speed was measured on this kind of GPU; {_REMEDY}"
        slowest = kinds[0]
        fastest = kinds[-1]
        assert slowest.bfloat16 is not None and fastest.bfloat16 is not None
        limits = self._limits(slowest.bfloat16 * 1e12, fastest.bfloat16 * 1e12)
        names = " to ".join(dict.fromkeys((slowest.words.upper(), fastest.words.upper())))
        peaks = f"{share} of the peaks of GPUs with this memory, {names}"
        return f"{limits} of training steps on {plural(self.gpus, 'GPU')} ({peaks}; {_REMEDY})"

    def time_on_cpu(self, speed: float | None) -> str:
        """Return the time on this machine's CPU with the FLOP/s that were measured, or a range."""
        cores = usable_cores()
        where = f"of training steps on {cores} CPU cores"
        if speed is not None:
            return f"{self._about(self.flops / speed)} {where}, by a few steps timed here"
        slow, fast = CPU_CORE_RANGE
        limits = self._range(self.flops / (fast * cores), self.flops / (slow * cores))
        return f"{limits} {where} ({slow / 1e9:.0f} to {fast / 1e9:.0f} GFLOP/s per core; not measured)"

    def _about(self, seconds: float) -> str:
        return _SHORT if seconds < 1 else f"{self.at_most or 'about '}{duration(seconds)}"

    def _limits(self, slowest: float, fastest: float) -> str:
        return self._range(*time_range(self.flops / self.gpus, self.micro_batches, self.num_blocks, (slowest, fastest)))

    def _range(self, low: float, high: float) -> str:
        return _SHORT if high < 1 else f"{self.at_most}{duration(low)} to {duration(high)}"
