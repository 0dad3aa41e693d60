"""Weights that are updated together, and how weights in bfloat16 are updated: in float32, rounded at random.

A torch optimizer updates float32 parameters. For a weight in bfloat16 it holds a stand-in, which has memory only during
the update: a copy of the weight in float32. The result is rounded to bfloat16 stochastically, so that updates smaller
than the distance of two neighbours are not lost. AdamW with 8-bit moments does this itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sd3_light.config.optimizers import CHUNK_ELEMENTS
from sd3_light.optim.draws import StepDraws, round_stochastically

Named = Mapping[str, nn.Parameter]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class TorchOptimizer:
    """A torch optimizer for some of the weights, and a function that creates a weight's state of step 0.

    ``skips_on_device``: it reads `found_inf`, so a step is skipped without synchronizing with the host.
    """

    optimizer: torch.optim.Optimizer
    create_state: Callable[[Any, nn.Parameter], None]
    skips_on_device: bool


@dataclass(frozen=True)
class WeightChunk:
    """Some weights by name, and what the ``optimizers`` hold for each: the weight itself or its `stand_in`."""

    weights: Named
    held: Named
    optimizers: Sequence[TorchOptimizer]
    draws: StepDraws

    @torch.no_grad()
    def step(self, skip: Tensor | None) -> None:
        """Update the weights that have a gradient, or change nothing if ``skip`` is 1.0."""
        narrow = [name for name, weight in self.weights.items() if self.held[name] is not weight]
        for name in narrow:
            _widen(self.weights[name], self.held[name])
        for each in self.optimizers:
            if each.skips_on_device:
                # attributes that torch's GradScaler sets, too; a skipped step is not counted
                each.optimizer.grad_scale = None  # type: ignore[attr-defined]
                each.optimizer.found_inf = skip  # type: ignore[attr-defined]
            each.optimizer.step()
        for name in narrow:
            weight = self.weights[name]
            wide = self.held[name]
            if wide.grad is not None:
                weight.copy_(round_stochastically(wide, self.draws.generator("rounding", name, weight.device)))
            wide.grad = None
            wide.data = _without_memory(weight)


def _widen(weight: nn.Parameter, wide: nn.Parameter) -> None:
    """Give a stand-in the values of its weight, and the gradient, which is freed."""
    if weight.grad is not None:
        wide.data = weight.float()
        wide.grad = weight.grad.float()
        weight.grad = None


def stand_in(weight: nn.Parameter) -> nn.Parameter:
    """Return the weight itself, or for one in bfloat16 a float32 parameter without memory."""
    return nn.Parameter(_without_memory(weight)) if weight.dtype == torch.bfloat16 else weight


def _without_memory(weight: Tensor) -> Tensor:
    return torch.zeros((), device=weight.device).expand(weight.shape)


def split_into_chunks(named: Named, most: int = CHUNK_ELEMENTS) -> Iterator[dict[str, nn.Parameter]]:
    """Yield the weights in their order, as many at a time as have at most ``most`` elements, at least one."""
    chunk: dict[str, nn.Parameter] = {}
    for name, weight in named.items():
        if chunk and sum(member.numel() for member in chunk.values()) + weight.numel() > most:
            yield chunk
            chunk = {}
        chunk[name] = weight
    yield chunk
