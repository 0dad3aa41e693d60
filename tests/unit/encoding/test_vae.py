"""Latents are encoded and scaled as in stock diffusers; the half-precision encoder is used only where it is precise."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sd3_light.assets import DEMO
from sd3_light.config.faults import UserError
from sd3_light.encoding import half_vae
from sd3_light.encoding.half_vae import PrecisionError, TorchOperations, resolve_vae_dtype, to_half_encoder
from sd3_light.encoding.vae import LatentScale, draw_latent, encode_pixels, load_vae, raw_moments, tf32_convolutions
from sd3_light.world import draw_image
from tests.modules import emulated_kernel

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NAN = float("nan")


@pytest.fixture(scope="module")
def pixels() -> np.ndarray[Any, Any]:
    """Two wide images of the demo world, uint8 [B, H, W, 3]."""
    return np.stack([np.asarray(draw_image(index, seed=0)[0]) for index in (1, 5)])


def test_moments_equal_those_of_the_stock_encoder(stock: Any, demo_parts: Path, pixels: Any) -> None:
    from PIL import Image

    vae = load_vae(demo_parts, torch.device("cpu"), torch.float32)
    ours = raw_moments(vae, torch.from_numpy(pixels))
    images = stock.image_processor.preprocess([Image.fromarray(image) for image in pixels])
    with torch.no_grad():
        posterior = stock.vae.encode(images).latent_dist
    theirs = torch.cat([posterior.mean, posterior.logvar], dim=1)
    assert ours.dtype == torch.float16
    assert ours.shape == (2, 32, 6, 10)
    # pixels / 127.5 - 1 and 2 (pixels / 255) - 1 differ in the last bit; fp16 has 11 bits
    assert torch.allclose(ours.float(), theirs, atol=2e-3, rtol=2e-3)


def test_draw_latent_follows_the_posterior(stock: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    moments = torch.randn(2, 32, 3, 4, generator=generator).half()
    noise = torch.randn(2, 16, 3, 4, generator=generator)
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    posterior = DiagonalGaussianDistribution(moments.float())
    assert torch.equal(draw_latent(moments, None), posterior.mode())
    assert torch.equal(draw_latent(moments, noise), posterior.mean + posterior.std * noise)


def test_latents_are_normalised_as_in_the_stock_pipeline(stock: Any, demo_parts: Path) -> None:
    scale = LatentScale.of_folder(demo_parts)
    config = stock.vae.config
    raw = torch.randn(2, 16, 3, 4, generator=torch.Generator().manual_seed(0))
    normalised = scale.normalise(raw)
    assert torch.equal(normalised, (raw - config.shift_factor) * config.scaling_factor)
    assert torch.allclose(normalised / config.scaling_factor + config.shift_factor, raw, atol=1e-5)


@pytest.mark.parametrize("shift", [{}, {"shift_factor": None}])
def test_a_vae_without_a_shift_has_shift_zero(tmp_path: Path, shift: dict[str, Any]) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"scaling_factor": 0.18215, **shift}))
    assert LatentScale.of_folder(tmp_path) == LatentScale(0.18215, 0.0)


def test_convolution_flags_are_restored() -> None:
    cudnn = torch.backends.cudnn
    before = (cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic)
    try:
        cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = False, True, False
        with tf32_convolutions():
            assert (cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic) == (True, False, True)
        assert (cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic) == (False, True, False)
    finally:
        cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before


def test_latents_are_normalised_by_channel_and_without_a_distribution() -> None:
    config = {"latents_mean": [0.5, -1.0], "latents_std": [2.0, 4.0], "_class_name": "AutoencoderKLQwenImage"}
    scale = LatentScale.of_config(config)
    raw = torch.tensor([2.5, 3.0]).view(1, 2, 1, 1, 1).expand(1, 2, 1, 3, 3)
    expected = torch.tensor([1.0, 1.0]).view(1, 2, 1, 1, 1).expand_as(raw)
    assert torch.equal(scale.normalise(raw), expected)
    assert torch.equal(scale.denormalise(expected), raw)
    assert scale.latent_shape((5, 4, 1, 3, 3)) == (2, 1, 3, 3)
    scale = LatentScale.of_config({"scaling_factor": 0.5, "_class_name": "AutoencoderDC"})
    latents = torch.full((2, 3, 4, 4), 4.0, dtype=torch.float16)
    assert scale.latent_shape(latents.shape) == (3, 4, 4)
    assert torch.equal(scale.draw(latents, None), torch.full((2, 3, 4, 4), 2.0))


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with emulated_kernel(Path(half_vae.__file__).with_name("vae_kernels.py")) as module:
        yield module


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(2, 12, 17, 19), (1, 64, 3, 5)])
def test_kernels_equal_their_torch_versions(kernels: ModuleType, shape: tuple[int, ...]) -> None:
    x, y = (normal(*shape).add(index).contiguous(memory_format=torch.channels_last) for index in (3, 0))
    bias, weight, shift = (normal(shape[1], index + 1)[:, 0] for index in range(3))
    actual = kernels.norm_silu(x, bias, 4, weight, shift, 1e-6)
    torch.testing.assert_close(actual, TorchOperations.norm_silu(x, bias, 4, weight, shift, 1e-6), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(kernels.add(x, y, bias), TorchOperations.add(x, y, bias))
    assert actual.is_contiguous(memory_format=torch.channels_last)


def test_kernels_do_not_depend_on_the_rest_of_the_batch(kernels: ModuleType) -> None:
    x, bias, ones = normal(3, 8, 20, 20), normal(8), torch.ones(8)
    together = kernels.norm_silu(x, bias, 4, ones, bias, 1e-6)
    alone = kernels.norm_silu(x[1:2], bias, 4, ones, bias, 1e-6)
    assert torch.equal(together[1:2], alone)


def test_the_converted_encoder_equals_the_stock_one_and_the_decoder_stays_in_float32() -> None:
    pixels = half_vae.probe_pixels()[:1, :64, 100:164]
    with torch.inference_mode():
        stock = encode_pixels(load_vae(DEMO, CPU, torch.float32), pixels)
        converted = to_half_encoder(load_vae(DEMO, CPU, torch.float32), torch.float32)
        assert any(isinstance(module, half_vae._HalfResnet) for module in converted.modules())
        torch.testing.assert_close(encode_pixels(converted, pixels), stock, rtol=1e-4, atol=1e-4)
    vae: Any = to_half_encoder(load_vae(DEMO, CPU, torch.float32), torch.float16)
    assert vae.encoder.conv_in.weight.dtype == torch.float16
    assert {parameter.dtype for parameter in vae.decoder.parameters()} == {torch.float32}


def test_the_error_of_a_precision_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs add up float16 products in float16, so bfloat16 stands for half precision here."""
    monkeypatch.setattr(half_vae, "PROBE_SIDE", 16)
    monkeypatch.setattr(half_vae, "PROBE_IMAGES", 1)
    half, full = (half_vae.measure_precision(DEMO, CPU, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert full.share < 1e-3
    assert 10 * full.error < half.error
    assert half.share < half_vae.ERROR_LIMIT
    assert half.posterior == full.posterior > 0
    assert half.rounding == full.rounding > 0


@pytest.mark.parametrize(("error", "expected"), [(0.1, torch.float16), (0.9, torch.float32), (NAN, torch.float32)])
def test_auto_is_float16_only_where_it_is_precise(monkeypatch: Any, error: float, expected: torch.dtype) -> None:
    monkeypatch.setattr(half_vae, "measure_precision", lambda *_: PrecisionError(error, 1.0, 0.5))
    monkeypatch.setattr(half_vae, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert resolve_vae_dtype("auto", DEMO, GPU) == expected
    assert resolve_vae_dtype("bfloat16", DEMO, GPU) == torch.bfloat16
    assert resolve_vae_dtype("auto", DEMO, CPU) == torch.float32
    assert resolve_vae_dtype("float16", DEMO, CPU) == torch.float32


def test_kernels_that_do_not_compile_leave_float32(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fail(*_: object) -> PrecisionError:
        raise RuntimeError("Failed to find C compiler.\nmore")

    errors = ModuleType("triton.errors")
    errors.TritonError = ValueError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.errors", errors)
    monkeypatch.setattr(half_vae, "find_spec", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(half_vae, "measure_precision", fail)
    assert resolve_vae_dtype("auto", DEMO, GPU) == torch.float32
    assert "do not run on this GPU (RuntimeError: Failed to find C compiler.)" in capsys.readouterr().err


def test_half_precision_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_vae, "find_spec", lambda _: None)
    with pytest.raises(UserError, match='vae_dtype = "bfloat16" needs Triton'):
        resolve_vae_dtype("bfloat16", DEMO, GPU)
    assert resolve_vae_dtype("auto", DEMO, GPU) == resolve_vae_dtype("float32", DEMO, GPU) == torch.float32
