"""The GPU memory formula for pipeline stages, ZeRO and FSDP2: what is sharded, what is in flight, which stage counts.

tests/distributed/test_layouts.py compares it with what processes really hold.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from sd3_light.config import SIZES, ModelSize
from sd3_light.core.cost import Tokens
from sd3_light.cost.gpu_memory import (
    ZERO3_LIVE_BYTES,
    ZERO_BUCKET_BYTES,
    activation_bytes,
    checkpoint_copy_bytes,
    gpu_memory,
    next_batch_bytes,
    state_bytes,
)
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.engines.deepspeed.runtime import BUCKET, MAX_LIVE
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.families.sd3.layers import build_layers, run_layers
from tests.unit.cost.test_gpu_memory import SavedTensors

SMALL = ModelSize("small", 4, 2, 64, 128, 64, 32, 32, 0.5, True)
LIGHT = TrainingSetup(SD3Cost(SIZES["sd3_light"]), Tokens(256, 333), 8, ema_tracks=1, world_size=8, deepspeed=True)


def saved_by(layers: list[Any], inputs: tuple[Tensor, ...]) -> tuple[int, tuple[Tensor, ...]]:
    """The bytes that layers save for their backward pass, without weights; and their outputs."""
    with SavedTensors(nn.ModuleList(layers)) as saved:
        outputs = run_layers(layers, inputs)
    for tensor in outputs:  # they wait for their gradients
        saved.add(tensor)
    return saved.total, outputs


def test_a_stage_saves_what_its_layers_save() -> None:
    """First, middle and last stage, in float32; the last one's target and error belong to the loss."""
    torch.manual_seed(0)
    batch, keys = 2, {"world_size": 3, "deepspeed": True, "stages": 3, "bounds": (0, 2, 4, 6)}
    setup = TrainingSetup(SD3Cost(SMALL), Tokens(256, 100), batch, compute_dtype="float32", **keys)  # type: ignore[arg-type]
    layers = build_layers(SD3Transformer2DModel(**SMALL.transformer_config()).train())
    noisy, prompt, pooled = (torch.randn(batch, *shape) for shape in ((16, 32, 32), (100, 128), (SMALL.pooled_width,)))
    state: tuple[Tensor, ...] = (noisy, torch.rand(batch), prompt, pooled)
    for stage in range(3):
        part = replace(setup, stage=stage)
        saved, state = saved_by(layers[part.layers.start : part.layers.stop], state)
        state = tuple(tensor.detach().requires_grad_() for tensor in state)
        assert saved == pytest.approx(activation_bytes(part), rel=0.04), stage


def test_micro_batches_wait_on_the_first_stages() -> None:
    """One-forward-one-backward: at most one per stage from this one on, and no more than are accumulated."""
    setup = replace(LIGHT, stages=4, accumulation=16)
    assert [replace(setup, stage=stage).in_flight for stage in range(4)] == [4, 3, 2, 1]
    assert [replace(setup, stage=stage, accumulation=2).in_flight for stage in range(4)] == [2, 2, 2, 1]
    equal = replace(setup, bounds=(0, 4, 8, 12, 17), batch=64)
    assert gpu_memory(equal).stage == 0
    assert "of 4 micro-batches" in gpu_memory(equal).step.formula
    few, many = (gpu_memory(replace(equal, accumulation=count)).step.value for count in (4, 64))
    assert few == many


def test_the_stage_that_needs_most_counts() -> None:
    setup = replace(LIGHT, stages=2, accumulation=8, batch=1)
    first, last = (gpu_memory(replace(setup, bounds=(0, at, 17))) for at in (13, 4))
    assert (first.stage, last.stage) == (0, 1)
    assert "stage 0 (layers 0 to 12)" in first.state.formula
    even = gpu_memory(setup).total
    assert even < min(first.total, last.total)


def test_parameters_of_stages_are_all_parameters() -> None:
    setup = replace(LIGHT, stages=4)
    parts = [replace(setup, stage=stage) for stage in range(4)]
    assert sum(part.parameters for part in parts) == SIZES["sd3_light"].num_parameters()
    assert [block for part in parts for block in part.blocks] == list(range(15))
    assert [part.is_first for part in parts] == [True, False, False, False]
    assert [part.is_last for part in parts] == [False, False, False, True]
    assert [next_batch_bytes(part) > 0 for part in parts] == [True, False, False, True]


def test_zero_shards_the_state() -> None:
    """Moments from ZeRO-1 on, gradients from ZeRO-2 on, weights and averages only in ZeRO-3; nothing on one GPU."""
    count = LIGHT.parameters
    by_zero = [state_bytes(replace(LIGHT, zero=zero)).value for zero in range(4)]
    whole = (4 + 8 + 4) * count
    assert by_zero[0] == whole
    assert by_zero[1] == by_zero[2] == round((4 + 8 / 8 + 4) * count)
    assert by_zero[3] == round((4 + 8 + 4 + 4) * count / 8) + ZERO_BUCKET_BYTES
    assert state_bytes(replace(LIGHT, world_size=1)).value == whole
    assert state_bytes(LIGHT).formula == "P·((weights 4 + EMA 4) + (AdamW 8) / 8 GPUs)"
    pipes = replace(LIGHT, stages=2)
    assert state_bytes(pipes).value == round((4 + 8 / 4 + 4) * pipes.parameters)


def test_gradients_depend_on_the_zero_stage() -> None:
    """As counted on CPUs: ZeRO-0 and 1 hold all and a flat copy; ZeRO-2 its part twice; ZeRO-3 holds them as state."""
    assert (4 * BUCKET, 4 * MAX_LIVE) == (ZERO_BUCKET_BYTES, ZERO3_LIVE_BYTES), "as in the engine"
    few = replace(LIGHT, batch=1, tokens=Tokens(16, 16), checkpointing=True)
    count, bucket = 4 * LIGHT.parameters, ZERO_BUCKET_BYTES

    def in_optimizer(**keys: Any) -> float:
        memory = gpu_memory(replace(few, **keys))
        assert memory.moment == "optimizer", keys
        return (memory.step.value - next_batch_bytes(few)) / 1.03

    assert in_optimizer(zero=0) == pytest.approx(count + 2e9, rel=0.01)
    assert in_optimizer(zero=1) == pytest.approx(count + bucket, rel=0.01)
    assert in_optimizer(zero=1, world_size=2, stages=2, bounds=(0, 16, 17)) == pytest.approx(
        2 * 4 * sum(SIZES["sd3_light"].layer_parameters()[:16]), rel=0.01
    )
    assert gpu_memory(replace(few, zero=2)).step.value < count
    assert "gradients 4" in state_bytes(replace(few, zero=3)).formula


def test_every_process_with_a_part_writes_checkpoints() -> None:
    count = SIZES["sd3_light"].num_parameters()
    assert checkpoint_copy_bytes(LIGHT).value == round(16 * count / 8)
    assert checkpoint_copy_bytes(replace(LIGHT, world_size=16, zero=0)).value == round(16 * count / 8), (
        "the first machine writes"
    )
    assert checkpoint_copy_bytes(replace(LIGHT, world_size=16)).value == round(16 * count / 16)
    pipes = replace(LIGHT, stages=2, world_size=2, bounds=(0, 16, 17))
    assert checkpoint_copy_bytes(pipes).value == 16 * pipes.parameters, "of the larger stage"


def test_stages_of_an_adapter_are_balanced_by_its_weights() -> None:
    adapter = (0, *[100] * 15, 0)
    setup = replace(LIGHT, adapter=adapter, stages=2)
    assert setup.layer_bounds in ((0, 8, 17), (0, 9, 17))
    assert sum(replace(setup, stage=stage).trained_parameters for stage in range(2)) == 1500
    assert setup.frozen_bytes == 2 * setup.parameters
