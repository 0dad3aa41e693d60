"""The position table: diffusers' formula with any step, and the step of stored tables."""

from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.embeddings import PatchEmbed
from safetensors.torch import save_file

from sd3_light.config import SIZES, ModelSize
from sd3_light.core.files import Contents
from sd3_light.core.start import WeightsStart
from sd3_light.families.sd3.positions import position_table, start_position_step
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.families.sd3.single_file import write_single_file
from sd3_light.tensor_file import open_tensors

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
