"""Which runs replay CUDA graphs, and what they cost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config import SIZES, TrainConfig
from sd3_light.core.cost import Layout, Tokens
from sd3_light.cost.amount import format_bytes
from sd3_light.cost.gpu_memory import gpu_memory, next_batch_bytes
from sd3_light.cost.graph_choice import why_no_graphs
from sd3_light.cost.training_flops import training_flops
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.families.sd3.cost import SD3Cost

DEMO = SD3Cost(SIZES["demo"])
LIGHT = SD3Cost(SIZES["sd3_light"])
MODEL: dict[str, Any] = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "demo"}


def config(model: dict[str, Any] | None = None, **keys: Any) -> TrainConfig:
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "model": {**MODEL, **(model or {})}, **keys}
    return TrainConfig.model_validate(table, context={"base": Path()})


def reason(train: TrainConfig, flops: float = 1e12, **keys: Any) -> str | None:
    return why_no_graphs(train, DEMO, flops, Layout(**keys))


def flops(cost: SD3Cost, tokens: Tokens, batch: int) -> float:
    return float(batch * training_flops(cost, tokens).value)


def test_small_steps_are_recorded_and_large_ones_only_on_request() -> None:
    assert why_no_graphs(config(), DEMO, flops(DEMO, Tokens(16, 32), 1024), Layout()) is None
    large = flops(LIGHT, Tokens(256, 333), 128)
    assert why_no_graphs(config(), LIGHT, large, Layout()) == "its kernels take longer than their launches"
    assert why_no_graphs(config(cuda_graphs=True), LIGHT, large, Layout()) is None
    # real text is judged by its longest captions: a usual batch has a fraction of their FLOPs
    real = config({"text_tokens": "real"})
    assert why_no_graphs(real, DEMO, 4e12 * DEMO.num_blocks, Layout()) is None
    assert why_no_graphs(config(), DEMO, 4e12 * DEMO.num_blocks, Layout()) is not None
    assert why_no_graphs(real, DEMO, 6e12 * DEMO.num_blocks, Layout()) == "its kernels take longer than their launches"


def test_stock_blocks_are_recorded_up_to_larger_steps() -> None:
    """SD3.5 medium gains at 512 px with batch 4 and at 1024 px with batch 1; with batch 4 only if blocks run twice."""
    cost = SD3Cost(SIZES["sd3.5_medium"])
    lora = {"adapter": {"type": "lora", "rank": 16}}
    large = flops(cost, Tokens(4096, 333), 4)
    for keys in ({}, lora):
        for tokens, batch in ((Tokens(1024, 333), 4), (Tokens(4096, 333), 1)):
            assert why_no_graphs(config(**keys), cost, flops(cost, tokens, batch), Layout()) is None
        assert why_no_graphs(config(**keys), cost, large, Layout()) == "its kernels take longer than their launches"
        assert why_no_graphs(config(activation_checkpointing=True, **keys), cost, large, Layout()) is None
    fast = SD3Cost(replace(SIZES["sd3.5_medium"], dual_attention_layers=()))
    small = flops(fast, Tokens(1024, 333), 4)
    assert why_no_graphs(config(), fast, small, Layout()) == "its kernels take longer than their launches"


@pytest.mark.parametrize("cuda_graphs", ["auto", True])
@pytest.mark.parametrize(
    ("model", "keys", "layout", "expected"),
    [
        ({"text_tokens": "real", "text_recon_gamma": 0.1, "text_recon_target_layer": 0}, {}, {}, "text_recon"),
        ({}, {"adapter": {"type": "lora", "rank": 4, "dropout": 0.1}}, {}, "an adapter with dropout"),
        ({}, {"adapter": {"type": "lora", "rank": 4}, "swap_blocks": 3}, {}, "blocks are swapped"),
        ({}, {"gradient_release": True, "gradient_clipping": 0}, {}, "gradient_release = true"),
        ({}, {}, {"world_size": 2}, "one process"),
        ({}, {}, {"by_deepspeed": True}, "torch engine"),
    ],
)
def test_other_runs_launch_their_kernels(
    cuda_graphs: Any, model: dict[str, Any], keys: dict[str, Any], layout: dict[str, Any], expected: str
) -> None:
    why = reason(config(model, cuda_graphs=cuda_graphs, **keys), **layout)
    assert why is not None
    assert expected in why


@pytest.mark.parametrize(
    "keys",
    [
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "fast": False},
        {"compile": True},
        {"model": {"text_tokens": "real"}},
        {"adapter": {"type": "lora", "rank": 4}},
        {"adapter": {"type": "lora", "rank": 4}, "compile": True, "activation_checkpointing": True},
    ],
)
def test_adapters_real_text_compiled_and_recomputed_blocks_are_recorded(keys: dict[str, Any]) -> None:
    model = keys.pop("model", None)
    assert reason(config(model, **keys)) is None
    assert reason(config(model, cuda_graphs=False, **keys)) == "cuda_graphs = false"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_memory_of_a_recorded_step_stays_allocated(checkpointing: bool) -> None:
    plain = TrainingSetup(DEMO, Tokens(16, 32), 1024, fast=True, evaluates=True, checkpointing=checkpointing)
    recorded = replace(plain, graphs=True)
    step, both = gpu_memory(plain).step.value, gpu_memory(recorded).step.value
    assert 1.8 * step < both < 2.3 * step
    assert "graphs" in gpu_memory(recorded).step.formula
    assert "graphs" not in gpu_memory(plain).step.formula
    ten = gpu_memory(replace(recorded, graph_shapes=10)).step.value
    assert ten - both == pytest.approx(9 * next_batch_bytes(plain), rel=0.04), "each shape has its inputs, and slack"


def test_graphs_add_to_gradients_that_exist_from_the_start() -> None:
    """Also in a step of one micro-batch, where plain gradients appear in the backward pass."""
    plain = TrainingSetup(DEMO, Tokens(16, 32), 1024, fast=True)
    term = f"accumulated gradients {format_bytes(4 * plain.parameters)}"
    for setup, counted in (
        (plain, False),
        (replace(plain, accumulation=2), True),
        (replace(plain, graphs=True), True),
        (replace(plain, graphs=True, accumulation=2), True),
    ):
        memory = gpu_memory(setup)
        assert memory.moment == "end of forward"
        assert (term in memory.step.formula) == counted
