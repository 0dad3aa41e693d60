"""What a run prints about memory and CUDA graphs: what it suggests if the memory is full, and when it records."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sd3_light.config import SIZES, TrainConfig
from sd3_light.core.cost import Layout
from sd3_light.engines import Launch
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.train.memory_hint import memory_hint, memory_savings
from sd3_light.train.state import _choose_graphs

LORA = {"type": "lora", "rank": 4}
SWAP, BITS, RECOMPUTE = 'swap_blocks = "all"', "adapter.base_bits = 8", "activation_checkpointing = true"
RELEASE = "gradient_release = true with gradient_clipping = 0"
DROPPED = {"type": "lora", "rank": 4, "dropout": 0.1}


def config(**keys: Any) -> TrainConfig:
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": {"diffusers_path": "folder"}, **keys}
    return TrainConfig.model_validate(table, context={"base": Path()})


@pytest.mark.parametrize(
    ("keys", "layout", "expected"),
    [
        ({"adapter": LORA}, Layout(), [SWAP, BITS, RECOMPUTE]),
        ({"adapter": LORA, "swap_blocks": 4}, Layout(), [BITS, RECOMPUTE]),
        ({"adapter": {**LORA, "base_bits": 8}, "activation_checkpointing": True}, Layout(), [SWAP]),
        ({"adapter": {"type": "lokr", "rank": 4}}, Layout(), [SWAP, RECOMPUTE]),
        ({"adapter": LORA, "parallel": "fsdp2"}, Layout(world_size=2), [RECOMPUTE]),
        ({"adapter": LORA}, Layout(world_size=2, by_deepspeed=True), [RECOMPUTE]),
        ({}, Layout(), [RELEASE, RECOMPUTE]),
        ({"gradient_clipping": 0}, Layout(), ["gradient_release = true", RECOMPUTE]),
        ({"gradient_release": True, "gradient_clipping": 0}, Layout(), [SWAP, RECOMPUTE]),
        ({"gradient_accumulation_steps": 2}, Layout(), [RECOMPUTE]),
        ({}, Layout(world_size=2), [RECOMPUTE]),
        ({"activation_checkpointing": "selective"}, Layout(world_size=2), [RECOMPUTE]),
        ({"optimizer": {"type": "muon"}, "activation_checkpointing": True}, Layout(), []),
    ],
)
def test_unused_keys_come_in_the_order_of_their_cost(keys: dict[str, Any], layout: Layout, expected: list[str]) -> None:
    assert list(memory_savings(config(**keys), layout)) == expected


def test_a_full_gpu_can_do_without_graphs() -> None:
    for graphs in (False, True):
        hint = memory_hint(config(adapter=LORA), Layout(), graphs)
        assert ("cuda_graphs = false" in hint) == graphs
        assert f"write {SWAP}, then {BITS}, then {RECOMPUTE}, or lower micro_batch_size_per_gpu" in hint
    assert "cache_residence" not in memory_hint(config(), Layout(), residence="host")
    whole = memory_hint(config(), Layout(), residence="device")
    assert whole == f'write cache_residence = "stream", or {memory_hint(config(), Layout())}'
    assert "fsdp2" not in memory_hint(config(parallel="fsdp2"), Layout(world_size=2))


def choose(flops: float = 1e12, **keys: Any) -> bool:
    model = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "demo"}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": model, **keys}
    config = TrainConfig.model_validate(table, context={"base": Path()})
    cost = SD3Cost(SIZES["demo"])
    context: Any = SimpleNamespace(config=config, cost=cost, launch=Launch(), by_deepspeed=False, largest_flops=flops)
    engine = Mock()
    _choose_graphs(engine, context)
    return bool(engine.use_graphs.called)


def test_recorded_graphs_are_said_and_refused_ones_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose()
    assert choose(compile=True), "compiled blocks, too"
    assert "CUDA graphs: forward and backward passes are recorded once per bucket shape" in capsys.readouterr().err
    assert not choose(adapter=DROPPED, cuda_graphs=True)
    reason = "an adapter with dropout draws numbers in each pass"
    line = f"cuda_graphs = true is not available: {reason}; kernels are launched one by one\n"
    assert capsys.readouterr().err.endswith(line)
    for keys in ({"cuda_graphs": False}, {"adapter": DROPPED}, {"flops": 1e15}):
        assert not choose(**keys)
    assert capsys.readouterr().err == ""
