"""How the torch engine distributes weights over processes: a full copy each (DDP), or some rows each (FSDP2)."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sd3_light.core.model import TrainedModel
from sd3_light.launch import Launch


def whole_tensor(tensor: DTensor) -> Tensor:
    """Return all rows of a tensor whose rows are divided among all processes, which must call it together.

    Over gloo torch's own way ends the processes with a fault of the memory if the tensor is on a GPU.
    """
    is_carried_by_host = tensor.to_local().is_cuda and dist.get_backend() == "gloo"
    return gathered_on_host(tensor) if is_carried_by_host else tensor.full_tensor()


def gathered_on_host(tensor: DTensor) -> Tensor:
    """Return all rows, joined in host memory and brought back to the tensor's device."""
    held = tensor.to_local().detach()
    rows = -(-tensor.shape[0] // dist.get_world_size())
    part = torch.zeros(rows, *tensor.shape[1:], dtype=held.dtype)  # the last processes may hold fewer rows
    part[: held.shape[0]] = held
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts)[: tensor.shape[0]].to(held.device)


class Replicas:
    """Every process holds all weights; DDP averages their gradients. ``run`` is the module to call in training.

    ``needs_all_gradients``: a weight that a step does not reach is an error.
    """

    needs_all_gradients = True

    def __init__(self, run: nn.Module, launch: Launch, writers: int) -> None:
        self.run = run
        self.rank = launch.rank
        self.writers = writers

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Wrap a micro-batch: only the last one of a step synchronizes gradients."""
        with nullcontext() if last or not isinstance(self.run, DistributedDataParallel) else self.run.no_sync():
            yield

    def held(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a weight, gradient or optimizer tensor, sharing its memory."""
        return tensor.detach()

    def start(self, weight: Tensor) -> int:
        """Return the index of the first element of a weight that this process holds."""
        return 0

    def writes(self, writer: int) -> bool:
        """Whether this process writes its part of a weight; ``writer`` writes it if it is replicated."""
        return writer == self.rank

    def sum_parts(self, value: Tensor) -> Tensor:
        """Sum values that each process computed from its own parts."""
        return value

    def gather(self, held: Tensor, weight: Tensor) -> Tensor:
        """Return the full tensor of one laid out like ``weight``; all processes must call it."""
        return held

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make parts of the module callable on their own inside the block; all processes must enter it."""
        yield


class Shards(Replicas):
    """Every process holds some rows of each weight and its optimizer state (FSDP2); blocks are gathered one by one."""

    def __init__(self, run: nn.Module, launch: Launch) -> None:
        super().__init__(run, launch, launch.world_size)

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Wrap a micro-batch."""
        cast(FSDPModule, self.run).set_requires_gradient_sync(last)
        yield

    def held(self, tensor: Tensor) -> Tensor:
        """Return the rows of this process."""
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()

    def start(self, weight: Tensor) -> int:
        """Return the index of the first element; rows are split as by torch.chunk: all parts but the last are equal."""
        rows = -(-weight.shape[0] // self.writers)
        return min(self.rank * rows, weight.shape[0]) * (weight.numel() // weight.shape[0])

    def writes(self, writer: int) -> bool:
        """Every process writes its rows."""
        return True

    def sum_parts(self, value: Tensor) -> Tensor:
        """Sum over all processes."""
        total = value.clone()
        dist.all_reduce(total)
        return total

    def gather(self, held: Tensor, weight: Tensor) -> Tensor:
        """Return the full tensor."""
        assert isinstance(weight, DTensor)
        joined = DTensor.from_local(
            held, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
        return whole_tensor(joined)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold the weights outside blocks whole inside the block; blocks are gathered when they are called."""
        root = cast(FSDPModule, self.run)
        root.unshard()
        try:
            yield
        finally:
            root.reshard()


def replicate(module: nn.Module, launch: Launch, writers: int) -> Replicas:
    """Wrap the module in DDP if there are several processes."""
    # without device_ids: the engine has already moved tensors to the device, and lengths stay on the host
    run = DistributedDataParallel(module, gradient_as_bucket_view=True) if launch.world_size > 1 else module
    return Replicas(run, launch, writers)


def shard(module: TrainedModel, launch: Launch, device: torch.device) -> Shards:
    """Shard the module with FSDP2."""
    mesh = init_device_mesh(device.type, (launch.world_size,))
    # inputs are not cast: timesteps up to 1000 and targets would lose precision; autocast casts inside
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if device.type == "cuda" and module.compute_dtype == torch.bfloat16:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    # the root is resharded after each forward too, because an evaluation swaps the weights
    for part in (*module.blocks(), module):
        fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    for method in ("denoise", "infer_in_place", "evaluate"):
        register_fsdp_forward_method(module, method)
    return Shards(module, launch)
