"""Which runs compile their stock blocks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sd3_light.config import TrainConfig
from sd3_light.core.cost import Cost, Layout, TextTokens
from sd3_light.cost.compile_choice import ENOUGH_PASSES, MAX_SHAPES, compiled_text_step, why_uncompiled

LONG = ENOUGH_PASSES


def config(**keys: Any) -> TrainConfig:
    table = {"output_dir": "out", "dataset": "data.toml", "model": {"diffusers_path": "folder"}, **keys}
    return TrainConfig.model_validate(table, context={"base": Path()})


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"adapter": {"type": "lora", "rank": 4}},
        {"adapter": {"type": "lora", "rank": 4, "base_bits": 4}},
        {"activation_checkpointing": True},
        {"parallel": "fsdp2"},
    ],
)
def test_long_runs_are_compiled(keys: dict[str, Any]) -> None:
    assert why_uncompiled(config(**keys), Layout(), LONG) is None
    assert why_uncompiled(config(**keys), Layout(world_size=2), LONG) is None
    assert why_uncompiled(config(**keys), Layout(), None) is None, "a run of unknown length"
    assert why_uncompiled(config(gradient_accumulation_steps=2, **keys), Layout(), LONG // 2) is None
    assert why_uncompiled(config(compile=True, **keys), Layout(by_deepspeed=True), 1) is None, "a request is met"


@pytest.mark.parametrize(
    ("keys", "layout", "steps", "words"),
    [
        ({"compile": False}, Layout(), LONG, "compile = false"),
        ({}, Layout(by_deepspeed=True), LONG, "DeepSpeed"),
        ({"activation_checkpointing": "selective"}, Layout(), LONG, "selective"),
        ({}, Layout(), LONG - 1, f"this run has {LONG - 1}"),
        ({"gradient_accumulation_steps": 2}, Layout(), LONG // 2 - 1, f"this run has {LONG - 2}"),
    ],
)
def test_others_are_not_and_say_why(keys: dict[str, Any], layout: Layout, steps: int, words: str) -> None:
    reason = why_uncompiled(config(**keys), layout, steps)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    ("keys", "steps"), [({"max_steps": 7}, 7), ({"epochs": 2}, 10), ({"epochs": 2, "max_steps": 11}, 10)]
)
def test_the_length_of_a_run(keys: dict[str, int], steps: int) -> None:
    assert config(**keys).length(steps_per_epoch=5) == steps


def shaped(is_padded: bool, *steps: int) -> Cost:
    return cast(Cost, SimpleNamespace(text=TextTokens(77, is_padded, "77", steps)))


@pytest.mark.parametrize(
    ("shapes", "steps", "keys", "is_padded", "expected"),
    [
        (3, 3 * LONG, {}, True, 77),
        (4, 3 * LONG, {}, True, None),
        (MAX_SHAPES, MAX_SHAPES * LONG, {}, True, 77),
        (MAX_SHAPES + 1, 100 * LONG, {}, True, None),
        (2, LONG // 2, {"gradient_accumulation_steps": 4}, True, 77),
        (1, 100 * LONG, {}, False, None),  # captions have ever new lengths
    ],
)
def test_few_shapes_are_compiled_one_by_one_if_each_pays(
    shapes: int, steps: int, keys: dict[str, Any], is_padded: bool, expected: int | None
) -> None:
    assert compiled_text_step(config(**keys), shaped(is_padded), shapes, steps, longest=77) == expected


@pytest.mark.parametrize(
    ("buckets", "steps", "longest", "expected"),
    [
        (1, 100 * LONG, 77, 32),  # 3 lengths
        (1, 2 * LONG, 77, 64),  # 2 of them pay
        (1, LONG, 77, 128),
        (1, LONG, 500, 512),
        (5, 100 * LONG, 77, 128),
        (1, 1, 77, 128),  # compile = true: one length costs as much as any
        (2, LONG, 10, None),
        (9, 100 * LONG, 10, None),
    ],
)
def test_the_lengths_of_text_are_as_many_as_pay(buckets: int, steps: int, longest: int, expected: int | None) -> None:
    cost = shaped(False, 32, 64, 128, 256, 512)
    assert compiled_text_step(config(), cost, buckets, steps, longest) == expected
