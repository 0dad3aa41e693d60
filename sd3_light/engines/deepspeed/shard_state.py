"""State of a process under ZeRO-3: one flat shard of every weight and of its optimizer state."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd3_light.engines.protocol import PARAM_KIND, TensorPiece, ToHost
from sd3_light.launch import Launch
from sd3_light.optim.build import create_adamw_state
from sd3_light.optim.chunks import Named, Tensors


@dataclass(frozen=True)
class _WeightShard:
    """Elements ``start`` to ``start + length`` of a weight; their state starts at index ``offset`` of ``flat``.

    Every process reserves ``capacity`` elements; the last processes may use fewer, or none.
    """

    start: int
    length: int
    capacity: int
    flat: Any
    offset: int

    def own_values(self, flat: Tensor) -> Tensor:
        """Return what belongs to the weight of a tensor laid out like ``flat``."""
        return flat[self.offset : self.offset + self.length]


class ShardState:
    """Parts of all trainable weights and their optimizer state, by canonical name. ``zero``: DeepSpeed's ZeRO-3."""

    def __init__(
        self,
        launch: Launch,
        parameters: Named,
        shapes: Mapping[str, tuple[int, ...]],
        optimizer: Any,
        zero: Any,
    ) -> None:
        self.launch = launch
        self.shapes = shapes
        self.optimizer = optimizer
        for flat, weights in zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True):
            assert flat.dtype == weights.dtype == torch.float32, "weights must be float32"
            flat.data = weights.data  # float32 weights are their own master copies
        shards = {id(weight): shard for weight, shard in _weight_shards(zero, launch.rank)}
        self._shards = {name: shards[id(weight)] for name, weight in parameters.items()}
        self.weights = {name: shard.own_values(shard.flat.detach()) for name, shard in self._shards.items()}

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield the weights, then the optimizer state of each."""
        yield from self.like_weights(PARAM_KIND, self.weights)
        for name, shard in self._shards.items():
            if not self.optimizer.state.get(shard.flat):
                create_adamw_state(self.optimizer, shard.flat)
            for kind, value in self.optimizer.state[shard.flat].items():
                if value.dim():
                    yield self._piece(f"{kind}/{name}", shard.own_values(value), name)
                else:  # a counter of the whole group
                    yield TensorPiece(f"{kind}/{name}", value.view(-1), 0, (), writes=self.launch.rank == 0)

    def like_weights(self, kind: str, held: Tensors) -> Iterator[TensorPiece]:
        """Yield the pieces of tensors laid out like the weights."""
        for name in self._shards:
            if name in held:
                yield self._piece(f"{kind}/{name}", held[name], name)

    def _piece(self, full_name: str, values: Tensor, name: str) -> TensorPiece:
        shard = self._shards[name]
        return TensorPiece(
            full_name, values, shard.start if shard.length else 0, self.shapes[name], writes=shard.length > 0
        )

    def gather(self, held: Tensors, to_host: ToHost) -> dict[str, Tensor] | None:
        """Gather copies of tensors laid out like the weights in rank 0's host memory, one tensor at a time."""
        gathered = {}
        for name, shard in self._shards.items():
            if name not in held:
                continue
            padded = nn.functional.pad(held[name], (0, shard.capacity - shard.length))
            received = (
                [torch.empty_like(padded) for _ in range(self.launch.world_size)] if self.launch.rank == 0 else None
            )
            dist.gather(padded, received, dst=0)
            if received is not None:
                shape = self.shapes[name]
                gathered[name] = to_host(name, torch.cat(received)[: torch.Size(shape).numel()].view(shape))
        return gathered if self.launch.rank == 0 else None


def _weight_shards(zero: Any, rank: int) -> Iterator[tuple[nn.Parameter, _WeightShard]]:
    """Yield every weight with this process's shard: a group is one flat tensor of its weights' shards in sequence."""
    for flat, weights in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        offset = 0
        for weight in weights:
            capacity = weight.partition_numel()
            start = rank * capacity
            length = max(0, min(capacity, weight.ds_numel - start))
            yield weight, _WeightShard(start, length, capacity, flat, offset)
            offset += capacity
