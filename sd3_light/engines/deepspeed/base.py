"""What both of DeepSpeed's engines are: processes that hold a state and show it by canonical names."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sd3_light.engines.deepspeed.shard_state import ShardState
from sd3_light.engines.deepspeed.stage_state import StageState
from sd3_light.engines.protocol import TensorPiece

StateT = TypeVar("StateT", bound=StageState | ShardState)


class DeepSpeedBase(Generic[StateT]):
    """The part of `Engine` that tells what this process holds of weights and optimizer state."""

    state: StateT
    world: int
    device: torch.device

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """What this process holds of the trainable float32 weights, live, by canonical name."""
        return self.state.weights

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shape of every trainable weight of the model."""
        return self.state.shapes

    def pieces(self) -> Iterator[TensorPiece]:
        """Weights, then what the optimizer remembers of each."""
        return self.state.pieces()

    def like_weights(self, kind: str, held: Mapping[str, Tensor]) -> Iterator[TensorPiece]:
        """Pieces of tensors that lie as the weights do."""
        return self.state.like_weights(kind, held)

    def gather(self, held: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """All of what lies as the weights do, of all stages, in rank 0's host memory."""
        return self.state.gather(held)

    def sum_over_ranks(self, numbers: Tensor) -> Tensor:
        """Numbers of all processes added up."""
        if self.world > 1:
            dist.all_reduce(numbers)
        return numbers
