"""Normals that a device draws: the host's bits, for any batch; the kernel against its reference."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sd3_light.flow import noise
from sd3_light.flow.noise import DeviceNoise, draw_normals
from sd3_light.randomness import fill_normals, normal_table, occurrence_words, round_keys, stream
from tests.modules import emulated_kernel

CPU = torch.device("cpu")
SAMPLES = [(0, 0, 0), (2**31 - 1, 2**32 - 1, 2**63 - 1), (3, 1, 12345), (0, 7, 2**62 + 3)]
OCCURRENCES = torch.from_numpy(occurrence_words(*zip(*SAMPLES, strict=True)))
COUNTS = (1, 7, 8, 384, 1030)


def on_the_host(seed: int, purpose: str, shape: tuple[int, ...]) -> Tensor:
    values = np.empty((len(SAMPLES), *shape), dtype=np.float32)
    for row, arguments in zip(values, SAMPLES, strict=True):
        fill_normals(stream(seed, purpose, *arguments), row)
    return torch.from_numpy(values)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("seed", [0, 2**64 - 5])
def test_a_device_draws_the_hosts_bits(seed: int, count: int) -> None:
    drawn = DeviceNoise(seed, CPU).normals("posterior", OCCURRENCES, (count,))
    assert torch.equal(drawn, on_the_host(seed, "posterior", (count,)))


def test_a_shape_and_a_batch_change_nothing() -> None:
    device, shape = DeviceNoise(3, CPU), (16, 4, 6)
    whole = device.normals("noise", OCCURRENCES, shape)
    assert torch.equal(whole, on_the_host(3, "noise", shape))
    for at in range(len(SAMPLES)):
        assert torch.equal(device.normals("noise", OCCURRENCES[at : at + 1], shape)[0], whole[at])
    assert torch.equal(device.normals("noise", OCCURRENCES.flip(0), shape), whole.flip(0))


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with emulated_kernel(Path(noise.__file__).with_name("noise_kernel.py")) as module:
        yield module


def test_the_kernel_draws_the_bits_of_its_reference(kernel: ModuleType) -> None:
    for count in COUNTS:
        inputs = torch.tensor(round_keys(7, "noise")), OCCURRENCES, count, torch.from_numpy(normal_table())
        assert torch.equal(kernel.draw_normals(*inputs), draw_normals(*inputs))


def test_a_kernel_that_draws_other_bits_is_not_used(kernel: ModuleType, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setitem(sys.modules, "sd3_light.flow.noise_kernel", kernel)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    device = DeviceNoise(0, CPU)
    assert device._checked_kernel() is kernel.draw_normals
    monkeypatch.setattr(kernel, "draw_normals", lambda *inputs: draw_normals(*inputs) + 1e-7)
    assert device._checked_kernel() is draw_normals
    assert "the slower reference is used" in capfd.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert device._checked_kernel() is draw_normals
