"""Estimated durations agree with the measured ones of docs/evidence/LOG.md."""

import pytest

from sd3_light.config import SIZES, ModelSize
from sd3_light.core.cost import Tokens
from sd3_light.cost.throughput import measured_blocks, measured_speed, time_range, training_seconds
from sd3_light.cost.training_flops import step_flops, training_flops
from sd3_light.families.sd3.cost import SD3Cost

H200 = "NVIDIA H200"
LIGHT = SIZES["sd3_light"]
MEASURED = [  # blocks, batch, tokens per image, recomputation, seconds per step
    ("fast", LIGHT, 64, Tokens(256, 333), False, 0.2156),
    ("fast", LIGHT, 128, Tokens(256, 333), False, 0.4085),
    ("fast", LIGHT, 56, Tokens(1024, 333), False, 0.4598),
    ("fast", LIGHT, 1024, Tokens(256, 333), True, 3.9188),
    ("fp8", LIGHT, 64, Tokens(256, 333), False, 0.1829),
    ("fp8", LIGHT, 128, Tokens(256, 333), False, 0.3409),
    ("compiled", LIGHT, 64, Tokens(256, 333), False, 0.2343),
    ("stock", LIGHT, 64, Tokens(256, 333), False, 0.4347),
    ("stock", LIGHT, 16, Tokens(256, 333), False, 0.158),
    ("fast", SIZES["demo"], 1024, Tokens(16, 32), False, 0.032),
]


@pytest.mark.parametrize(("blocks", "size", "batch", "tokens", "recomputed", "seconds"), MEASURED)
def test_estimates_are_within_a_fifth_of_what_was_measured(
    blocks: str, size: ModelSize, batch: int, tokens: Tokens, recomputed: bool, seconds: float
) -> None:
    flops = 1000 * batch * training_flops(SD3Cost(size), tokens, recomputed).value
    estimate = training_seconds(H200, blocks, flops, 1000, size.num_layers)
    assert estimate == pytest.approx(1000 * seconds, rel=0.2)


@pytest.mark.parametrize(
    ("tokens", "batch", "graphs", "seconds"),
    [
        (Tokens(1024, 333), 4, True, 0.0606),
        (Tokens(1024, 333), 4, False, 0.137),
        (Tokens(4096, 333), 1, True, 0.079),
    ],
)
def test_adapters_are_faster_in_graphs(tokens: Tokens, batch: int, graphs: bool, seconds: float) -> None:
    """Compiled blocks of SD3.5 medium, a LoRA of rank 16."""
    cost = SD3Cost(SIZES["sd3.5_medium"])
    flops = 1000 * step_flops(cost, {tokens: batch}, adapter=True)
    blocks = measured_blocks("compiled", has_adapter=True)
    estimate = training_seconds(H200, blocks, flops, 1000, cost.num_blocks, graphs=graphs)
    assert estimate == pytest.approx(1000 * seconds, rel=0.2)
    # the base regime, whose small steps are bound by their kernels: 135,000 samples per second
    size = SIZES["demo"]
    flops = 1000 * 1024 * training_flops(SD3Cost(size), Tokens(16, 32)).value
    estimate = training_seconds(H200, "fast", flops, 1000, size.num_layers, graphs=True)
    assert estimate == pytest.approx(1000 * 1024 / 135_000, rel=0.2)


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "", "NVIDIA GH200 480GB"])
def test_a_kind_that_was_not_measured_has_no_estimate(name: str) -> None:
    assert measured_speed(name, "fast") is None
    assert training_seconds(name, "fast", 1e20, 1, 15) is None


def test_the_longest_time_covers_the_slowest_launches() -> None:
    assert time_range(0.0, 100, 15, (1e14, 2e14)) == (0, pytest.approx(100 * 15 * 0.009))
