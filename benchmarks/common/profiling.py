"""Where the time of training steps goes, by torch's profiler."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PROFILED_STEPS = 5


@contextmanager
def profiling(file: Path, warm: int) -> Iterator[None]:
    """Profile the last of the first ``warm`` steps of the run inside the block, and write tables of them."""
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


def profile_tables(profiler: torch.profiler.profile, seconds: float) -> str:
    """Return the launches per step, and tables of the host's operations and the kernels."""
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
