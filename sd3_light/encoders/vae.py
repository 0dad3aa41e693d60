"""Pixels <-> raw latents <-> normalised latents.

The cache keeps raw moments; normalisation is applied on read, so that a change of scale needs no new cache.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor


@dataclass(frozen=True)
class LatentScale:
    """The VAE's one scale and one shift: normalised = (raw - shift) x scale."""

    scale: float
    shift: float

    @staticmethod
    def of_folder(diffusers_path: Path) -> "LatentScale":
        """From a diffusers folder's VAE config, without loading weights."""
        config = json.loads((diffusers_path / "vae" / "config.json").read_text(encoding="utf-8"))
        return LatentScale(float(config["scaling_factor"]), float(config.get("shift_factor") or 0.0))

    def normalise(self, raw: Tensor) -> Tensor:
        """What the denoiser sees."""
        return (raw - self.shift) * self.scale

    def denormalise(self, normalised: Tensor) -> Tensor:
        """What the VAE decodes."""
        return normalised / self.scale + self.shift


def load_vae(diffusers_path: Path, device: torch.device, dtype: torch.dtype) -> AutoencoderKL:
    """The folder's VAE, frozen."""
    vae = AutoencoderKL.from_pretrained(diffusers_path, subfolder="vae", dtype=dtype, local_files_only=True)
    return vae.to(device).eval().requires_grad_(False)


def raw_moments(vae: AutoencoderKL, pixels_BHWC: Tensor, flip: bool = False) -> Tensor:
    """uint8 pixels on the VAE's device -> mean and log-variance [B, 2C, h, w] there, fp16; mirrored with ``flip``."""
    images = pixels_BHWC.permute(0, 3, 1, 2).to(vae.dtype) / 127.5 - 1
    with convolutions_in_tf32():
        posterior = vae.encode(images.flip(-1) if flip else images).latent_dist
    # the log-variance is clamped by the VAE itself; fp16 holds its range
    return torch.cat([posterior.mean, posterior.logvar], dim=1).to(torch.float16).contiguous()


@contextmanager
def convolutions_in_tf32() -> Iterator[None]:
    """On GPUs, TF32 convolutions (ten bits of mantissa, as in the fp16 that is kept) by kernels that are chosen
    without timing them, so that equal pictures become equal bytes. The flags are put back."""
    cudnn: Any = torch.backends.cudnn
    wanted = {"allow_tf32": True, "benchmark": False, "deterministic": True}
    before = {name: getattr(cudnn, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(cudnn, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(cudnn, name, value)


def draw_latent(moments: Tensor, noise: Tensor | None) -> Tensor:
    """Raw latents [B, C, h, w] from moments: the posterior's mean, or a draw with the given standard normal noise."""
    mean, logvar = moments.float().chunk(2, dim=1)
    return mean if noise is None else mean + torch.exp(0.5 * logvar) * noise
