"""The waits of a GPU for its host: with a host that is ahead, one that queues too slowly, and one that waits."""

import time
from collections.abc import Callable

import pytest
import torch

from sd3_light.engines.protocol import StepResult
from sd3_light.flow.objective import NUM_BANDS
from sd3_light.train.idle import DeviceGaps
from sd3_light.train.meter import Meter

CUDA = torch.device("cuda")


def fields_of(work: Callable[[], object], steps: int, wait: float = 0.0) -> dict[str, float]:
    """Return the second record of a meter; the first one contains compilation and the start of the device."""
    gaps = DeviceGaps()
    meter = Meter(gaps=gaps)
    for number in range(1, 2 * steps + 1):
        with meter.waiting():
            time.sleep(wait)
        with meter.launching():
            work()
            gaps.backward_queued()
            few_kernels()
            numbers = torch.ones(1 + 2 * NUM_BANDS + 2, device=CUDA)
            result = StepResult(["loss"], numbers)
        meter.add(number, result, samples=1, flops=1)
        if number in (steps, 2 * steps):
            meter.collect(wait=True)
            fields = meter.record()
    return fields


def few_kernels() -> None:
    """Queue what an optimizer does: little work for the host."""
    x = torch.ones(1000, device=CUDA)
    for _ in range(20):
        x = x + 1


def many_products() -> None:
    x = torch.ones(4096, 4096, device=CUDA, dtype=torch.bfloat16)
    for _ in range(20):
        x = x @ x


def many_small_kernels() -> None:
    x = torch.ones(1000, device=CUDA)
    for _ in range(400):
        x = x + 1


def test_only_kernels_that_wait_for_the_host_are_bound_by_it() -> None:
    fields = fields_of(many_products, 60)
    assert fields["data_wait"] < 0.05
    assert fields["host_bound"] < 0.1
    fields = fields_of(many_small_kernels, 120)
    assert fields["host_bound"] > 0.9


def test_a_device_that_waits_for_data_is_idle() -> None:
    alone = fields_of(many_products, 30)["seconds"]
    fields = fields_of(many_products, 120, wait=2 * alone)
    assert fields["data_wait"] == pytest.approx(1 - alone / fields["seconds"], abs=0.05)
    assert fields["data_wait"] > 0.4
    assert fields["host_bound"] < 0.1


def test_a_step_that_is_longer_than_the_queue_is_not_bound_by_the_host() -> None:
    x = torch.ones(2048, 2048, device=CUDA, dtype=torch.bfloat16)

    def part() -> None:
        for _ in range(2500):
            torch.mm(x, x)

    fields = fields_of(part, 20)
    assert fields["data_wait"] < 0.05
    assert fields["host_bound"] < 0.1
