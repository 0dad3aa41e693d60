"""Pixels <-> raw latents <-> normalised latents.

The cache keeps raw moments; normalisation is applied on read, so that a change of scale needs no new cache.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.typing import NDArray
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


@torch.no_grad()
def encode_moments(vae: AutoencoderKL, pixels: NDArray[np.uint8]) -> Tensor:
    """uint8 [B, H, W, 3] -> mean and log-variance [B, 2C, h, w], fp16 on the CPU."""
    images = torch.from_numpy(pixels).to(vae.device).permute(0, 3, 1, 2).to(vae.dtype) / 127.5 - 1
    posterior = vae.encode(images).latent_dist
    # the log-variance is clamped by the VAE itself; fp16 holds its range
    return torch.cat([posterior.mean, posterior.logvar], dim=1).to("cpu", torch.float16)


def draw_latent(moments: Tensor, noise: Tensor | None) -> Tensor:
    """Raw latents [B, C, h, w] from moments: the posterior's mean, or a draw with the given standard normal noise."""
    mean, logvar = moments.float().chunk(2, dim=1)
    return mean if noise is None else mean + torch.exp(0.5 * logvar) * noise
