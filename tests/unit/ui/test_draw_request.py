"""The form of the playground: values, axes and limits."""

from pathlib import Path
from typing import Any

import pytest

from sd3_light.ui.draw_request import AXES, DrawRequest, parse_numbers, parse_request
from tests.refusals import refused

MODELS = {"a": ("model a", Path("a")), "b": ("model b", Path("b"))}
LORAS = {"l": ("style.safetensors", Path("/loras/style: 1.safetensors"))}
FORM = {"models": ["a"], "prompt": "a cat on a cat", "seeds": "3"}


def parsed(**values: Any) -> DrawRequest:
    return parse_request(FORM | values, MODELS, LORAS)


def test_axes_have_their_cells_and_labels(tmp_path: Path) -> None:
    cells = list(parsed(models=["a", "b"], seeds="1, 5-6").cells())
    assert [place for place, _ in cells] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [(cell.model, cell.seed) for _, cell in cells[:3]] == [("model a", 1), ("model b", 1), ("model a", 5)]
    chosen = {"chosen_loras": {"l": "0.5"}, "loras": "other.safetensors:0.25\n"}
    request = parsed(columns="lora", columns_values="-1-1:1", rows="prompt", rows_values="cat, dog, ", **chosen)
    cells = [cell for _, cell in request.cells()]
    file = str(LORAS["l"][1])
    strengths = [((file, strength), ("other.safetensors:0.25", None)) for strength in (-1.0, 0.0, 1.0)]
    assert [cell.loras for cell in cells[:3]] == strengths
    assert [cell.prompt for cell in cells[::3]] == ["a cat on a cat", "a dog on a dog", "a  on a "]
    assert request.rows.labels == ["cat", "dog", "(without)"]
    assert request.columns.labels == ["LoRA -1", "LoRA 0", "LoRA 1"]
    file = tmp_path / "style: 1.safetensors"
    file.touch()
    request = parse_request(FORM | {"chosen_loras": {"l": "0.5"}}, MODELS, {"l": ("style", file)})
    (lora,) = request.options().loras
    assert (lora.file, lora.strength) == (file, 0.5)
    assert parse_numbers("0.1-0.5:0.1, 7", "x", 0, 9) == (0.1, 0.2, 0.3, 0.4, 0.5, 7.0)
    assert parse_numbers("1 1 2", "x", 0, 9) == (1.0, 2.0)
    assert set(AXES) >= {"model", "seed"}


@pytest.mark.parametrize(
    ("axis", "text", "values"),
    [
        ("steps", "1, 4", [1, 4]),
        ("guidance", "1-2:0.5", [1.0, 1.5, 2.0]),
        ("shift", "3", [3.0]),
        ("sampler", "euler dpm++", ["euler", "dpm++"]),
    ],
)
def test_an_axis_replaces_the_value_of_the_form(axis: str, text: str, values: list[Any]) -> None:
    cells = [cell for _, cell in parsed(columns=axis, columns_values=text).cells()]
    assert [getattr(cell, axis) for cell in cells] == values
    assert {cell.seed for cell in cells} == {3}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"columns": "width"}, "columns: 'width' is not an axis"),
        ({"columns": "seed"}, "columns and rows are both seeds"),
        ({"columns": "steps"}, "steps: write the values of the axis"),
        ({"columns": "steps", "columns_values": "1.5"}, "has numbers that are not whole"),
        ({"columns": "steps", "columns_values": "0"}, "numbers from 1 to 1000"),
        ({"columns": "steps", "columns_values": "5-1"}, "'5-1' must be"),
        ({"columns": "steps", "columns_values": "1-9:0"}, "'1-9:0' must be"),
        ({"columns": "guidance", "columns_values": "0-1000:0.001"}, "up to 256 numbers"),
        ({"columns": "guidance", "columns_values": "nan"}, "'nan' is not a number or range"),
        ({"columns": "guidance", "columns_values": "9" * 5000}, "is not a number or range"),
        ({"columns": "guidance", "columns_values": "1-17", "seeds": "1-16"}, "272 images are too many"),
        ({"columns": "sampler", "columns_values": "euler, magic"}, "write some of euler, heun, dpm"),
        ({"columns": "lora", "columns_values": "1"}, "there is none; choose a LoRA"),
        ({"columns": "prompt", "columns_values": "dog, cat"}, "write a part of the prompt"),
        ({"columns": "prompt"}, "write a part of the prompt"),
        ({"columns": "steps", "columns_values": "1", "models": ["a", "b"]}, "2 models, but no axis is models"),
        ({"columns": "model", "rows": "steps", "rows_values": "1", "seeds": "1-2"}, "2 seeds, but no axis is seeds"),
        ({"shift": "0"}, "shift is '0'; it must be a number from 0.01 to 1000"),
        ({"chosen_loras": {"x": "1"}}, "there is no LoRA 'x' any more"),
        ({"chosen_loras": {"l": "much"}}, "style.safetensors is 'much'"),
        ({"columns_values": "\ud800"}, "half of a surrogate pair"),
        *(({name: "a \ud800 b"}, f"{name} contains half of a") for name in ("prompt", "negative_prompt", "loras")),
        *(({"models": models}, "no model is chosen") for models in ([], "all", [["a"]], None)),
        ({"prompt": " "}, "the prompt is empty"),
        ({"seeds": "-1"}, "'-1' is not a seed"),
        ({"seeds": "1, 8-5"}, "'8-5' is not a seed"),
        ({"seeds": "9" * 5000}, "is not a seed"),
        ({"seeds": "0-999999999999"}, "is not a seed"),
        ({"seeds": "9223372036854775808"}, r"2\*\*63 - 1"),
        ({"seeds": "0-200 300-400"}, "302 images are too many"),
        ({"steps": "0"}, "steps is '0'; it must be a number from 1 to 1000"),
        ({"guidance": "nan"}, "guidance is 'nan'"),
        ({"sampler": "magic"}, "unknown sampler"),
    ],
)
def test_values_that_are_not_valid_are_refused(values: dict[str, Any], text: str) -> None:
    refused(text, parsed, **values)
