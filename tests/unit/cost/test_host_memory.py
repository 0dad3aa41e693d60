"""The host memory of commands, at real sizes."""

from dataclasses import replace

import pytest

from sd3_light.assets import DEMO
from sd3_light.config import SIZES
from sd3_light.core.cost import Tokens
from sd3_light.cost.amount import GIB
from sd3_light.cost.host_memory import (
    CUDA_BYTES,
    ENCODING_BYTES,
    INTERPRETER_BYTES,
    WORKER_BYTES,
    cache_host,
    export_command_host,
    export_host,
    export_seconds,
    train_host,
)
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.model.folder import count_converted, count_weights

LIGHT = TrainingSetup(SD3Cost(SIZES["sd3_light"]), Tokens(256, 333), 64)
P = LIGHT.cost.parameters
ADAPTER = replace(LIGHT, adapter=(0, *[1_000_000] * LIGHT.cost.num_blocks, 0))


MEDIUM = TrainingSetup(SD3Cost(SIZES["sd3.5_medium"]), Tokens(4096, 333), 1)
"""Its table of positions is the largest of all families: stock diffusers computes it in every process that loads it."""


def test_an_export_of_all_weights_needs_little_more_than_its_copy_and_an_adapter_nothing() -> None:
    weights = 2 * MEDIUM.cost.parameters
    assert export_command_host(MEDIUM, 2) < 1.2 * weights
    assert export_command_host(LIGHT, 4) - export_command_host(LIGHT, 2) == 2 * P
    assert weights < export_host(MEDIUM, 2) < 1.1 * weights, "the clean process starts when the copies are freed"
    # an adapter needs nothing for its base
    small = replace(LIGHT, cost=SD3Cost(replace(SIZES["sd3_light"], pos_embed_max_size=1)), adapter=ADAPTER.adapter)
    assert export_host(small, 2) < GIB < 2 * P
    assert export_host(ADAPTER, 2) < export_command_host(ADAPTER, 2) < 4 * GIB
    # the proof of more weights takes longer
    seconds = {setup.adapter is None: export_seconds(setup) for setup in (LIGHT, ADAPTER)}
    assert seconds[False] == pytest.approx(12 + 6e-9 * P)
    assert seconds[True] > seconds[False]


def test_training_holds_copies_or_loads_the_weights() -> None:
    loaders = GIB
    export = export_host(ADAPTER, 2)
    process = INTERPRETER_BYTES + CUDA_BYTES
    assert train_host(ADAPTER, loaders, 2, export) == process + 2 * WORKER_BYTES + GIB + export
    few = train_host(LIGHT, 0, 0, 0)
    assert few == process + 4 * P, "while they are loaded in float32"
    # caching converts text encoders on the host
    assert cache_host(5 * GIB, 4) == INTERPRETER_BYTES + ENCODING_BYTES + 5 * GIB + 4 * WORKER_BYTES


def test_encoders_are_converted_on_the_host_only_from_another_dtype() -> None:
    part = DEMO / "text_encoder"
    assert count_converted(part, "float16") == 0
    assert count_converted(part, "bfloat16") == count_weights(DEMO)["text_encoder"]
