"""Invalid models, LoRAs, output paths and frozen weights: one line names the problem, and nothing remains."""

import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from sd3_light.cli import app
from sd3_light.config import SIZES
from sd3_light.config.faults import UserError
from sd3_light.export.lora_file import write_lora
from sd3_light.export.trainable import freeze
from sd3_light.model.lora_layers import LoraModule

CONFIG = Path("transformer", "config.json")
BIAS = "proj_out.bias"
WEIGHTS = Path("transformer", "diffusion_pytorch_model.safetensors")
Q = "transformer_blocks.0.attn.to_q"
A = f"transformer.{Q}.lora_A.weight"
NAN = float("nan")


def refused(*arguments: object) -> str:
    """Run a command that fails and return its message of one line."""
    with pytest.raises(UserError) as error:
        CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, demo_parts: Path) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    shutil.copytree(demo_parts, folder, copy_function=os.link)
    size = replace(SIZES["tiny2"], pos_embed_max_size=8)
    SD3Transformer2DModel(**size.transformer_config()).save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = LoraModule(torch.ones(2, 128), torch.ones(128, 2))
    return write_lora(tmp_path_factory.mktemp("loras") / "lora.safetensors", {Q: module})


@pytest.fixture
def bad(tmp_path: Path, model: Path) -> Path:
    """A copy of the model that a test may damage."""
    return Path(shutil.copytree(model, tmp_path / "bad"))


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """A folder that must be empty after the command."""
    folder = tmp_path / "out"
    folder.mkdir()
    yield folder
    assert not os.listdir(folder)


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


Damage = Callable[[Path], object]


def weights(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    return lambda folder: change_weights(folder, change)


def config(**values: Any) -> Damage:
    return lambda folder: change_json(folder / CONFIG, **values)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "transformer" / "x.bin")


DENOISERS: dict[str, tuple[Damage, str]] = {
    "a gap": (weights(lambda tensors: tensors.pop(BIAS)), "lacks proj_out.bias"),
    "too much": (weights(lambda tensors: tensors.update(x=torch.ones(1))), "it has x, which"),
    "a shape": (weights(lambda tensors: tensors.update({BIAS: torch.ones(1)})), r"proj_out\.bias has shape \[1\]"),
    "not finite": (weights(lambda tensors: tensors[BIAS].fill_(NAN)), "proj_out.bias.* contains NaN or infinity"),
    "truncated": (lambda folder: truncate(folder / WEIGHTS), "not a complete safetensors file"),
    "a pickle": (pickled, "lacks .*diffusion_pytorch"),
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "config.json is not valid JSON"),
    "a wrong type": (config(num_layers="two"), "num_layers 'two'"),
    "too many layers": (config(num_layers=10**9), "num_layers 1000000000"),
}


@pytest.mark.parametrize("kind", DENOISERS)
def test_an_incomplete_denoiser_is_named(kind: str, model: Path, bad: Path, lora: Path, empty: Path) -> None:
    damage, expected = DENOISERS[kind]
    damage(bad)
    commands: list[list[object]] = [
        ["lora", "extract", model, bad, empty / "l.safetensors", "--rank", 1],
        ["lora", "merge", bad, empty / "merged", lora],
        ["sample", bad, "a prompt", "--out", empty / "images", "--steps", 1],
    ]
    for command in commands:
        message = refused(*command)
        assert re.search(expected, message), message


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("sd3_light.json", "{", "sd3_light.json is not valid JSON"),
        ("sd3_light.json", '{"text": 5}', "sd3_light.json: its entry `text` is not a JSON object"),
        ("sd3_light.json", '{"text": {"t5_max_length": "x"}}', "t5_max_length has the invalid value 'x'"),
        ("sd3_light.json", '{"text": {"uncond_text": "x"}}', "uncond_text has the invalid value 'x'"),
        ("model_index.json", "{", "model_index.json cannot be read"),
        ("vae/config.json", "{", "vae/config.json is not valid JSON"),
        ("scheduler/scheduler_config.json", '{"shift": "x"}', "scheduler_config.json has shift 'x'"),
        ("tokenizer/tokenizer.json", "{", "tokenizer.json is not valid JSON"),
    ],
)
def test_a_damaged_part_is_named_with_its_folder(file: str, text: str, expected: str, bad: Path, empty: Path) -> None:
    (bad / file).write_text(text)
    message = refused("sample", bad, "a prompt", "--out", empty / "images", "--steps", 1)
    assert expected in message
    assert str(bad) in message


def test_a_base_that_lacks_a_part_and_a_full_disk_leave_nothing(
    model: Path, bad: Path, empty: Path, tmp_path: Path, lora: Path, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "m.safetensors"
    assert CliRunner().invoke(app, ["convert", str(model), str(file)]).exit_code == 0
    shutil.rmtree(bad / "tokenizer_2")
    assert "lacks tokenizer_2/" in refused("convert", file, empty / "back", "--base", bad)
    large = write_lora(tmp_path / "l.safetensors", {Q: LoraModule(torch.ones(9, 128), torch.ones(128, 9))})
    request.getfixturevalue("small_files")
    commands: dict[Path, list[object]] = {
        empty / "m.safetensors": ["convert", model, empty / "m.safetensors"],
        empty / "folder": ["convert", file, empty / "folder", "--base", model],
        empty / "merged": ["lora", "merge", model, empty / "merged", lora],
        empty / "l.safetensors": ["lora", "convert", large, empty / "l.safetensors"],
    }
    for out, command in commands.items():
        assert refused(*command).startswith(f"cannot write {out}: File too large; free disk space")


@pytest.mark.parametrize(
    "change",
    [
        {"other_configs": 5},
        {"facts": 5},
        {"facts": {"text": 5}},
        {"scheduler": 5},
        {"config": {"num_layers": 2, "dual_attention_layers": 5}},
    ],
    ids=str,
)
def test_metadata_of_a_wrong_type_is_damaged(change: dict[str, Any], model: Path, empty: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    about = {"config": {"num_layers": 2}, "true_blocks": 2, "blocks_in_file": 2, **change}
    save_file({"x": torch.ones(1)}, file, {"sd3_light": json.dumps(about)})
    assert "its metadata 'sd3_light' is damaged" in refused("convert", file, empty / "back", "--base", model)


PATTERN = '{"transformer.lora_alpha": 1, "transformer.alpha_pattern": [1]}'
LORAS: dict[str, tuple[dict[str, Tensor], dict[str, str], str]] = {
    "NaN": ({A: torch.full((2, 128), NAN)}, {}, f"{A} contains NaN"),
    "whole numbers": ({A: torch.ones(2, 128, dtype=torch.int64)}, {}, f"{A} has type int64"),
    "a scalar": ({A: torch.tensor(1.0)}, {}, f"{Q}: [] and [128, 2] are not a pair"),
    "two alphas": ({f"transformer.{Q}.alpha": torch.ones(2)}, {}, f"{Q}.alpha has shape [2]"),
    "padding": ({}, {"sd3_light": '{"padding": [1]}'}, "its metadata 'sd3_light' is damaged"),
    "ranks": ({}, {"sd3_light": '{"ranks": 5}'}, "its metadata 'sd3_light' is damaged"),
    "facts": ({}, {"sd3_light": '{"facts": 5}'}, "its metadata 'sd3_light' is damaged"),
    "alpha": ({}, {"lora_adapter_metadata": '{"transformer.lora_alpha": "x"}'}, "its lora_alpha or alpha_pattern"),
    "pattern": ({}, {"lora_adapter_metadata": PATTERN}, "its lora_alpha or alpha_pattern"),
}


@pytest.mark.parametrize("kind", LORAS)
def test_an_unusable_lora_is_named_with_its_key(kind: str, lora: Path, empty: Path, tmp_path: Path) -> None:
    tensors, metadata, expected = LORAS[kind]
    file = tmp_path / "bad.safetensors"
    save_file({**load_file(lora), **tensors}, file, metadata or None)
    assert refused("lora", "convert", file, empty / "new.safetensors").startswith(f"{file}: {expected}")


def test_an_invalid_text_encoder_lora_and_names_fail(model: Path, lora: Path, empty: Path, tmp_path: Path) -> None:
    key = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({**load_file(lora), key: torch.ones(2, 8)}, tmp_path / "bad.safetensors")
    arguments = ["--out", empty / "images", "--steps", 1, "--lora", tmp_path / "bad.safetensors"]
    assert "does not fit this model" in refused("sample", model, "a prompt", *arguments)
    (tmp_path / "link.safetensors").symlink_to("nowhere")
    assert "already exists" in refused("convert", model, tmp_path / "link.safetensors")
    assert "Not a directory" in refused("lora", "merge", model, lora / "out", lora)
    assert "ends in .safetensors" in refused("lora", "convert", lora, empty / "lora.pt")
    assert "merging writes a folder" in refused("lora", "merge", model, empty / "m.safetensors", lora)
    assert "is not a writable folder" in refused("sample", model, "a prompt", "--out", lora)
    assert "is not UTF-8" in refused("sample", model, "a\udcff", "--out", empty / "images")
    assert "finite" in refused("sample", model, "a prompt", "--guidance", "inf", "--out", empty / "images")


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit files to 5000 bytes, to simulate a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_freezing_everything_is_refused() -> None:
    transformer: Any = torch.nn.Linear(2, 2)
    freeze(transformer, ["bias"])
    assert [p.requires_grad for p in transformer.parameters()] == [True, False]
    with pytest.raises(UserError, match="leaves nothing to train"):
        freeze(transformer, ["*"])
