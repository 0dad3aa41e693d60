"""Latents are encoded and scaled as in stock diffusers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sd3_light.encoding.vae import LatentScale, draw_latent, load_vae, raw_moments, tf32_convolutions
from sd3_light.world import draw_image


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


# --- normalised latents ----------------------------------------------------------------------------


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
