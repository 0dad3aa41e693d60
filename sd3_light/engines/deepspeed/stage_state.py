"""State of a process under DeepSpeed: the weights of its stage, and their optimizer state, full or sharded by ZeRO."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd3_light.core.model import HEADS
from sd3_light.engines.protocol import PARAM_KIND, TensorPiece, ToHost, assign_writers
from sd3_light.launch import Launch
from sd3_light.optim.build import create_adamw_state
from sd3_light.optim.chunks import Named, Tensors


class StageState:
    """The trainable weights of one stage and their optimizer state, by canonical name.

    ``stage_of`` gives the stage of every trainable weight of the model, in the model's order, and ``shapes`` its shape.
    ``zero`` is DeepSpeed's ZeRO-1 or 2 optimizer; without it ``optimizer`` updates the weights directly. Fully
    replicated state is written by the first ``writers`` processes, other state by all.
    """

    def __init__(
        self,
        launch: Launch,
        parameters: Named,
        stage_of: Mapping[str, int],
        shapes: Mapping[str, tuple[int, ...]],
        optimizer: Any,
        zero: Any | None,
        writers: int = 1,
    ) -> None:
        self.rank = launch.rank
        self.parameters = dict(parameters)
        self.optimizer = optimizer
        self.zero = zero
        self.stage_of = stage_of
        self.shapes = shapes
        stages = max(stage_of.values()) + 1
        self.replicas = launch.world_size // stages
        if zero is not None:
            alias_master_weights(zero)
        self.weights = {name: weight.detach() for name, weight in self.parameters.items()}
        is_replicated = stages == 1 and zero is None
        self.writers = writers if is_replicated else launch.world_size
        sizes = [weight.numel() for weight in self.parameters.values()]
        assigned = assign_writers(sizes, writers if is_replicated else self.replicas)
        replica = launch.rank % self.replicas
        self._written = {name for name, writer in zip(self.parameters, assigned, strict=True) if writer == replica}

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield the weights, then the optimizer state of each."""
        yield from self.like_weights(PARAM_KIND, self.weights)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state.get(parameter):
                    create_adamw_state(self.optimizer, parameter)
        for name, weight in self.parameters.items():
            yield from self._full_state(name, weight) if self.zero is None else self._fragment(name, weight)

    def like_weights(self, kind: str, held: Tensors) -> Iterator[TensorPiece]:
        """Yield the pieces of tensors laid out like the weights."""
        for name, weight in self.parameters.items():
            if name in held:
                yield TensorPiece(f"{kind}/{name}", held[name].view(-1), 0, weight.shape, name in self._written)

    def _full_state(self, name: str, weight: nn.Parameter) -> Iterator[TensorPiece]:
        for kind, value in self.optimizer.state[weight].items():
            yield TensorPiece(f"{kind}/{name}", value.view(-1), 0, value.shape, name in self._written)

    def _fragment(self, name: str, weight: nn.Parameter) -> Iterator[TensorPiece]:
        """Yield the part of a weight's state in this process's partition of its group, which is one flat tensor."""
        assert self.zero is not None
        mapping: Any = weight._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return
        flat = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
        address = mapping.hp_fragment_address
        start = mapping.lp_fragment_address.start
        for kind, value in self.optimizer.state[flat].items():
            if value.dim():
                part = value[address.start : address.start + address.numel]
                yield TensorPiece(f"{kind}/{name}", part, start, weight.shape)
            else:  # a counter of the whole group, written by the process with the weight's first element
                yield TensorPiece(f"{kind}/{name}", value.view(-1), 0, (), writes=start == 0)

    def gather(self, held: Tensors, to_host: ToHost) -> dict[str, Tensor] | None:
        """Gather copies of tensors laid out like the weights, of all stages, in rank 0's host memory, one at a time."""
        gathered = {}
        for name, stage in self.stage_of.items():
            if name.startswith(HEADS) and name not in held:
                continue
            owner = stage * self.replicas  # its rank in the first pipeline
            if self.rank == 0:
                tensor = held[name] if stage == 0 else self._receive(name, owner)
                gathered[name] = to_host(name, tensor)
            elif self.rank == owner:
                dist.send(held[name].contiguous(), 0)
        return gathered if self.rank == 0 else None

    def _receive(self, name: str, owner: int) -> Tensor:
        like = next(iter(self.weights.values()))
        tensor = torch.empty(self.shapes[name], dtype=torch.float32, device=like.device)
        dist.recv(tensor, owner)
        return tensor


def alias_master_weights(zero: Any) -> None:
    """Make float32 weights their own master copies: ZeRO's partition shares the memory of the weights.

    This saves the copy, and writing a weight (from a checkpoint, or an average for evaluation) also writes its master.
    """
    groups = zip(
        zero.single_partition_of_fp32_groups,
        zero.parallel_partitioned_bit16_groups,
        zero.real_dp_process_group,
        strict=True,
    )
    for master, parts, group in groups:
        weights = parts[dist.get_rank(group)]
        assert master.dtype == weights.dtype == torch.float32, "weights must be float32"
        master.data = weights.data
    zero._link_all_hp_params()
