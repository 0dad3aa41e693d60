"""Latents of every kind of VAE are those of the stock pipelines; packing is exact."""

from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.flow.packing import pack_latents, unpack_latents
from sd3_light.tasks.ready_made import DrawLatent, EncodeImage, EncodeVideo, normalise_latent
from tests.families import make_vae

PIXELS = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)


def latent_of(vae: Any, unit: Any = None, noise: float = 0.0, **values: Any) -> Tensor:
    module = SimpleNamespace(vae=vae.eval())
    with torch.no_grad():
        moments = (unit or EncodeImage()).run(module, **(values or {"image": Image.fromarray(PIXELS)}))["moments"]
        latents: Tensor = DrawLatent().run(module, moments, lambda _, shape: torch.full(shape, noise))["latents"]
    return latents


def stock_pixels() -> Tensor:
    return torch.from_numpy(PIXELS).permute(2, 0, 1)[None].float() / 127.5 - 1


@torch.no_grad()
def test_latents_are_those_of_flux_qwen_image_and_sana_and_keep_frames() -> None:
    torch.manual_seed(0)
    vae = make_vae("flux")
    pipe: Any = SimpleNamespace(vae=vae.eval())
    stock = diffusers.FluxImg2ImgPipeline._encode_vae_image
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusers.models.autoencoders.vae.randn_tensor", lambda shape, **_: torch.full(shape, 0.5))
        expected = stock(pipe, stock_pixels(), None)[0]
    assert torch.allclose(latent_of(vae, noise=0.5), expected, atol=1e-6)
    assert expected.shape == (4, 4, 6)
    torch.manual_seed(0)
    vae = make_vae("qwen_image")
    pipe: Any = SimpleNamespace(vae=vae.eval())
    expected = diffusers.QwenImageEditPipeline._encode_vae_image  # it takes the posterior's mean
    pipe.latent_channels = 4
    result = expected(pipe, stock_pixels()[:, :, None], None)
    assert result.shape == (1, 4, 1, 4, 6)
    assert torch.allclose(latent_of(vae), result[0, :, 0], atol=1e-6)
    torch.manual_seed(0)
    vae = make_vae("sana")
    expected = vae.eval().encode(stock_pixels()).latent * vae.config.scaling_factor
    assert torch.allclose(latent_of(vae, noise=9.0), expected[0], atol=1e-6), "nothing is drawn"
    torch.manual_seed(0)
    vae, video = make_vae("qwen_image"), np.stack([PIXELS] * 5)
    latents = latent_of(vae, EncodeVideo(), video=video)
    assert latents.shape == (4, 2, 4, 6), "four frames after the first share one latent frame"
    assert torch.allclose(latents[:, 0], latent_of(vae), atol=1e-5), "the first frame is encoded alone"
    torch.manual_seed(0)
    vae, video = wan_vae(), np.stack([PIXELS] * 5)
    without = latent_of(vae, EncodeVideo(sample=False), 0.5, video=video)
    assert torch.equal(without, latent_of(vae, EncodeVideo(), video=video))
    module = SimpleNamespace(vae=vae)
    assert EncodeVideo(sample=False).run(module, video=torch.from_numpy(video))["moments"].shape[0] == vae.config.z_dim


def wan_vae() -> Any:
    statistics = {"latents_mean": [-0.5, 0.1, 0.2, 0.9], "latents_std": [2.0, 1.5, 0.8, 1.2]}
    return diffusers.AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **statistics)


@pytest.mark.parametrize(("frames", "remedy"), [(4, 1), (8, 5), (16, 13)])
def test_frames_that_the_vae_would_drop_are_an_error(frames: int, remedy: int) -> None:
    module = SimpleNamespace(vae=wan_vae())
    message = f"has {frames} frames; AutoencoderKLWan encodes 4n . 1 of them: give frames={remedy}$"
    with pytest.raises(UserError, match=message):
        EncodeVideo().run(module, video=np.stack([PIXELS] * frames))


@pytest.mark.parametrize(
    ("unit", "values", "message"),
    [
        (EncodeImage(), {"image": PIXELS[..., :2]}, "not [H, W, 3]; convert it to RGB"),
        (EncodeVideo(), {"video": PIXELS}, "not [F, H, W, 3]; stack RGB frames"),
        (EncodeVideo(), {"video": PIXELS[None]}, "AutoencoderKL encodes images; give the VAE of a video model"),
    ],
)
def test_a_wrong_input_is_an_error(unit: Any, values: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        latent_of(make_vae("flux"), unit, **values)
    assert message in str(error.value)


def test_packing_is_that_of_flux_and_can_be_undone() -> None:
    latents = torch.randn(2, 4, 6, 8)
    stock: Any = diffusers.FluxPipeline
    packed = pack_latents(latents)
    assert torch.equal(packed, stock._pack_latents(latents, 2, 4, 6, 8))
    assert torch.equal(unpack_latents(packed, 6, 8), latents)
    assert torch.equal(unpack_latents(pack_latents(latents, 1), 6, 8, 1), latents)
    with pytest.raises(UserError, match="latents of 5 x 8 cannot be packed into patches of 2; crop the images"):
        pack_latents(latents[:, :, :5])
    latent = torch.randn(4, 2, 2)
    assert torch.equal(normalise_latent(latent, SimpleNamespace()), latent)
