"""Muon on matrices whose rows are sharded over three processes, some unevenly. As a program: one of the processes."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd3_light.optim.batched_muon import BatchedMuon
from tests.distributed.layouts import run_ranks

SHAPES = ((72, 60), (60, 72), (5, 8), (2, 9), (7, 7), (24, 8), (10, 5))
PARTS = (1, 1, 1, 1, 1, 3, 2)
"""The matrices of each that are one above the other, beginning on other rows than the shards."""
WORLD, STEPS = 3, 4
KEYS = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


def matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def in_groups(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [weight for weight, own in zip(weights, PARTS, strict=True) if own == parts], "parts": parts}
        for parts in dict.fromkeys(PARTS)
    ]


def main(out: Path) -> None:
    """Train the matrices sharded, and write them whole."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from sd3_light.engines.weight_layouts import gathered_on_host
    from sd3_light.optim.sharded_muon import ShardedMuon

    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    weights = [nn.Parameter(distribute_tensor(matrix, mesh, [Shard(0)])) for matrix in matrices()]
    optimizer = ShardedMuon(in_groups(weights), **KEYS)
    for weight in weights:
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    for step in range(STEPS):
        for weight, gradient in zip(weights, gradients(step), strict=True):
            weight.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer.step()
    whole = [weight.full_tensor().detach() for weight in weights]
    assert all(map(torch.equal, map(gathered_on_host, weights), whole))
    if dist.get_rank() == 0:
        torch.save({"world": dist.get_world_size(), "weights": whole}, out)
    dist.destroy_process_group()


def test_sharded_matrices_train_like_whole_ones(tmp_path: Path) -> None:
    run_ranks(WORLD, Path(__file__).resolve(), tmp_path / "weights.pt")
    sharded = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert sharded["world"] == WORLD
    whole = [nn.Parameter(matrix) for matrix in matrices()]
    optimizer = BatchedMuon(in_groups(whole), **KEYS)
    for step in range(STEPS):
        for weight, gradient in zip(whole, gradients(step), strict=True):
            weight.grad = gradient
        optimizer.step()
    for ours, theirs, start in zip(sharded["weights"], whole, matrices(), strict=True):
        assert torch.equal(ours, theirs.detach())
        assert (ours - start).abs().max() > 1e-3


if __name__ == "__main__":
    main(Path(sys.argv[1]))
