"""Images decoded once: selection, order and what is held out."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from sd3_light.config.faults import UserError
from sd3_light.parts.images import Pool, draw_rows, take
from tests.unit.parts.conftest import load


def test_all_images_are_loaded_with_both_captions(pools: list[Pool]) -> None:
    (pool,) = pools
    assert pool.pixels.shape == (64, 32, 32, 3)
    assert pool.pixels.dtype == torch.uint8
    assert len(set(pool.ids)) == 64
    assert all(len(texts) == 2 for texts in pool.captions)
    assert 0 < pool.held_out < pool.trained


def test_order_does_not_depend_on_the_folder(data_toml: Path, pools: list[Pool], tmp_path: Path) -> None:
    copied = Path(shutil.copytree(data_toml.parent, tmp_path / "elsewhere"))
    (pool,) = load(copied / "data.toml", tmp_path / "work")
    assert pool.ids == pools[0].ids
    assert pool.digest == pools[0].digest
    assert torch.equal(pool.pixels, pools[0].pixels)


def test_a_limit_selects_by_sample_id(data_toml: Path, pools: list[Pool], tmp_path: Path) -> None:
    (pool,) = load(data_toml, tmp_path, max_images=16)
    assert 4 < len(pool.ids) < 32
    assert pool.ids == pools[0].ids[: len(pool.ids)]


def test_several_sizes_and_a_broken_image(data_toml: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data_toml.parent, tmp_path / "data"))
    (folder / "images" / "000000.png").write_bytes(b"not an image")
    (folder / "data.toml").write_text('size_buckets = [[32, 32], [48, 32]]\n[[directory]]\npath = "images"\n')
    pools = load(folder / "data.toml", tmp_path / "work")
    assert [pool.size for pool in pools] == [(32, 32), (32, 48)]
    assert sum(len(pool.ids) for pool in pools) == 63


def test_no_image_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "captions.json").write_text(json.dumps({}))
    (tmp_path / "data.toml").write_text('resolutions = [32]\n[[directory]]\npath = "images"\n')
    with pytest.raises(UserError, match="no usable image"):
        load(tmp_path / "data.toml", tmp_path / "work")


def test_batches_are_functions_of_the_step_and_skip_held_out_images(pools: list[Pool]) -> None:
    pool, rows = draw_rows(pools, 0, "test", 3, 16)
    assert np.array_equal(rows, draw_rows(pools, 0, "test", 3, 16)[1])
    assert not np.array_equal(rows, draw_rows(pools, 0, "test", 4, 16)[1])
    assert len(set(rows.tolist())) == 16
    assert rows.min() >= pool.held_out
    assert len(draw_rows(pools, 0, "test", 3, 1000)[1]) == pool.trained


def test_taken_images_are_floats_in_channels_last_memory(pools: list[Pool]) -> None:
    images = take(pools[0].pixels, np.array([1, 2]), torch.device("cpu"))
    assert images.shape == (2, 3, 32, 32)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert -1 <= images.min() < images.max() <= 1
