"""Images decoded once: selection, order and what is held out."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sd3_light.config import DatasetConfig
from sd3_light.parts import images as images_module
from sd3_light.parts.images import Pool, draw_rows, load_pools, take
from tests.refusals import refused
from tests.unit.parts.conftest import load


def test_images_are_loaded_in_their_own_order_up_to_a_limit(pools: list[Pool], data_toml: Path, tmp_path: Path) -> None:
    (pool,) = pools
    assert pool.pixels.shape == (64, 32, 32, 3)
    assert pool.pixels.dtype == torch.uint8
    assert len(set(pool.ids)) == 64
    assert all(len(texts) == 2 for texts in pool.captions)
    assert 0 < pool.held_out < pool.trained
    copied = Path(shutil.copytree(data_toml.parent, tmp_path / "elsewhere"))
    (pool,) = load(copied / "data.toml", tmp_path / "work")
    assert pool.ids == pools[0].ids
    assert pool.digest == pools[0].digest
    assert torch.equal(pool.pixels, pools[0].pixels)
    (pool,) = load(data_toml, tmp_path, max_images=16)
    assert 4 < len(pool.ids) < 32
    assert pool.ids == pools[0].ids[: len(pool.ids)]


def test_several_sizes_a_broken_image_and_no_image(data_toml: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data_toml.parent, tmp_path / "data"))
    (folder / "images" / "000000.png").write_bytes(b"not an image")
    (folder / "data.toml").write_text('size_buckets = [[32, 32], [48, 32]]\n[[directory]]\npath = "images"\n')
    pools = load(folder / "data.toml", tmp_path / "work")
    assert [pool.size for pool in pools] == [(32, 32), (32, 48)]
    assert sum(len(pool.ids) for pool in pools) == 63
    (folder / "images" / "captions.json").write_text(json.dumps({}))
    refused("no usable image", load, folder / "data.toml", tmp_path / "none")


def test_batches_are_functions_of_the_step_and_skip_held_out_images(pools: list[Pool]) -> None:
    pool, rows = draw_rows(pools, 0, "test", 3, 16)
    assert np.array_equal(rows, draw_rows(pools, 0, "test", 3, 16)[1])
    assert not np.array_equal(rows, draw_rows(pools, 0, "test", 4, 16)[1])
    assert len(set(rows.tolist())) == 16
    assert rows.min() >= pool.held_out
    assert len(draw_rows(pools, 0, "test", 3, 1000)[1]) == pool.trained


def test_pixels_from_0_to_255_are_values_from_minus_1_to_1() -> None:
    pixels = torch.tensor([[[[9, 9, 9]]], [[[0, 51, 255]]]], dtype=torch.uint8)
    images = take(pixels, np.array([1]), torch.device("cpu"))
    assert images.flatten().tolist() == pytest.approx([-1, -0.6, 1], abs=1e-6)
    pixels = torch.arange(2 * 4 * 3, dtype=torch.uint8).reshape(1, 2, 4, 3)
    taken = take(pixels, np.array([0]), torch.device("cpu"))
    assert taken.is_contiguous(memory_format=torch.channels_last)
    images = (taken + 1) * 127.5
    assert images.shape == (1, 3, 2, 4)
    assert images[0, 1].round().tolist() == [[1, 4, 7, 10], [13, 16, 19, 22]]


def toy_pool(count: int, held_out: int = 0) -> Pool:
    return Pool(torch.zeros(count, 1, 1, 3, dtype=torch.uint8), tuple(range(count)), ((),) * count, held_out, "")


def test_training_images_are_drawn_in_proportion_by_seed_and_purpose() -> None:
    """Of 90 and 30 training images, three quarters of the batches; held-out images do not count."""
    large, small = toy_pool(100, held_out=10), toy_pool(200, held_out=170)
    drawn = [draw_rows([large, small], 0, "test", step, 4)[0] for step in range(400)]
    assert sum(pool is large for pool in drawn) == pytest.approx(300, abs=35)
    pool = toy_pool(12, held_out=3)
    drawn = {int(row) for step in range(40) for row in draw_rows([pool], 0, "test", step, 4)[1]}
    assert drawn == set(range(3, 12))
    pool = toy_pool(100)
    keys = ((0, "test"), (1, "test"), (0, "other"))
    assert len({tuple(draw_rows([pool], *key, 3, 16)[1].tolist()) for key in keys}) == 3


@pytest.mark.parametrize(
    ("count", "held_out"), [(1, 0), (3, 0), (4, 1), (12, 3), (32, 8), (400, 8), (500, 10), (5000, 100), (30_000, 512)]
)
def test_two_percent_are_held_out(monkeypatch: pytest.MonkeyPatch, count: int, held_out: int) -> None:
    """At least 8 images, at most 512, and never more than a quarter."""
    (pool,) = load_decoded(monkeypatch, [f"{number}" for number in range(count)])
    assert (pool.held_out, pool.trained) == (held_out, count - held_out)


def test_the_digest_identifies_the_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (["a", "b"], ["a", "c"], ["a", "b"])
    first, other, again = (load_decoded(monkeypatch, fingerprints)[0].digest for fingerprints in names)
    assert first == again != other


def load_decoded(monkeypatch: pytest.MonkeyPatch, fingerprints: list[str]) -> list[Pool]:
    """Return the pools of images of one pixel with these fingerprints."""
    pixels = np.zeros((1, 1, 3), np.uint8)
    named = list(enumerate(fingerprints))
    members = [SimpleNamespace(identity=n, captions=(), fingerprint=fingerprint) for n, fingerprint in named]
    samples = [SimpleNamespace(member=member, pixels=pixels) for member in members]
    monkeypatch.setattr(images_module, "decode_dataset", lambda *args, **options: samples)
    return load_pools(DatasetConfig(Path("data.toml"), Path("cache"), ()), Path("work"), 10**6, 0)
