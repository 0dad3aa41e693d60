"""A GPU's own time and idle share: with a host that is ahead, one that queues too slowly, and one that waits."""

import time
from collections.abc import Callable

import pytest
import torch

from sd3_light.engines.protocol import StepResult
from sd3_light.flow.objective import NUM_BANDS
from sd3_light.training.device_time import CudaQueue, StepTimer
from sd3_light.training.meter import Meter

CUDA = torch.device("cuda")


def fields_of(work: Callable[[], object], steps: int, wait: float = 0.0, parts: int = 1) -> dict[str, float]:
    """Return the second record of a meter; the first one contains compilation and the start of the device."""
    timer = StepTimer(CudaQueue())
    meter = Meter(timer=timer)
    for number in range(2 * steps):
        with meter.waiting():
            time.sleep(wait)
        with meter.launching():
            for _ in range(parts - 1):
                work()
                timer.split()
            work()
            numbers = torch.ones(1 + 2 * NUM_BANDS + 2, device=CUDA)
            result = StepResult(["loss"], numbers)
        meter.add(number, result, samples=1, flops=1)
        if number in (steps - 1, 2 * steps - 1):
            meter.collect(wait=True)
            fields = meter.record()
    return fields


def own_milliseconds(work: Callable[[], object]) -> float:
    """Return the time of queued work on the device, with the queue filled while the device sleeps."""
    queue = CudaQueue()
    work()
    queue.sleep(0.5)
    start = queue.mark()
    work()
    stop = queue.mark()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


def many_products() -> None:
    x = torch.ones(4096, 4096, device=CUDA, dtype=torch.bfloat16)
    for _ in range(20):
        x = x @ x


def many_small_kernels() -> None:
    x = torch.ones(1000, device=CUDA)
    for _ in range(400):
        x = x + 1


def test_a_host_that_is_ahead_costs_nothing() -> None:
    fields = fields_of(many_products, 60)
    assert fields["data_wait"] < 0.05
    assert 1000 * fields["gpu_seconds"] == pytest.approx(own_milliseconds(many_products), rel=0.1)


def test_a_device_that_waits_for_each_kernel_is_idle() -> None:
    fields = fields_of(many_small_kernels, 120)
    assert 1000 * fields["gpu_seconds"] == pytest.approx(own_milliseconds(many_small_kernels), rel=0.25)
    assert fields["data_wait"] == pytest.approx(1 - fields["gpu_seconds"] / fields["seconds"], abs=1e-6)
    assert fields["data_wait"] > 0.2


def test_a_device_that_waits_for_data_is_idle() -> None:
    own = own_milliseconds(many_products) / 1000
    fields = fields_of(many_products, 120, wait=2 * own)
    assert fields["data_wait"] == pytest.approx(0.5, abs=0.1)
    assert fields["gpu_seconds"] == pytest.approx(own, rel=0.15)


def test_a_step_that_is_longer_than_the_queue_is_measured_in_parts() -> None:
    x = torch.ones(2048, 2048, device=CUDA, dtype=torch.bfloat16)

    def part() -> None:
        for _ in range(500):
            torch.mm(x, x)

    fields = fields_of(part, 20, parts=4)
    assert fields["data_wait"] < 0.05
    assert 1000 * fields["gpu_seconds"] == pytest.approx(4 * own_milliseconds(part), rel=0.1)


def test_a_part_that_is_longer_than_the_queue_does_not_slow_training() -> None:
    x = torch.ones(1024, 1024, device=CUDA, dtype=torch.bfloat16)

    def part() -> None:
        for _ in range(2500):
            torch.mm(x, x)

    part()
    torch.cuda.synchronize()
    start = time.perf_counter()
    part()
    torch.cuda.synchronize()
    alone = time.perf_counter() - start
    fields = fields_of(part, 30)
    assert "gpu_seconds" not in fields
    assert fields["seconds"] < 1.1 * alone
