"""Update weights during the backward pass and free their gradients, so that all of them never exist at once."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from sd3_light.engines.protocol import require_gradients, sum_of_squares
from sd3_light.optim.build import Optimizer
from sd3_light.optim.chunks import WeightChunk


class GradientRelease:
    """Takes the step of each chunk of an optimizer's weights as soon as the last of their gradients is known.

    After a loss that is not finite no weight changes. After a gradient that is not finite no further chunk changes;
    those whose gradients were known before have taken their step. ``step`` replaces the optimizer's.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[Tensor, WeightChunk], None] | None = None) -> None:
        self._optimizer = optimizer
        self._step = step or optimizer.step
        self._missing: list[set[str]] = []
        self._squares = torch.zeros(())
        for number, chunk in enumerate(optimizer.chunks):
            for name, weight in chunk.weights.items():
                weight.register_post_accumulate_grad_hook(partial(self._arrived, number, name))

    def begin(self, loss: Tensor) -> None:
        """Start the backward pass of a loss."""
        self._missing = [set(chunk.weights) for chunk in self._optimizer.chunks]
        self._squares = 0 * loss.detach()  # 0, or NaN to skip all updates

    def _arrived(self, number: int, name: str, weight: nn.Parameter) -> None:
        self._missing[number].discard(name)
        if not self._missing[number]:
            self._update(number)

    def _update(self, number: int) -> None:
        chunk = self._optimizer.chunks[number]
        gradients = [weight.grad for weight in chunk.weights.values() if weight.grad is not None]
        self._squares = self._squares + sum_of_squares(gradients)
        gradients.clear()
        self._step((~torch.isfinite(self._squares)).float(), chunk)
        for weight in chunk.weights.values():
            weight.grad = None

    def finish(self) -> Tensor:
        """Return the norm of all gradients; raise a UserError if one of them is missing."""
        require_gradients(name for missing in self._missing for name in sorted(missing))
        return self._squares.sqrt()
