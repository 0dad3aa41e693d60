"""What GPUs send each other: the formulas against the collectives of one rank among many that do not exist."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from sd3_light.config import SIZES, TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.core.cost import Tokens
from sd3_light.cost.traffic import needed_bandwidth, sent_per_step
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.engines.weight_layouts import Replicas, replicate, shard
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.launch import Launch

CPU = torch.device("cpu")
SIZE = SIZES["tiny2"]
MODEL = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": SIZE.name, "dtype": "float32"}


class Collectives(TorchDispatchMode):
    """Counts the elements of gathered tensors, and of those whose sum is scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = 0
        self.reduced = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.gathered += args[0].numel()
        if func is torch.ops.c10d._reduce_scatter_base_.default:
            self.reduced += args[1].numel()
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=[8, 64, 1024])
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture
def module(tmp_path: Path) -> SD3TrainingModule:
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": MODEL}
    config = TrainConfig.model_validate(table, context={"base": tmp_path})
    return SD3TrainingModule(new_transformer(SIZE.transformer_config(), 0), config)


def run(layout: Replicas, micro_batches: int = 1) -> None:
    values = {"noisy": torch.randn(1, 16, 4, 4), "t": torch.rand(1), "prompt": torch.randn(1, 3, SIZE.text_width)}
    values |= {"pooled": torch.randn(1, SIZE.pooled_width), "target": torch.randn(1, 16, 4, 4)}
    for number in range(micro_batches):
        with layout.accumulating(last=number == micro_batches - 1):
            losses: dict[str, Tensor] = layout.run(Batch(1, values))
            losses["loss"].mean().backward()


def setup_of(world: int, parallel: str = "ddp", accumulation: int = 1) -> TrainingSetup:
    keys: dict[str, Any] = {"accumulation": accumulation, "world_size": world, "parallel": parallel}
    return TrainingSetup(SD3Cost(SIZE), Tokens(4, 3), 1, compute_dtype="float32", **keys)


def padded(module: SD3TrainingModule, world: int) -> int:
    """Return the elements of all weights with their rows filled up so that every rank has as many."""
    shapes = [tuple(weight.shape) for weight in module.parameters()]
    return sum(-(-rows // world) * world * torch.Size(rest).numel() for rows, *rest in shapes)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_fsdp2_gathers_blocks_twice_per_micro_batch(module: SD3TrainingModule, world: int, accumulation: int) -> None:
    elements = padded(module, world)
    layout = shard(module, Launch(world_size=world), CPU)
    with Collectives() as counted:
        run(layout, accumulation)
    assert counted.gathered == 2 * accumulation * elements
    assert counted.reduced == elements
    sent = 4 * (counted.gathered + counted.reduced) * (world - 1) / world
    formula = sent_per_step(setup_of(world, "fsdp2", accumulation)).value
    weights = SD3Cost(SIZE).parameters
    assert formula == pytest.approx(sent * weights / elements, rel=1e-6)
    if world == 8:  # hardly a row is filled up
        assert formula == pytest.approx(sent, rel=0.02)


def test_ddp_averages_the_gradients_once_per_step(module: SD3TrainingModule, world: int) -> None:
    layout = replicate(module, Launch(world_size=world), 1)
    counted = []

    def average(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        counted.append(bucket.buffer().nbytes)
        done = Future[Tensor]()
        done.set_result(bucket.buffer())
        return done

    assert isinstance(layout.run, DistributedDataParallel)
    layout.run.register_comm_hook(None, average)
    run(layout, micro_batches=3)
    sent = 2 * sum(counted) * (world - 1) / world
    assert sent_per_step(setup_of(world, "ddp", 3)).value == pytest.approx(sent, rel=1e-6)


def test_adapters_send_their_gradients_alone_and_zero_2_those_of_each_micro_batch() -> None:
    base = replace(setup_of(4), adapter=(0, 1000, 1000, 0))
    assert sent_per_step(base).value == 2 * 3 / 4 * 4 * 2000
    assert sent_per_step(replace(base, world_size=1)).value == 0, "one GPU sends nothing"
    assert needed_bandwidth(1000, 2.0) == 4000, "in bits per second"
    for zero, times in ((1, 2), (2, 4)):
        setup = replace(setup_of(4, accumulation=3), deepspeed=True, zero=zero)
        assert sent_per_step(setup).value == pytest.approx(3 / 4 * times * 4 * SD3Cost(SIZE).parameters, rel=1e-6)
