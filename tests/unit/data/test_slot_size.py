"""Slots and device buffers get the size of the largest micro-batch, and are allocated once."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sd3_light.config import TrainConfig
from sd3_light.core.columns import Column
from sd3_light.core.registry import family_named
from sd3_light.cost.data_bytes import batch_bytes
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.shards import Origin, write_shard
from sd3_light.data.slot_size import largest_batch_bytes
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset
from sd3_light.encoding.vae import LatentScale
from sd3_light.engines import Launch, prefetch
from sd3_light.engines import feed as training_data
from sd3_light.engines.feed import TrainingData, load_cache, training_steps
from sd3_light.families.sd3.prepare import InputPreparer, ResidentInputs
from tests.shards import sd3_content
from tests.waiting import wait_until

WIDTHS = {"clip_l": 64, "clip_g": 64, "t5": 4096}
BATCH, SAMPLES, SHARD = 8, 64, 16
LONGEST = 120
CPU = torch.device("cpu")


def shard(folder: Path, name: str, t5_tokens: list[int]) -> ShardEntry:
    """Write samples with these numbers of T5 tokens and half as many of CLIP."""
    count, text = len(t5_tokens), {}
    for encoder, width in WIDTHS.items():
        lengths = torch.tensor(t5_tokens) // (1 if encoder == "t5" else 2)
        text[f"{encoder}.start"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        text[f"{encoder}.tokens"] = torch.ones(int(lengths.sum()), width, dtype=torch.bfloat16)
        if encoder != "t5":
            text[f"{encoder}.pooled"] = torch.ones(count, width, dtype=torch.bfloat16)
    bucket = "empty" if name == "empty" else "64x64"
    ids = torch.arange(count) + 1000 * len(list(folder.rglob("*.safetensors")))
    moments, rows = torch.zeros(count, 1, 32, 8, 8, dtype=torch.float16), torch.arange(count)
    content = sd3_content(ids, moments, torch.arange(count + 1), rows, text)
    entry = ShardEntry(f"{name}.safetensors", bucket, (64, 64), "toy#0", 0, 0, "", name)
    return write_shard(folder, entry, content, [Origin(f"{at}", "", 64, 64, ("",)) for at in ids.tolist()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of real text whose captions get longer: 4 to 80 T5 tokens, and half as many of CLIP."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / SHARDS).mkdir()
    lengths = [4 + 76 * at // (SAMPLES - 1) for at in range(SAMPLES)]
    assert lengths[-1] + lengths[-1] // 2 == LONGEST
    parts = [lengths[at : at + SHARD] for at in range(0, SAMPLES, SHARD)]
    entries = tuple(shard(folder / SHARDS, f"{at}", part) for at, part in enumerate(parts))
    Manifest({"text_tokens": "real"}, entries, shard(folder / SHARDS, "empty", [2])).save(folder)
    return folder


@pytest.fixture
def data(folder: Path) -> CachedDataset:
    return CachedDataset(LocalStore(folder))


def make_config(folder: Path, **keys: Any) -> TrainConfig:
    model = {"train_type": "sd3_light_pretrain", "size": "tiny2", "diffusers_path": ".", "text_tokens": "real"}
    keys = {"num_dataloader_workers": 2, "dataloader_prefetch_per_worker": 2, "micro_batch_size_per_gpu": BATCH, **keys}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 3, "model": model, **keys}
    return TrainConfig.model_validate(table, context={"base": folder})


PREPARED = partial(family_named("sd3").prepared_columns, SimpleNamespace(text_tokens="real", references=0))


def prepared_batch(tokens: int) -> int:
    """Return the bytes of a batch whose texts have this many tokens."""
    shapes = {"clip_l": (0, 64), "clip_g": (0, 64), "t5": (tokens, 4096)}
    shapes |= {"clip_l.pooled": (64,), "clip_g.pooled": (64,)}
    text = [Column(name, "caption", "bfloat16", shape, (), len(shape) > 1) for name, shape in shapes.items()]
    return batch_bytes(PREPARED([Column("moments", "image", "float16", (32, 8, 8), ()), *text]), BATCH).value


@pytest.mark.parametrize("residence", ["stream", "host", "device"])
def test_batches_are_pinned(folder: Path, data: CachedDataset, residence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captions get longer with each shard; pinning again would stop the device."""
    pins, allocated = list[int](), set[int]()

    def pin(address: int, nbytes: int) -> Callable[[], Any]:
        pins.append(nbytes)
        return lambda: pins.append(-nbytes)

    reserve = prefetch._DeviceBuffer.reserve

    def reserved(*arguments: Any) -> torch.Tensor:
        memory = reserve(*arguments)
        allocated.add(len(memory))
        return memory

    monkeypatch.setattr(training_data, "_pin_for", lambda device: pin)
    monkeypatch.setattr(prefetch._DeviceBuffer, "reserve", reserved)
    config = make_config(folder, cache_residence=residence)
    order = data.order(0, {"toy#0": 1.0}, lambda resolution: BATCH, 1)
    preparer = InputPreparer(0, config.model, LatentScale(1.5, 0.06), data.empty_text())
    resident = load_cache(data, config, Launch(), CPU)
    if residence == "device":
        assert resident is not None
        monkeypatch.setattr(resident, "device", torch.device("meta"))
        monkeypatch.setattr(ResidentInputs, "gather", lambda self, batch: batch)
        monkeypatch.setattr(InputPreparer, "noise_adder", lambda self, device: lambda batch: batch)
    steps = training_steps(TrainingData(config, data, order, Launch(), resident), None, preparer, CPU)(0)
    slots = 2 * 2 + 1 + 1
    longest = 0
    for _, step in zip(range(3 * SAMPLES // BATCH), steps, strict=False):
        (batch,) = step
        longest = max(longest, batch["t5_rows" if residence == "device" else "prompt"].shape[1])
        del step, batch
    wait_until(lambda: len(pins) >= slots)
    assert longest == LONGEST
    assert len(pins) == slots, pins
    assert len(set(pins)) == 1
    assert len(allocated) == 1
    steps.close()


def test_check_counts_the_size_of_a_slot(data: CachedDataset) -> None:
    largest = largest_batch_bytes(data, [BATCH], PREPARED)
    prompt = BATCH * LONGEST * WIDTHS["t5"] * 2
    assert prompt < largest < 1.01 * prompt
    assert largest <= prepared_batch(LONGEST)
    assert largest_batch_bytes(data, [BATCH], PREPARED, only_indices=True) < largest / 100


def test_only_some_shards_of_a_large_cache_are_measured(data: CachedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a million files would take longer than pinning again now and then."""
    monkeypatch.setattr("sd3_light.data.slot_size.MAX_SURVEYED", 2)
    assert largest_batch_bytes(data, [BATCH], PREPARED) < 0.9 * prepared_batch(LONGEST)
