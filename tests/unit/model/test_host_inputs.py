"""Inputs of recomputed blocks in host memory: the same bits, in memory that later passes use again."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sd3_light.model import host_inputs
from sd3_light.model.block_swap import BlockSwap
from sd3_light.model.host_inputs import checkpoint_on_host

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, text: Tensor, time: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x) * time)
        return x + self.second(hidden) * scale, text + hidden.mean(1, keepdim=True)


class Stack(nn.Module):
    def __init__(self, keep: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.embed = nn.Linear(8, 8)
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        text = x[:, :1].clone()
        time = x.mean((0, 1))
        for block in self.blocks:
            x, text = self.keep(block, x, text, time, 0.5)
        return x + text


def plainly(block: nn.Module, *inputs: Any) -> Any:
    return checkpoint(block, *inputs, use_reentrant=False)


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Move inputs of any size; return the bytes of all allocations, and forget the memory of other tests."""
    monkeypatch.setattr(host_inputs, "_SMALLEST", 64)
    monkeypatch.setattr(host_inputs, "_ROUND", 64)
    allocated: list[int] = []
    pinned = host_inputs.pinned_memory

    def record(count: int, device: torch.device) -> Tensor:
        allocated.append(count)
        return pinned(count, device)

    monkeypatch.setattr(host_inputs, "pinned_memory", record)
    host_inputs._of_device.cache_clear()
    yield allocated
    host_inputs._of_device.cache_clear()


def gradients(model: Stack, passes: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    outputs = [model(torch.randn(2, 5, 8, generator=generator)) for _ in range(passes)]
    sum(output.square().mean() for output in outputs).backward()  # type: ignore[union-attr]
    found = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_have_the_same_bits(passes: int, pool: list[int]) -> None:
    expected = gradients(Stack(plainly), passes)
    model = Stack(checkpoint_on_host)
    for _ in range(3):
        found = gradients(model, passes)
        assert len(found) == len(expected) == 18
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    image, text = 2 * 5 * 8 * 4, 2 * 8 * 4
    assert sorted(pool) == sorted([image, text] * 4 * passes), "once, and not the time, which all blocks share"


def test_nothing_on_the_device_is_kept_for_the_backward_pass() -> None:
    kept: list[Tensor] = []

    def keep(block: nn.Module, *inputs: Any) -> Any:
        kept.append(inputs[0])
        return checkpoint_on_host(block, *inputs)

    expected = gradients(Stack(plainly))
    model = Stack(keep)
    output = model(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)))
    loss = output.square().mean()
    for value in kept:
        value.data.fill_(float("nan"))
    loss.backward()
    found = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_small_inputs_stay_and_passes_without_gradients_free_their_memory(monkeypatch: Any, pool: list[int]) -> None:
    model = Stack(checkpoint_on_host)
    for _ in range(3):
        model(torch.randn(2, 5, 8))
    with torch.no_grad():
        model(torch.randn(2, 5, 8))
    assert len(pool) == 8
    monkeypatch.setattr(host_inputs, "_SMALLEST", 1 << 20)
    expected = gradients(Stack(plainly))
    assert all(torch.equal(*pair) for pair in zip(gradients(Stack(checkpoint_on_host)), expected, strict=True))
    assert len(pool) == 8


def test_blocks_and_their_inputs_are_both_in_host_memory() -> None:
    expected = gradients(Stack(plainly))
    model = Stack(checkpoint_on_host)
    for weight in model.blocks.parameters():
        weight.requires_grad_(False)
    frozen = Stack(plainly)
    for weight in frozen.blocks.parameters():
        weight.requires_grad_(False)
    swap = BlockSwap(CPU)
    for block in model.blocks:
        swap.add(block)
    swap.start()
    found = gradients(model)
    assert all(torch.equal(*pair) for pair in zip(found, gradients(frozen), strict=True))
    assert torch.equal(found[0], expected[-2])
