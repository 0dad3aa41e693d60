"""Running averages of the weights, in float32 (law 4)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Ema:
    """One track: every ``update_every`` steps, shadow = decay x shadow + (1 - decay) x weights."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float, update_every: int) -> None:
        self.decay, self.update_every = decay, update_every
        self.shadow = {name: weight.detach().float().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Take in the weights after optimizer step ``step`` (the first is 1), when it is this track's turn."""
        if step % self.update_every:
            return
        names = list(self.shadow)
        current = [weights[name].detach().float() for name in names]
        torch._foreach_lerp_([self.shadow[name] for name in names], current, 1 - self.decay)

    @contextmanager
    def in_place_of(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The averaged weights stand in the model inside the block; afterwards the live ones are back, bit for bit."""
        live = {name: weight.detach().clone() for name, weight in weights.items()}
        try:
            _copy(self.shadow, weights)
            yield
        finally:
            _copy(live, weights)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
