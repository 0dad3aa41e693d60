"""What a run prints about CUDA graphs, and when its engine records them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sd3_light.config import SIZES, TrainConfig
from sd3_light.engines import Launch
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.train.state import _choose_graphs

DROPPED = {"type": "lora", "rank": 4, "dropout": 0.1}


def choose(flops: float = 1e12, **keys: Any) -> bool:
    """Return whether the engine records graphs."""
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
