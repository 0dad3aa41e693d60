"""A cache in GPU memory: the same inputs as from shards and from host memory, and no host memory for samples."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sd3_light.config import ModelConfig
from sd3_light.config.faults import UserError
from sd3_light.data.manifest import Manifest
from sd3_light.data.resident import ResidentCache
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset
from sd3_light.encoding.vae import LatentScale
from sd3_light.engines import Launch
from sd3_light.engines.feed import TrainingData, training_steps
from sd3_light.families.sd3.prepare import InputPreparer
from tests.unit.data.conftest import toy_content, toy_shard

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
STEPS = 12


@pytest.fixture(params=[False, True], ids=["padded", "real"])
def data(tmp_path: Path, request: Any) -> CachedDataset:
    real = request.param
    contents = {
        "a": toy_content(range(1, 30), captions=3, variants=2, mask=True, real=real),
        "b": toy_content(range(30, 70), captions=2, real=real, bucket="16x32"),
    }
    buckets = {"a": "32x16", "b": "16x32"}
    entries = tuple(toy_shard(tmp_path, name, content, buckets[name]) for name, content in contents.items())
    empty = toy_shard(tmp_path, "empty", toy_content([0], real=real, bucket="empty"), "empty", "")
    Manifest({"text_tokens": "real" if real else "padded"}, entries, empty).save(tmp_path)
    return CachedDataset(LocalStore(tmp_path))


def inputs_of(data: CachedDataset, workers: int, resident: ResidentCache | None) -> list[dict[str, torch.Tensor]]:
    """Return the inputs of some steps on the GPU, copied to the host."""
    text = "real" if data.has_lengths else "padded"
    table = {"train_type": "sd3_light_pretrain", "size": "tiny2", "diffusers_path": ".", "text_tokens": text}
    model = ModelConfig.model_validate({**table, "enable_uncond_text_dropout": True}, context={"base": Path()})
    preparer = InputPreparer(5, model, LatentScale(1.5, 0.06), data.empty_text())
    config: Any = SimpleNamespace(
        model=model,
        gradient_accumulation_steps=2,
        micro_batch_size_per_gpu=8,
        num_dataloader_workers=workers,
        dataloader_prefetch_per_worker=2,
    )
    order = data.order(0, {"toy#0": 1.0}, lambda resolution: 8)
    source = TrainingData(config, data, order, Launch(), resident, by_segment=True)
    steps = training_steps(source, None, preparer, CUDA)(0)
    inputs = []
    for _, step in zip(range(STEPS), steps, strict=False):
        for batch in step:
            inputs.append({name: value.cpu() for name, value in (*batch.values.items(), *batch.host.items())})
    steps.close()
    return inputs


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=["host", "device"])
def test_inputs_do_not_depend_on_the_residence(data: CachedDataset, device: torch.device, workers: int) -> None:
    streamed, held = inputs_of(data, workers, None), inputs_of(data, workers, ResidentCache(data, device))
    assert len(streamed) == 2 * STEPS
    for one, two in zip(streamed, held, strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_cache_on_the_gpu_is_the_one_on_the_host(data: CachedDataset) -> None:
    before = torch.cuda.memory_allocated()
    held, host = ResidentCache(data, CUDA), ResidentCache(data, CPU)
    for one, two in zip(held.buckets, host.buckets, strict=True):
        assert one.images["moments"].is_cuda
        assert torch.equal(one.images["moments"].cpu(), two.images["moments"])
        for name, tokens in two.text.tokens.items():
            assert torch.equal(one.text.tokens[name].cpu(), tokens)
    assert 0 < torch.cuda.memory_allocated() - before < 1 << 20


def test_a_cache_larger_than_the_gpu_is_rejected(data: CachedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 200))
    with pytest.raises(UserError, match="of GPU memory are free"):
        ResidentCache(data, CUDA)
