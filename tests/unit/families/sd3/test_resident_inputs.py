"""Inputs gathered from a cache in memory are those that are read from its shards, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.config import ModelConfig
from sd3_light.core.batch import Batch
from sd3_light.data.manifest import Manifest
from sd3_light.data.prepare import GatheringPreparer, IndexPreparer
from sd3_light.data.resident import ResidentCache
from sd3_light.data.shards import CaptionFeatures
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset
from sd3_light.encoding.vae import LatentScale
from sd3_light.families.sd3.prepare import InputPreparer, ResidentInputs
from tests.unit.data.conftest import toy_content, toy_shard

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SEED = 3
Model = Callable[..., ModelConfig]


@pytest.fixture(params=[False, True], ids=["padded", "real"])
def data(tmp_path: Path, request: Any) -> CachedDataset:
    """A bucket with masks, flips and several captions in some shards, and a bucket without."""
    real = request.param
    contents = {
        "a": toy_content(range(1, 30), captions=3, variants=2, mask=True, real=real),
        "b": toy_content(range(30, 45), real=real),
        "c": toy_content(range(45, 70), captions=2, real=real, bucket="16x32"),
    }
    buckets = {"a": "32x16", "b": "32x16", "c": "16x32"}
    entries = tuple(toy_shard(tmp_path, name, content, buckets[name]) for name, content in contents.items())
    empty = toy_shard(tmp_path, "empty", toy_content([0], real=real, bucket="empty"), "empty", "")
    Manifest({"text_tokens": "real" if real else "padded"}, entries, empty).save(tmp_path)
    return CachedDataset(LocalStore(tmp_path))


def make_preparer(model: Model, data: CachedDataset, uncond: bool, **keys: Any) -> InputPreparer:
    table = model(text_tokens="real" if data.has_lengths else "padded", enable_uncond_text_dropout=True, **keys)
    empty: CaptionFeatures | None = None
    if uncond:
        empty = {name: tensor + 9 for name, tensor in data.empty_text().items()}
        data.empty_text = lambda: empty  # type: ignore[method-assign]  # one that differs from zeros
    return InputPreparer(SEED + 1, table, LatentScale(1.5, 0.06), empty)


def assert_same(actual: Batch, expected: Batch) -> None:
    assert actual.size == expected.size
    for one, two in ((actual.values, expected.values), (actual.host, expected.host)):
        assert one.keys() == two.keys()
        assert all(one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one)


JOINT: dict[str, Any] = {"uncond_text_dropout": "joint", "uncond_text_dropout_prob": 0.5}
DRAWS: dict[str, Any] = {"routing": {}, "position_crop_side": 7}


@pytest.mark.parametrize(
    ("uncond", "batch", "keys"),
    [
        *((uncond, batch, {}) for uncond in (False, True) for batch in (3, 20, 80)),
        (False, 20, JOINT),
        (False, 20, DRAWS),
    ],
)
def test_gathered_inputs_are_those_of_the_shards(
    model: Model, data: CachedDataset, uncond: bool, batch: int, keys: dict[str, Any]
) -> None:
    """In every step of two epochs: all patterns of dropped text, masked and unmasked batches; weighted captions."""
    if keys == JOINT:
        data.caption_weights = {"toy#0": (1.0,)}
    preparer = make_preparer(model, data, uncond, **keys)
    inputs = ResidentInputs(preparer, ResidentCache(data, CPU), SEED)
    order = data.order(SEED, {"toy#0": 1.0}, lambda resolution: batch)
    masks = set()
    for step in range(2 * order.steps_per_epoch):
        picks = order.picks(step, 0, order.batch_size(step))
        read = data.read(picks, SEED)
        masks.add(read["mask"] is None)
        assert_same(inputs.gather(inputs.indices(picks)), preparer.prepare_clean(read))
        gathered = GatheringPreparer(inputs, adds_noise=True).prepare_inputs(picks)
        assert_same(gathered, preparer.prepare_inputs(read))
        assert ({"kept", "corners"} <= gathered.values.keys()) == (keys == DRAWS)
    assert masks == {False, True}


def test_indices_go_to_the_device_and_lengths_stay(model: Model, data: CachedDataset) -> None:
    inputs = ResidentInputs(make_preparer(model, data, True), ResidentCache(data, CPU), SEED)
    order = data.order(SEED, {"toy#0": 1.0}, lambda resolution: 20)
    batch = IndexPreparer(inputs).prepare_inputs(order.picks(0, 0, 20))
    kinds = {name: value.dtype for name, value in batch.values.items()}
    assert kinds.pop("t") == torch.float32
    assert set(kinds.values()) == {torch.int32}
    assert batch.host.keys() == ({"bucket", "prompt.length"} if data.has_lengths else {"bucket"})
    assert int(batch.host["bucket"]) == order.picks(0, 0, 20).bucket
    gathering, buffers = GatheringPreparer(inputs, adds_noise=False), []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffers.append(torch.full(shape, float("nan"), dtype=dtype))
        return buffers[-1]

    picks = order.picks(1, 0, 20)
    in_place = gathering.prepare_into(picks, empty)
    assert_same(in_place, gathering.prepare_inputs(picks))
    assert any(in_place["moments"] is buffer for buffer in buffers)
    assert any(in_place["prompt"] is buffer for buffer in buffers)
