"""Where weights start, for every kind of config; the position table: any step, and the step of stored tables."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.embeddings import PatchEmbed
from safetensors.torch import save_file

from sd3_light.config import SIZES, ModelConfig, ModelSize, UserError
from sd3_light.core.files import Contents
from sd3_light.core.registry import starting_weights
from sd3_light.core.start import MARKER, WeightsStart
from sd3_light.families.sd3.positions import position_table, start_position_step
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.families.sd3.single_file import write_single_file
from sd3_light.families.sd3.start import differences, named_size
from sd3_light.tensor_file import open_tensors


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


# --- the position table --------------------------------------------------------------------------

TINY = SIZES["tiny2"]
STEPS = (1 / 12, 1 / 4, 1.0, 2.5)


@pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))
def test_the_stock_step_gives_the_table_of_diffusers(size: ModelSize) -> None:
    """Bit for bit; at a smaller width, which the formula does not depend on."""
    side = size.sample_size
    stock = PatchEmbed(side, side, size.patch_size, 16, 32, pos_embed_max_size=size.pos_embed_max_size)
    assert torch.equal(position_table(32, size.pos_embed_max_size, size.stock_position_step), stock.pos_embed)


def test_a_table_of_another_step() -> None:
    table = position_table(64, 4, 0.7)[0].reshape(4, 4, 2, 2, 16)  # row, column, coordinate, function, frequency
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    frequencies = 10000 ** (-torch.arange(16.0) / 16)
    for coordinate, position in enumerate((columns, rows)):
        angles = 0.7 * position[..., None] * frequencies
        expected = torch.stack([angles.sin(), angles.cos()], dim=2)
        torch.testing.assert_close(table[:, :, coordinate], expected, rtol=0, atol=1e-5)
    config = TINY.transformer_config()
    stock, other = new_transformer(config, 3).state_dict(), new_transformer(config, 3, 1.0).state_dict()
    assert [name for name in stock if not torch.equal(stock[name], other[name])] == ["pos_embed.pos_embed"]
    assert torch.equal(other["pos_embed.pos_embed"], position_table(TINY.width, TINY.pos_embed_max_size, 1.0))
    same = new_transformer(config, 3, TINY.stock_position_step).state_dict()
    assert all(torch.equal(stock[name], same[name]) for name in stock)
    assert start_position_step(WeightsStart("random", None, TINY, "")) == 1.0


def folder_start(folder: Path, step: float, dtype: torch.dtype, shards: str = "10GB") -> WeightsStart:
    transformer = new_transformer(TINY.transformer_config(), 0, step).to(dtype)
    transformer.save_pretrained(folder / "transformer", max_shard_size=shards)
    return WeightsStart("folder", folder / "transformer", TINY, "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", STEPS)
def test_the_step_is_read_from_weights(tmp_path: Path, step: float, dtype: torch.dtype) -> None:
    """Whatever `sample_size` says; stock diffusers loads the stored table too."""
    start = folder_start(tmp_path, step, dtype)
    assert start_position_step(start) == pytest.approx(step, rel=1e-5 if dtype == torch.float32 else 2e-3)
    loaded = SD3Transformer2DModel.from_pretrained(start.folder).pos_embed.pos_embed
    assert torch.equal(loaded, position_table(TINY.width, TINY.pos_embed_max_size, step).to(dtype).float())


def test_the_step_is_read_from_any_layout_of_weights(tmp_path: Path) -> None:
    shards = folder_start(tmp_path / "shards", 0.6, torch.float32, "1MB")
    assert len(list(shards.folder.glob("*.safetensors"))) > 1
    assert start_position_step(shards) == pytest.approx(0.6, rel=1e-5)
    folder_start(tmp_path / "whole", 0.6, torch.float32)
    single = tmp_path / "model.safetensors"
    write_single_file(tmp_path / "whole", single, *Contents(vae=False, pad_blocks=False))
    assert "model.diffusion_model.pos_embed" in open_tensors(single)[0]
    assert start_position_step(WeightsStart("file", None, TINY, "", single)) == pytest.approx(0.6, rel=1e-5)


@pytest.mark.parametrize("shape", [(1, 256, 128), (1, 1, 6), (1, 255, 128), (2, 256, 128), (8,), ()])
def test_another_kind_of_table_has_no_step(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save_file({"pos_embed": torch.full(shape, 0.3)}, tmp_path / "model.safetensors")
    assert start_position_step(WeightsStart("file", None, TINY, "", tmp_path / "model.safetensors")) is None
