"""Base class of the DeepSpeed engines: access to weights and optimizer state by canonical name."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sd3_light.engines.deepspeed.shard_state import ShardState
from sd3_light.engines.deepspeed.stage_state import StageState
from sd3_light.engines.protocol import TensorPiece
from sd3_light.optim.build import Optimizer

StateT = TypeVar("StateT", bound=StageState | ShardState)


class DeepSpeedBase(Generic[StateT]):
    """The part of `Engine` that exposes this process's weights and optimizer state."""

    state: StateT
    optimizer: Optimizer
    world: int
    device: torch.device

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """This process's part of the trainable float32 weights, live, by canonical name."""
        return self.state.weights

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The full shape of every trainable weight of the model."""
        return self.state.shapes

    @property
    def updates_started(self) -> int:
        """How often the optimizer began to change weights."""
        return self.optimizer.updates_started

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield the weights, then the optimizer state of each."""
        return self.state.pieces()

    def like_weights(self, kind: str, held: Mapping[str, Tensor]) -> Iterator[TensorPiece]:
        """Yield the pieces of tensors laid out like the weights."""
        return self.state.like_weights(kind, held)

    def gather(self, held: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Gather tensors laid out like the weights, of all stages, in rank 0's host memory."""
        return self.state.gather(held)

    def sum_over_ranks(self, numbers: Tensor) -> Tensor:
        """Sum numbers over all processes."""
        if self.world > 1:
            dist.all_reduce(numbers)
        return numbers
