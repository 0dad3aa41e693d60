"""Muon for matrices whose rows are sharded over processes (FSDP2)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from sd3_light.optim.batched_muon import part_shape


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon` on DTensors that are split by rows; each process orthogonalises its share of whole matrices.

    The orthogonalisation is torch's own, in bfloat16, so the update is that of the whole matrix in one process, and
    matrices are sent in bfloat16 without loss. All processes step together.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices: as many at a time as there are processes, of similar size, one for each process."""
        assert closure is None
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            matrices.sort(key=lambda matrix: matrix.numel())
            world_size = group["params"][0].device_mesh.size()
            for first in range(0, len(matrices), world_size):
                self._update(matrices[first : first + world_size], group)

    def _update(self, matrices: list[DTensor], group: dict[str, Any]) -> None:
        rank = matrices[0].device_mesh.get_local_rank()
        whole = None
        for owner, matrix in enumerate(matrices):
            direction = _gather(self._direction(matrix, group).bfloat16(), matrix, owner)
            whole = direction if owner == rank else whole
        if whole is not None:
            keys = (group["ns_coefficients"], group["ns_steps"], group["eps"])
            height = part_shape(whole.shape, group)[0]
            whole = torch.cat([_zeropower_via_newtonschulz(part, *keys) for part in whole.split(height)])
        for owner, matrix in enumerate(matrices):
            rows = matrix.to_local()
            update = _scatter(whole if owner == rank else None, matrix, owner)
            rows.mul_(1 - group["lr"] * group["weight_decay"])
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], part_shape(matrix.shape, group))
            rows.add_(update.to(rows.dtype).mul_(-rate))  # the order of `BatchedMuon`, for the same bits

    def _direction(self, matrix: DTensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum and return the rows of the (Nesterov) direction."""
        assert isinstance(matrix.grad, DTensor)
        gradient = matrix.grad.to_local()
        momentum = self.state[matrix]["momentum_buffer"].to_local()
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _gather(rows: Tensor, matrix: DTensor, owner: int) -> Tensor | None:
    """Return the whole of a matrix from the rows of all processes on its owner, None elsewhere."""
    mesh = matrix.device_mesh
    sent = _padded(rows, -(-matrix.shape[0] // mesh.size()))
    parts = [torch.empty_like(sent) for _ in range(mesh.size())] if mesh.get_local_rank() == owner else None
    received = None if parts is None else [_as_bytes(part) for part in parts]
    dist.gather(_as_bytes(sent), received, group=mesh.get_group(), group_dst=owner)
    return None if parts is None else torch.cat(parts)[: matrix.shape[0]]


def _scatter(whole: Tensor | None, matrix: DTensor, owner: int) -> Tensor:
    """Return this process's rows of a whole matrix that its owner sends."""
    mesh = matrix.device_mesh
    rows = matrix.to_local()
    height = -(-matrix.shape[0] // mesh.size())
    received = rows.new_empty((height, matrix.shape[1]), dtype=torch.bfloat16)
    parts = None if whole is None else [_as_bytes(p) for p in _padded(whole, height * mesh.size()).split(height)]
    dist.scatter(_as_bytes(received), parts, group=mesh.get_group(), group_src=owner)
    return received[: len(rows)]


def _padded(rows: Tensor, height: int) -> Tensor:
    """Return a contiguous copy with rows of zeros up to this height: collectives need equal parts."""
    padded = rows.new_zeros((height, rows.shape[1]))
    padded[: len(rows)] = rows
    return padded


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a view that every backend can send."""
    return tensor.view(torch.uint8)
