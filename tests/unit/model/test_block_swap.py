"""Blocks in host memory: the same bits in every pass, in two buffers whose other contents nothing reads."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sd3_light.core.model import save_products
from sd3_light.cost.training_setup import SWAP_BUFFERS, swapped_blocks
from sd3_light.model import block_swap
from sd3_light.model.block_swap import BUFFERS, BlockSwap
from tests.poisoned import poison

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    """Two streams, as in joint blocks; the first weight trains."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.randn(width, width) / width)
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.narrow = nn.Parameter(torch.randn(3).to(dtype), requires_grad=False)

    def forward(self, x: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(self.norm(x)) + x @ self.trained + self.narrow.float().mean()
        return x + self.second(torch.tanh(hidden)), text + self.second(hidden.mean(1, keepdim=True))


class Stack(nn.Module):
    def __init__(self, count: int, keep: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(8, torch.bfloat16) for _ in range(count))
        for name, weight in self.named_parameters():
            weight.requires_grad_("trained" in name)
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        text = x[:, :1]
        for block in self.blocks:
            if self.keep is None or not torch.is_grad_enabled():
                x, text = block(x, text)
            else:
                x, text = self.keep(block, x, text)
        return x + text


def plainly(block: nn.Module, *inputs: Tensor) -> Any:
    return checkpoint(block, *inputs, use_reentrant=False)


def selectively(block: nn.Module, *inputs: Tensor) -> Any:
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=save_products)


def swapped(model: Stack, count: int) -> BlockSwap:
    swap = BlockSwap(CPU)
    for number in swapped_blocks(count, len(model.blocks)):
        swap.add(model.blocks[number])
    swap.start()
    return swap


def train(model: Stack, steps: int = 3) -> tuple[list[float], list[Tensor]]:
    """Losses of passes with and without gradients, and the trained weights after steps of two micro-batches."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        for _ in range(2):
            loss = model(torch.randn(2, 5, 8, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [model(torch.randn(1, 3, 8, generator=generator)).mean().item() for _ in range(2)]
    return losses, [weight.detach() for weight in trained]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return poison(monkeypatch)


KEEPS = {"saved": None, "recomputed": plainly, "selective": selectively}


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_swapped_blocks_compute_the_same_bits(keep: str, count: int, poisoned: list[int]) -> None:
    """And nothing reads a block whose turn is over."""
    expected = train(Stack(5, KEEPS[keep]))
    model = Stack(5, KEEPS[keep])
    swap = swapped(model, count)
    losses, weights = train(model)
    assert losses == expected[0]
    assert all(torch.equal(*pair) for pair in zip(weights, expected[1], strict=True))
    block = sum(weight.nbytes for weight in model.blocks[0].parameters() if not weight.requires_grad)
    assert count * block <= swap.host_bytes < count * (block + 6 * 512)
    assert swap.device_bytes == min(2, count) * swap.host_bytes / count
    if count == 5:
        assert poisoned[:17] == [0, 1, 2, 3, 4, 3, 2, 1, 0, 1, 2, 3, 4, 3, 2, 1, 0]


def test_a_block_is_copied_once_per_pass_and_ahead_of_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(6, plainly)
    swap = swapped(model, 6)
    events: list[tuple[str, int]] = []
    need = BlockSwap.need
    load = BlockSwap._load

    def record(swap: BlockSwap, index: int, step: int) -> None:
        if index != swap._current:
            events.append(("need", index))
        need(swap, index, step)

    def copied(swap: BlockSwap, index: int) -> None:
        if index not in swap._holds:
            events.append(("copy", index))
        load(swap, index)

    monkeypatch.setattr(BlockSwap, "need", record)
    monkeypatch.setattr(BlockSwap, "_load", copied)
    x = torch.randn(1, 3, 8)
    model(x).mean().backward()
    forward = [("need", 0), ("copy", 0), ("copy", 1)]
    forward += [event for index in range(1, 5) for event in (("need", index), ("copy", index + 1))]
    backward = [event for index in range(4, 0, -1) for event in (("need", index), ("copy", index - 1))]
    assert events == [*forward, ("need", 5), *backward, ("need", 0)]
    events.clear()
    with torch.no_grad():
        model(x)
        model(x)
    copies = [index for kind, index in events if kind == "copy"]
    assert copies == [2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0], "the first two are in place; a pass ends with the next one's"
    assert swap._holds == [0, 5]


def test_two_passes_before_their_backward_passes(poisoned: list[int]) -> None:
    def gradients(model: Stack) -> list[Tensor]:
        generator = torch.Generator().manual_seed(2)
        first, second = (model(torch.randn(1, 4, 8, generator=generator)) for _ in range(2))
        (first.square().mean() * second.mean()).backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    model = Stack(4)
    swapped(model, 4)
    pairs = list(zip(gradients(model), gradients(Stack(4)), strict=True))
    assert len(pairs) == 4
    assert all(torch.equal(*pair) for pair in pairs)


def test_an_output_that_is_an_input_costs_no_copy(monkeypatch: pytest.MonkeyPatch, poisoned: list[int]) -> None:
    def forward(self: Block, x: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.second(x @ self.trained), text

    monkeypatch.setattr(Block, "forward", forward)
    model = Stack(3)
    swapped(model, 3)
    model(torch.randn(1, 4, 8, requires_grad=True)).mean().backward()
    assert poisoned == [0, 1, 2, 1, 0]


def test_compiled_blocks_find_their_weights(poisoned: list[int]) -> None:
    results = []
    for count in (0, 3):
        model = Stack(3)
        if count:
            swapped(model, count)
        torch.compiler.reset()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        losses, weights = train(model, steps=2)
        results.append((losses, torch.cat(weights)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert poisoned[:5] == [0, 1, 2, 1, 0]


def test_blocks_are_spread_and_their_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert swapped_blocks(0, 6) == []
    assert swapped_blocks("all", 6) == swapped_blocks(9, 6) == [0, 1, 2, 3, 4, 5]
    assert swapped_blocks(3, 6) == [1, 3, 5]
    for total in range(1, 60):
        for count in range(1, total + 1):
            numbers = swapped_blocks(count, total)
            gaps = {later - earlier for earlier, later in pairwise(numbers)}
            assert len(set(numbers)) == count
            assert max(gaps, default=0) - min(gaps, default=0) <= 1
    assert BUFFERS == SWAP_BUFFERS
    unpinned: list[list[int]] = []
    monkeypatch.setattr(block_swap, "_unpin", lambda addresses, device: unpinned.append(list(addresses)))
    model = Stack(3)
    swapped(model, 3)._pinned.append(7)
    assert not unpinned
    del model
    assert unpinned == [[7]]
