"""Stock families on a GPU: attention is that of the stock processors, padded text is recorded, Flux may use cuDNN."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sd3_light.core.registry import family_named
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


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_flux_with_cudnn_are_those_with_flash(compiled: bool) -> None:
    """Single blocks give attention a part of a wider gradient, double blocks a separate one."""
    torch.manual_seed(0)
    config = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 128, "num_attention_heads": 4}
    sizes = {"joint_attention_dim": 64, "pooled_projection_dim": 32, "axes_dims_rope": (16, 56, 56)}
    denoiser = FluxTransformer2DModel(in_channels=64, guidance_embeds=False, **config, **sizes).to(CUDA, torch.bfloat16)
    family_named("flux").speed_up(denoiser)  # type: ignore[attr-defined]
    if compiled:
        for block in (*denoiser.transformer_blocks, *denoiser.single_transformer_blocks):
            block.compile()
    tokens = 16 * 16
    inputs = {
        "hidden_states": torch.randn(1, tokens, 64, device=CUDA).bfloat16(),
        "encoder_hidden_states": torch.randn(1, 512, 64, device=CUDA).bfloat16(),
        "pooled_projections": torch.randn(1, 32, device=CUDA).bfloat16(),
        "timestep": torch.tensor([0.5], device=CUDA),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(16.0), torch.arange(16.0)).to(CUDA),
        "txt_ids": torch.zeros(512, 3, device=CUDA),
    }
    gradients = []
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        denoiser.zero_grad()
        torch.compiler.reset()
        with sdpa_kernel(kernel):
            denoiser(**inputs, return_dict=False)[0].square().mean().backward()
        gradients.append({name: weight.grad for name, weight in denoiser.named_parameters() if weight.grad is not None})
    flash, cudnn = gradients
    for name, expected in flash.items():
        error = (cudnn[name] - expected).float().norm() / expected.float().norm().clamp(min=1e-6)
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
