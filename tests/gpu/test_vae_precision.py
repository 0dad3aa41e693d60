"""The VAE's half-precision encoder on a GPU: its kernels, its error, and equal bytes for equal images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sd3_light.assets import DEMO
from sd3_light.config import ModelConfig
from sd3_light.encoding.half_vae import ERROR_LIMIT, TorchOperations, measure_precision, resolve_vae_dtype
from sd3_light.families.sd3.encoders import FrozenParts

pytest.importorskip("triton")
from sd3_light.encoding import vae_kernels

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.mark.parametrize("shape", [(3, 128, 96, 64), (2, 512, 33, 31), (1, 24, 5, 7), (2, 8, 64, 96)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_equal_their_torch_versions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator(GPU).manual_seed(0)
    x, y = (
        torch.randn(shape, generator=generator, device=GPU).add(2).to(dtype, memory_format=torch.channels_last)
        for _ in range(2)
    )
    bias, weight, shift = torch.randn(3, shape[1], generator=generator, device=GPU)
    arguments: Any = (x, bias, shape[1] // 4, weight, shift, 1e-6)
    close: Any = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(vae_kernels.norm_silu(*arguments), TorchOperations.norm_silu(*arguments), **close)
    torch.testing.assert_close(vae_kernels.add(x, y, bias), TorchOperations.add(x, y, bias), **close)
    alone = vae_kernels.norm_silu(x[-1:], *arguments[1:])
    assert torch.equal(vae_kernels.norm_silu(*arguments)[-1:], alone)


def test_float16_is_precise_and_bfloat16_is_less_so() -> None:
    half, brain = (measure_precision(DEMO, GPU, dtype) for dtype in (torch.float16, torch.bfloat16))
    assert half.share < ERROR_LIMIT
    assert 3 * half.error < brain.error
    assert resolve_vae_dtype("auto", DEMO, GPU) == torch.float16


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_moments_repeat_and_match_the_cpu(demo_parts: Path, one_at_a_time: bool) -> None:
    def encode(device: torch.device) -> torch.Tensor:
        keys: dict[str, Any] = {"dtype": "float32", "t5_max_length": 16, "text_tokens": "real", "vae_dtype": "float16"}
        model = ModelConfig.model_construct(diffusers_path=demo_parts, **keys)
        with FrozenParts(model, device, 4, one_at_a_time) as parts:
            pixels = np.random.default_rng(0).integers(0, 256, (10, 64, 96, 3), dtype=np.uint8)
            parts.encode_images(pixels, True)
            if one_at_a_time:
                parts.encode_captions(["a red circle"])  # the VAE leaves the device and comes back
            moments = parts.encode_images(pixels, True)["moments"]
            parts.synchronize()
            return moments

    one, two, expected = encode(GPU), encode(GPU), encode(torch.device("cpu"))
    assert torch.equal(one, two)
    assert torch.allclose(one.float(), expected.float(), atol=3e-2, rtol=3e-2)
