"""Where weights start, for every kind of config."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config import SIZES, ModelConfig, ModelSize, UserError
from sd3_light.core.registry import starting_weights
from sd3_light.core.start import MARKER
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.families.sd3.start import differences, named_size


def table(folder: Path, **keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"diffusers_path": str(folder), **keys}, context={"base": folder})


def denoiser(folder: Path, size: str = "tiny2", **other: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**SIZES[size].transformer_config(), **other}), encoding="utf-8")
    return folder


def test_weights_start_at_random_or_from_the_folders_denoiser(tmp_path: Path) -> None:
    start = starting_weights(table(tmp_path, train_type="sd3_light_pretrain", num_layers=7))
    assert (start.kind, start.folder) == ("random", None)
    assert start.size == SIZES["sd3_light"].with_overrides(num_layers=7)
    assert "random" in start.sentence
    denoiser(tmp_path / "transformer")
    start = starting_weights(table(tmp_path))
    assert (start.kind, start.folder) == ("folder", tmp_path / "transformer")
    assert start.size == replace(SIZES["tiny2"], position_step=0.25)
    size = SIZES["demo"]
    assert differences(size, size_with(size, sample_size=99)) == ()
    assert differences(size, size_with(size, num_heads=9)) == ("num_heads",)


ENCODERS = {
    "vae": {"latent_channels": 4, "block_out_channels": [8, 8, 8, 8]},
    "text_encoder": {"hidden_size": 48, "projection_dim": 40},
    "text_encoder_2": {"hidden_size": 64, "projection_dim": 56},
    "text_encoder_3": {"d_model": 128},
}


def test_a_shape_takes_its_widths_from_the_encoders(tmp_path: Path) -> None:
    """The denoiser has the exact number of parameters of the size, and runs."""
    for part, config in ENCODERS.items():
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(config))
    shape = {"num_layers": 3, "num_heads": 2, "head_dim": 32}
    start = starting_weights(table(tmp_path, train_type="sd3_light_pretrain", shape=shape, qk_norm=False))
    size = start.size
    assert (size.name, size.num_layers, size.width, size.qk_norm) == ("custom", 3, 64, False)
    assert (size.text_width, size.pooled_width, size.latent_channels, size.position_step) == (128, 96, 4, 1.0)
    small = replace(size, pos_embed_max_size=16)
    transformer = new_transformer(small.transformer_config(), 0, 0.5)
    assert sum(weight.numel() for weight in transformer.parameters()) == small.num_parameters()
    inputs = torch.zeros(1, 4, 8, 8), torch.zeros(1, 5, 128), torch.zeros(1, 96), torch.zeros(1)
    assert transformer(*inputs).sample.shape == (1, 4, 8, 8)
    assert named_size(small.transformer_config(), tmp_path) == replace(small, position_step=small.stock_position_step)
    denoiser(tmp_path / "transformer", num_layers=3)
    (tmp_path / MARKER).write_text("{}")
    start = starting_weights(table(tmp_path, train_type="sd3_light_pretrain"))
    assert (start.kind, start.size.num_layers, start.size.name) == ("folder", 3, "custom")
    assert MARKER in start.sentence
    again = starting_weights(table(tmp_path, train_type="sd3_light_pretrain", init="random", size="tiny3"))
    assert (again.kind, again.size) == ("random", SIZES["tiny3"])


@pytest.mark.parametrize("inner", ["", "transformer"])
def test_init_names_a_denoiser_or_the_folder_around_it(tmp_path: Path, inner: str) -> None:
    folder = denoiser(tmp_path / "other" / inner)
    start = starting_weights(table(tmp_path, train_type="sd3_light_pretrain", init=str(tmp_path / "other")))
    assert start.folder == folder


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"_class_name": "FluxTransformer2DModel"}, r"a denoiser of Flux.* and no model_index\.json; give the folder"),
        ({"in_channels": 4}, "in_channels 4"),
        ({"patch_size": 4}, "patch_size 4"),
    ],
)
def test_another_models_folder_is_a_user_error(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    denoiser(tmp_path / "transformer", **other)
    with pytest.raises(UserError, match=message):
        starting_weights(table(tmp_path))


SHAPE = {"train_type": "sd3_light_pretrain", "shape": {"num_layers": 3, "num_heads": 2}}


@pytest.mark.parametrize(
    ("config", "keys", "message"),
    [
        (None, {}, r"transformer/config\.json cannot be read"),
        (None, SHAPE, r"text_encoder/config\.json cannot be read"),
        (None, {"init": "random"}, r"model\.size"),
        ("{", {}, r"cannot be read .*download or write"),
        ('{"num_layers": 3}', {}, "lacks 'num_attention_heads'"),
    ],
)
def test_missing_and_damaged_configs_are_user_errors(
    tmp_path: Path, config: str | None, keys: dict[str, Any], message: str
) -> None:
    if config is not None:
        (denoiser(tmp_path / "transformer") / "config.json").write_text(config)
    with pytest.raises(UserError, match=message):
        starting_weights(table(tmp_path, **keys))


def size_with(size: ModelSize, **other: Any) -> ModelSize:
    return replace(size, name="other", **other)
