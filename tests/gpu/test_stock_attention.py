"""Qwen-Image and Z-Image on a GPU: their attention is that of the stock processors, and padded text is recorded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.export.trainable import freeze
from sd3_light.families.stock.attention import QwenAttention, ZImageAttention
from tests.families import make_pipeline
from tests.unit.families.test_text_lengths import Model, text_batch

CUDA = torch.device("cuda", 0)
PROCESSORS: dict[str, Any] = {"qwen_image": QwenAttention, "z_image": ZImageAttention}


@pytest.fixture(scope="module", params=["qwen_image", "z_image", "sana"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("tiny") / request.param
    make_pipeline(request.param).save_pretrained(path)
    return request.param, path


def on_gpu(name: str, path: Path) -> Model:
    tiny = Model(name, path)
    tiny.model.to(CUDA)
    tiny.model.compute_dtype = torch.bfloat16
    return tiny


@pytest.mark.parametrize("lengths", [[7], [32], [3, 11], [32, 5]])
def test_attention_is_that_of_the_stock_processor(
    folder: tuple[str, Path], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, forward and backward, padded or not."""
    tiny = on_gpu(*folder)
    batch = text_batch(lengths).to(CUDA)
    results: list[dict[str, Tensor]] = []
    for device, step in (("none", None), ("cuda", None), ("cuda", 32)):
        for processor in PROCESSORS.values():
            monkeypatch.setattr(processor, "device", device)
        results.append(tiny.run(batch, step))
    stock, *others = results
    for other in others:
        for name, expected in stock.items():
            error = (other[name] - expected).float().norm() / expected.float().norm().clamp(min=1e-3)
            assert error < 0.05, (name, error)


def test_batches_of_other_lengths_replay_one_graph(folder: tuple[str, Path]) -> None:
    losses = {}
    for graphs in (False, True):
        tiny = on_gpu(*folder)
        freeze(tiny.model.denoiser, tiny.config.freeze)
        engine = TorchEngine(tiny.model, tiny.config, Launch(), CUDA)
        if graphs:
            engine.use_graphs()
        batches = [text_batch([length]) for length in (7, 20, 31, 9)]
        losses[graphs] = [engine.train_step([batch], 1e-4).read().losses["loss"] for batch in batches]
        assert engine.graphs is None or engine.graphs.count == 1
    assert losses[True] == pytest.approx(losses[False], rel=2e-2)
