"""Where the time of training goes: from the start of a process to the end of its first step, and in later steps.

    python benchmarks/train_run.py --regime padded --start-only

starts this file with the folder of the files that it has written, so that nothing else is imported. The process does
what `sd3-light train --trust-cache` does: it checks the config, opens the cache, builds the model and trains.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

STARTS = 2
PROFILED_STEPS = 5


def measure_start(folder: Path) -> None:
    """Train one step in a prepared folder, in new processes one after another, which print their times."""
    for number in range(1, STARTS + 1):
        print(f"start {number} of {STARTS}:", flush=True)
        shutil.rmtree(folder / "run", ignore_errors=True)
        command = [sys.executable, "-P", __file__, str(folder)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
        subprocess.run(command, check=True, env=environment)


def without_saves(checkpoints: bool = False) -> None:
    """Let runs export nothing, since there are no frozen parts, and write ``checkpoints`` only on request."""
    from sd3_light.checkpoint.background import CheckpointKeeper
    from sd3_light.train.driver import Driver

    Driver.export = lambda self, progress: None  # type: ignore[method-assign]
    if not checkpoints:
        Driver.checkpoint = lambda self, progress: None  # type: ignore[method-assign]
        CheckpointKeeper.prepare = lambda self, pieces: None  # type: ignore[method-assign]


def process_age() -> float:
    """Return the seconds since this process started, to a hundredth."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


class StartTimes:
    """Seconds of the parts of a start, of wall and CPU time, in the order in which they end."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, float]] = {}

    @contextmanager
    def measuring(self, part: str) -> Iterator[None]:
        """Add the times of the block to a part."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        before = self.parts.get(part, (0.0, 0.0))
        self.parts[part] = before[0] + time.perf_counter() - wall, before[1] + time.process_time() - cpu

    def measure(self, owner: Any, name: str, part: str, after: Callable[[], None] = lambda: None) -> None:
        """Measure the calls of a function or method from now on; ``after`` runs at the end of each."""
        function = getattr(owner, name)

        def measured(*arguments: Any, **keys: Any) -> Any:
            with self.measuring(part):
                result = function(*arguments, **keys)
                after()
            return result

        setattr(owner, name, measured)

    def report(self, wall: float, cpu: float) -> str:
        """Return the total and its parts, one per line."""
        walls, cpus = zip(*self.parts.values(), strict=True)
        parts = {**self.parts, "everything else": (wall - sum(walls), cpu - sum(cpus))}
        lines = [f"  {part[0]:6.2f} s ({part[1]:6.2f} s of CPU time)  {name}" for name, part in parts.items()]
        return "\n".join([f"start to end of first step: {wall:.2f} s ({cpu:.2f} s of CPU time)", *lines])


# --- steps, by torch's profiler ---------------------------------------------------------------------


@contextmanager
def profiling(file: Path, warm: int) -> Iterator[None]:
    """Profile the last of the first ``warm`` steps of the run inside the block, and write tables of them."""
    import torch

    from sd3_light.engines.torch import TorchEngine

    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler, train_step = torch.profiler.profile(activities=activities), TorchEngine.train_step
    began, calls, first = 0.0, 0, max(1, warm - PROFILED_STEPS)

    def synchronized() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def profiled(self: TorchEngine, *arguments: Any) -> Any:
        nonlocal began, calls
        calls += 1
        if calls == first:
            synchronized()
            profiler.start()
            began = time.perf_counter()
        elif calls == first + PROFILED_STEPS:
            seconds = synchronized() - began
            profiler.stop()
            file.write_text(profile_tables(profiler, seconds), encoding="utf-8")
        return train_step(self, *arguments)

    TorchEngine.train_step = profiled  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchEngine.train_step = train_step  # type: ignore[method-assign]


def profile_tables(profiler: Any, seconds: float) -> str:
    """Return the launches per step, and tables of the host's operations and the kernels."""
    import torch

    events = profiler.key_averages()
    launches = {event.key: event.count for event in events if "Launch" in event.key}
    kernels = [event for event in events if event.device_type != torch.autograd.DeviceType.CPU]
    gpu = sum(event.self_device_time_total for event in kernels) / 1e3
    lines = [
        f"{PROFILED_STEPS} steps, {1e3 * seconds / PROFILED_STEPS:.2f} ms per step under the profiler",
        f"{sum(event.count for event in kernels) / PROFILED_STEPS:.0f} kernels and copies per step, "
        f"{gpu / PROFILED_STEPS:.2f} ms of GPU time",
        *(f"{count / PROFILED_STEPS:.0f} {name} per step" for name, count in sorted(launches.items())),
    ]
    tables = (("host", "self_cpu_time_total"), ("GPU", "self_device_time_total"))
    for title, order in tables if kernels else tables[:1]:
        lines += ["", f"by the time of the {title}:", events.table(sort_by=order, row_limit=40)]
    return "\n".join(lines) + "\n"


# --- the process of a start -------------------------------------------------------------------------


def main() -> None:
    """Train one step in the folder that the command line names, and print the times."""
    times, folder = StartTimes(), Path(sys.argv[1])
    times.parts["start of Python"] = process_age(), time.process_time()
    with times.measuring("imports: torch, diffusers"):
        from sd3_light.cli.process import init_process, quiet_imports

        quiet_imports()
        launch = init_process()
    with times.measuring("imports: the rest"):
        import torch

        from sd3_light import journeys  # noqa: F401  # what the command imports
        from sd3_light.check import verb as check
        from sd3_light.config import load_config
        from sd3_light.engines.torch import TorchEngine
        from sd3_light.families.sd3.prepare import LightSD3Pipeline
        from sd3_light.train import state as train_state
        from sd3_light.train import verb as stage
        from sd3_light.train.meter import Meter

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    with times.measuring("check of the config"):
        loaded = load_config(folder / "train.toml")
        check.require(loaded)
    loaded = replace(loaded, train=loaded.train.model_copy(update={"max_steps": 1}))
    without_saves()
    times.measure(stage, "require_blocks", "check of the kernels")
    times.measure(stage, "open_context", "cache")
    times.measure(LightSD3Pipeline, "__init__", "model")
    times.measure(train_state, "choose_blocks", "check of the kernels", synchronize)
    times.measure(TorchEngine, "__init__", "engine, weights on the device", synchronize)
    wait = Meter.waiting

    @contextmanager
    def waiting(meter: Meter) -> Iterator[None]:
        with times.measuring("first batch"), wait(meter):
            yield

    Meter.waiting = waiting  # type: ignore[method-assign]
    ends: list[tuple[float, float]] = []

    def end_of_step() -> None:
        synchronize()
        ends.append((process_age(), time.process_time()))

    times.measure(TorchEngine, "train_step", "first step", end_of_step)
    stage.run(loaded, launch)
    print(times.report(*ends[0]), flush=True)


if __name__ == "__main__":
    main()
