"""Pipeline stages cover all layers and match DeepSpeed's partitioning."""

import random
from typing import Any

import pytest

from sd3_light.config import SIZES
from sd3_light.cost.partition import balanced, stage_bounds, uniform


@pytest.fixture
def deepspeed_utils() -> Any:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime import utils

    return utils


def test_bounds_match_deepspeeds(deepspeed_utils: Any) -> None:
    """On the layers of every size, and on random weights."""
    rng = random.Random(0)
    lists = [list(size.layer_parameters()) for size in SIZES.values()]
    lists += [[rng.randint(0, 9) for _ in range(rng.randint(1, 14))] for _ in range(60)]
    for weights in lists:
        for parts in (1, 2, 3, 4, 6):
            if len(weights) >= parts:
                assert balanced(tuple(weights), parts) == tuple(deepspeed_utils.partition_balanced(weights, parts)), (
                    weights
                )
                assert uniform(len(weights), parts) == tuple(deepspeed_utils.partition_uniform(len(weights), parts))


def test_stage_bounds_by_method_cover_all_parameters() -> None:
    assert stage_bounds([1] * 7, 3, "uniform") == (0, 3, 5, 7)
    assert stage_bounds([1, 1, 1, 1, 4], 2, "parameters") == (0, 4, 5)
    assert stage_bounds([1] * 7, 3, "manual", (1, 6)) == (0, 1, 6, 7)
    # layers have all parameters
    for size in SIZES.values():
        layers = size.layer_parameters()
        assert len(layers) == size.num_layers + 2
        assert sum(layers) == size.num_parameters()
