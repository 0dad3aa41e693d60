"""What a process holds of a run under DeepSpeed: the weights of its stage, and optimizer state whole or cut by ZeRO."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd3_light.engines.protocol import PARAM_KIND, TensorPiece
from sd3_light.engines.writers import assign_writers
from sd3_light.optim.build import create_adamw_state


@dataclass(frozen=True)
class PipelineGrid:
    """Where a process stands: ranks 0 to ``replicas`` - 1 are the first stage, the next as many the second, ..."""

    rank: int
    stages: int
    replicas: int

    @property
    def stage(self) -> int:
        """The stage of this process."""
        return self.rank // self.replicas

    @property
    def replica(self) -> int:
        """Which of the equal pipelines it belongs to."""
        return self.rank % self.replicas

    def first_of(self, stage: int) -> int:
        """The rank of the first pipeline's process of a stage."""
        return stage * self.replicas


class StageState:
    """The trainable weights of one stage and their optimizer state, by canonical names.

    ``stage_of`` says for every trainable weight of the model, in the model's order, which stage has it, and ``shapes``
    its shape. ``zero`` is DeepSpeed's ZeRO-1 or 2 optimizer; without it ``optimizer`` steps on the weights themselves.
    """

    def __init__(
        self,
        grid: PipelineGrid,
        parameters: Mapping[str, nn.Parameter],
        stage_of: Mapping[str, int],
        shapes: Mapping[str, tuple[int, ...]],
        optimizer: Any,
        zero: Any | None,
        writers: int,
    ) -> None:
        self.grid, self.parameters, self.optimizer, self.zero = grid, dict(parameters), optimizer, zero
        self.stage_of, self.shapes, self.writers = stage_of, shapes, writers
        if zero is not None:
            own_masters(zero)
        self.weights = {name: weight.detach() for name, weight in self.parameters.items()}
        alone = grid.stages == 1 and zero is None  # then the first ``writers`` processes write, else all of them
        who = assign_writers(
            [weight.numel() for weight in self.parameters.values()], writers if alone else grid.replicas
        )
        self._mine = {name for name, one in zip(self.parameters, who, strict=True) if one == grid.replica}

    def writes(self, name: str) -> bool:
        """Whether this process writes this weight of its stage, of which its replicas have the same."""
        return name in self._mine

    def pieces(self) -> Iterator[TensorPiece]:
        """Weights, then what the optimizer remembers of each."""
        yield from self.like_weights(PARAM_KIND, self.weights)
        for group in self.optimizer.param_groups:
            for held in group["params"]:
                if not self.optimizer.state.get(held):
                    create_adamw_state(self.optimizer, held)
        for name, weight in self.parameters.items():
            yield from self._whole(name, weight) if self.zero is None else self._fragment(name, weight)

    def like_weights(self, kind: str, held: Mapping[str, Tensor]) -> Iterator[TensorPiece]:
        """Pieces of tensors that lie as the weights do."""
        for name, weight in self.parameters.items():
            yield TensorPiece(f"{kind}/{name}", held[name].view(-1), 0, tuple(weight.shape), self.writes(name))

    def _whole(self, name: str, weight: nn.Parameter) -> Iterator[TensorPiece]:
        for kind, value in self.optimizer.state[weight].items():
            yield TensorPiece(f"{kind}/{name}", value.view(-1), 0, tuple(value.shape), self.writes(name))

    def _fragment(self, name: str, weight: nn.Parameter) -> Iterator[TensorPiece]:
        """The part of a weight's state in this process's share of its group, which is one flat tensor."""
        assert self.zero is not None
        place: Any = weight._hp_mapping  # type: ignore[attr-defined]
        if place is None:
            return
        flat, address = self.zero.single_partition_of_fp32_groups[place.param_group_index], place.hp_fragment_address
        start = place.lp_fragment_address.start
        for kind, value in self.optimizer.state[flat].items():
            if value.dim():
                part = value[address.start : address.start + address.numel]
                yield TensorPiece(f"{kind}/{name}", part, start, tuple(weight.shape))
            else:  # a count, of the whole group: who has a weight's first element tells it
                yield TensorPiece(f"{kind}/{name}", value.view(-1), 0, (), writes=start == 0)

    def norm(self, pipe: dist.ProcessGroup | None) -> float:
        """The norm over the weights of all stages."""
        squares = torch.stack(torch._foreach_norm(list(self.weights.values()))).square().sum()
        if pipe is not None:
            dist.all_reduce(squares, group=pipe)
        return float(squares.sqrt())

    def gather(self, held: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """What lies as the weights do, of all stages, in rank 0's host memory; a copy. One tensor at a time travels."""
        found = {}
        for name, stage in self.stage_of.items():
            owner = self.grid.first_of(stage)
            if self.grid.rank == 0:
                tensor = held[name] if stage == 0 else self._receive(name, owner)
                found[name] = tensor.to("cpu", copy=True)
            elif self.grid.rank == owner:
                dist.send(held[name].contiguous(), 0)
        return found if self.grid.rank == 0 else None

    def _receive(self, name: str, owner: int) -> Tensor:
        like = next(iter(self.weights.values()))
        tensor = torch.empty(self.shapes[name], dtype=torch.float32, device=like.device)
        dist.recv(tensor, owner)
        return tensor


def own_masters(zero: Any) -> None:
    """Let float32 weights be their own master copies: ZeRO's share of them is memory of the weights themselves.

    It saves that copy, and whoever writes a weight (a checkpoint, an average that stands in) has written its master.
    """
    groups = zip(
        zero.single_partition_of_fp32_groups,
        zero.parallel_partitioned_bit16_groups,
        zero.real_dp_process_group,
        strict=True,
    )
    for share, parts, group in groups:
        mine = parts[dist.get_rank(group)]
        assert share.dtype == mine.dtype == torch.float32, "weights learn in fp32"
        share.data = mine.data
    zero._link_all_hp_params()
