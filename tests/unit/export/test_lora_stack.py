"""Stacked LoRA files equal a manually merged model; files that do not fit are refused."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sd3_light.export.lora_file import diffusers_tensors
from sd3_light.export.lora_stack import Lora, add_loras
from sd3_light.families.sd3.sample_texts import TextPolicy
from sd3_light.sample.generate import ImageRequest, generate
from tests.refusals import refused

BLOCKS = "transformer_blocks"
LAYERS = (f"{BLOCKS}.0.attn.to_q", f"{BLOCKS}.1.ff.net.0.proj", f"{BLOCKS}.0.attn.add_k_proj")
RANK = 2
Weights = dict[str, torch.Tensor]


@pytest.fixture
def fresh(pipe: Any) -> Any:
    own_pipe = copy.copy(pipe)
    own_pipe.transformer = copy.deepcopy(pipe.transformer)
    return own_pipe


def lora_weights(pipe: Any, seed: int, layers: tuple[str, ...] = LAYERS) -> Weights:
    generator, weights = torch.Generator().manual_seed(seed), {}
    for layer in layers:
        rows, columns = pipe.transformer.get_submodule(layer).weight.shape
        weights[f"transformer.{layer}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.2
        weights[f"transformer.{layer}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.2
    return weights


def pixels(pipe: Any, text_tokens: Any = "padded") -> torch.Tensor:
    request = ImageRequest("a red star", 3, 48, 32)
    (image,) = generate(pipe, [request], TextPolicy(12, "empty", text_tokens), (3, 4.0))
    return torch.tensor(list(image.tobytes())).float()


@pytest.mark.parametrize("text_tokens", ["padded", "real"])
def test_a_stack_equals_a_merged_model(pipe: Any, fresh: Any, tmp_path: Path, text_tokens: str) -> None:
    strengths, merged = (0.7, -0.5), copy.copy(pipe)
    merged.transformer = copy.deepcopy(pipe.transformer)
    loras = []
    for number, strength in enumerate(strengths):
        weights = lora_weights(pipe, number)
        save_file(weights, tmp_path / f"{number}.safetensors")
        loras.append(Lora.parse(f"{tmp_path / f'{number}.safetensors'}:{strength}"))
        for layer in LAYERS:
            down, up = (weights[f"transformer.{layer}.lora_{half}.weight"] for half in "AB")
            merged.transformer.get_submodule(layer).weight.data += strength * up @ down
    add_loras(fresh, loras, diffusers_tensors)
    stacked, expected, plain = (pixels(each, text_tokens) for each in (fresh, merged, pipe))
    assert (stacked - expected).abs().max() <= 1
    assert (stacked - plain).abs().max() > 10


def test_strength_is_part_of_the_argument(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.touch()
    odd = tmp_path / "b:0.5"
    (tmp_path / "empty").mkdir()
    assert Lora.parse(str(file)) == Lora(file, 1.0)
    assert Lora.parse(f"{file}:0.25") == Lora(file, 0.25)
    assert Lora.parse(f"{file}:-1") == Lora(file, -1.0)
    for text, message in [
        (str(tmp_path / "none.safetensors"), "none.safetensors does not exist"),
        (f"{tmp_path / 'none.safetensors'}:0.5", "none.safetensors does not exist"),
        (f"{file}:much", "a.safetensors:much does not exist"),
        (f"{file}:nan", "must be a finite number"),
    ]:
        refused(message, Lora.parse, text)
    refused(r"has no adapter file; pass the \.safetensors file itself", Lora.parse, f"{tmp_path / 'empty'}:0.5")
    odd.touch()
    refused(r"is not a \.safetensors file", Lora.parse, str(odd))


def _renamed(change: Callable[[str], str]) -> Callable[[Weights], Weights]:
    return lambda weights: {change(key): value for key, value in weights.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_renamed(lambda key: key.replace("_blocks.", "_blocks.9")), "the model has none of its 3 layers"),
        (_renamed(lambda key: key.replace("blocks.1", "blocks.7")), "the model lacks 1 of its 3 layers, such as"),
        (lambda weights: {key: value.repeat(2, 2) for key, value in weights.items()}, "size mismatch"),
        (_renamed(lambda key: key.replace("lora_", "other_")), "is not a key of a LoRA"),
    ],
    ids=["names", "some", "shapes", "no lora"],
)
def test_a_file_that_does_not_fit_is_refused(pipe: Any, fresh: Any, tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "x.safetensors"
    save_file(change(lora_weights(pipe, 0)), file)
    error = refused(message, add_loras, fresh, [Lora(file)], diffusers_tensors)
    assert str(file) in error
