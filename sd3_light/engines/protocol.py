"""What the loop and the checkpoint ask of an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Prepared = tuple[tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: losses (means over micro-batches and ranks), gradient norm, and whether it was taken.

    A step whose loss or gradient is not finite is not taken.
    """

    losses: dict[str, float]
    grad_norm: float
    taken: bool


@dataclass(frozen=True)
class Piece:
    """A flat part of one tensor of the run that this rank holds.

    ``values`` is a 1-D view of live memory: elements ``start`` to ``start + len(values)`` of a tensor of ``shape``. Of
    replicas one ``writes``. The name is ``KIND/NAME`` with the stock denoiser's parameter name.
    """

    name: str
    values: Tensor
    start: int
    shape: tuple[int, ...]
    writes: bool = True


class Engine(Protocol):
    """Runs steps; exposes its weights and optimizer state by canonical names."""

    rank: int
    world: int

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The trainable float32 weights, live, by the stock denoiser's parameter names."""

    def train_step(self, batches: Sequence[Prepared], lr: float) -> StepResult:
        """One optimizer step over equal micro-batches."""

    def evaluate(self, batch: Prepared) -> dict[str, float]:
        """Losses of one micro-batch, nothing learned; the mean over ranks."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """``KIND/NAME`` -> tensor for all the optimizer remembers."""

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """What `optimizer_state` gave, from this or any other engine."""
