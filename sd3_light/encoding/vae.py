"""Conversion from pixels to raw and normalised latents.

The cache stores raw moments; they are normalised on read, so that changing the scale does not need a new cache.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
from torch import Tensor

from sd3_light.model.device_copy import to_device
from sd3_light.model.loading import load_diffusers_model
from sd3_light.model.part_configs import read_config

LOW_PSNR = 20.0
"""Reconstructions below this many dB have lost what the image shows; SD3's VAE reaches 30 and more on photographs."""


@dataclass(frozen=True)
class LatentScale:
    """How a VAE's latents [B, C, ...] are normalised: (raw - shift) x scale, or by mean and deviation of each channel.

    A VAE without a distribution gives latents in place of moments.
    """

    scale: float
    shift: float
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    has_distribution: bool = True

    @staticmethod
    def of_folder(diffusers_path: Path) -> "LatentScale":
        """Read the numbers from the VAE config of a diffusers folder."""
        return LatentScale.of_config(read_config(diffusers_path / "vae", "vae"))

    @staticmethod
    def of_config(config: Mapping[str, Any]) -> "LatentScale":
        """Read the numbers from a VAE's config; one with none leaves latents as they are."""
        means = tuple(config.get("latents_mean") or ())
        deviations = tuple(config.get("latents_std") or ())
        scale = float(config.get("scaling_factor") or 1.0)
        shift = float(config.get("shift_factor") or 0.0)
        is_plain = config.get("_class_name") in _WITHOUT_DISTRIBUTION
        if means and deviations:
            return LatentScale(scale, 0.0, means, deviations, not is_plain)
        return LatentScale(scale, shift, has_distribution=not is_plain)

    def latent_shape(self, moments: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one latent [C, ...] for moments [B, ...]."""
        channels, *sides = moments[1:]
        return (channels // 2 if self.has_distribution else channels, *sides)

    def draw(self, moments: Tensor, noise: Tensor | None) -> Tensor:
        """Return normalised latents: of the posterior's mean, or of a sample drawn with standard normal ``noise``."""
        raw = draw_latent(moments, noise) if self.has_distribution else moments.float()
        return self.normalise(raw)

    def normalise(self, raw: Tensor) -> Tensor:
        """Return the latents as the denoiser expects them."""
        if self.means:
            return (raw - _channels(self.means, raw)) / _channels(self.deviations, raw) * self.scale
        return (raw - self.shift) * self.scale

    def denormalise(self, latents: Tensor) -> Tensor:
        """Return the latents as the VAE's decoder expects them, with the bits of the stock pipelines."""
        if self.means:
            return latents / self.scale / (1.0 / _channels(self.deviations, latents)) + _channels(self.means, latents)
        return latents / self.scale + self.shift


_WITHOUT_DISTRIBUTION = ("AutoencoderDC",)


def _channels(values: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers per channel in the shape of latents [B, C, ...]."""
    channels = torch.tensor(values, dtype=like.dtype).view(1, -1, *[1] * (like.dim() - 2))
    return to_device(channels, like.device)


SD3_LATENTS = LatentScale(1.5305, 0.0609)
"""The constants of Stability's VAEs, which programs that read single files assume."""


def load_vae(diffusers_path: Path, device: torch.device, dtype: torch.dtype) -> AutoencoderKL:
    """Load the VAE of a diffusers folder, frozen."""
    vae: AutoencoderKL = load_diffusers_model(AutoencoderKL, diffusers_path / "vae", dtype)
    return vae.to(device).eval().requires_grad_(False)


class VaeDecoder:
    """Decodes normalised latents with the VAE of a diffusers folder, in float32 and one image at a time.

    The weights are on the host; inside the context a copy of them is on the device.
    """

    def __init__(self, diffusers_path: Path, device: torch.device) -> None:
        self.vae = load_vae(diffusers_path, torch.device("cpu"), torch.float32)
        self.vae.enable_slicing()  # one image at a time: its activations are the largest of all
        self._scale = LatentScale.of_folder(diffusers_path)
        self._device = device
        self._host: list[Tensor] = []

    def __enter__(self) -> Self:
        tensors = self._tensors()
        self._host = [tensor.data for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.to(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        for tensor, host in zip(self._tensors(), self._host, strict=True):
            tensor.data = host
        self._host = []

    def _tensors(self) -> list[Tensor]:
        return [*self.vae.parameters(), *self.vae.buffers()]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return the pixels [B, 3, H, W] from 0 to 1."""
        images: Tensor = self.vae.decode(self._scale.denormalise(latents), return_dict=False)[0]
        return (images * 0.5 + 0.5).clamp(0, 1)


def raw_moments(vae: AutoencoderKL, pixels_BHWC: Tensor, flip: bool = False) -> Tensor:
    """Encode uint8 pixels, mirrored with ``flip``, to mean and log-variance [B, 2C, h, w] in fp16 on the device."""
    # the VAE clamps the log-variance to a range that fp16 holds
    return encode_pixels(vae, pixels_BHWC.flip(2) if flip else pixels_BHWC).to(torch.float16).contiguous()


def encode_pixels(vae: AutoencoderKL, pixels_BHWC: Tensor, tf32: bool = True) -> Tensor:
    """Encode pixels from 0 to 255 to mean and log-variance [B, 2C, h, w] in the encoder's dtype."""
    encoder: Any = vae.encoder
    images = (pixels_BHWC.permute(0, 3, 1, 2).float() / 127.5 - 1).to(encoder.conv_in.weight.dtype)
    with tf32_convolutions(tf32):
        posterior = vae.encode(images).latent_dist
    return torch.cat([posterior.mean, posterior.logvar], dim=1)


@contextmanager
def tf32_convolutions(allowed: bool = True) -> Iterator[None]:
    """Use deterministic TF32 convolutions on GPUs in this block, so that equal images give equal bytes."""
    cudnn: Any = torch.backends.cudnn
    # TF32 has ten bits of mantissa, as many as the stored fp16
    flags = {"allow_tf32": allowed, "benchmark": False, "deterministic": True}
    previous = {name: getattr(cudnn, name) for name in flags}
    try:
        for name, value in flags.items():
            setattr(cudnn, name, value)
        yield
    finally:
        for name, value in previous.items():
            setattr(cudnn, name, value)


@torch.no_grad()
def decode_moments(vae: AutoencoderKL, moments_BCHW: Tensor) -> NDArray[np.uint8]:
    """Decode the posterior means of moments [B, 2C, h, w] to pixels [B, H, W, 3]."""
    means = moments_BCHW.chunk(2, dim=1)[0]
    decoder: Any = vae.decoder  # its dtype may differ from the encoder's
    images = vae.decode(means.to(vae.device, decoder.conv_in.weight.dtype)).sample
    values = ((images.float().clamp(-1, 1) + 1) * 127.5).round().to("cpu", torch.uint8)
    pixels: NDArray[np.uint8] = values.permute(0, 2, 3, 1).numpy()
    return pixels


def psnr(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> float:
    """Return the peak signal-to-noise ratio of two images of one size, in dB; equal images have 68."""
    error = float(np.mean((first.astype(np.float32) - second) ** 2))
    return 10 * math.log10(255**2 / max(error, 1e-2))


def draw_latent(moments: Tensor, noise: Tensor | None) -> Tensor:
    """Return raw latents [B, C, h, w]: the posterior's mean, or a sample drawn with standard normal ``noise``."""
    mean, logvar = moments.float().chunk(2, dim=1)
    return mean if noise is None else mean + torch.exp(0.5 * logvar) * noise
