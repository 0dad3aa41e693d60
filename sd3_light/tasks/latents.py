"""Ready-made units and functions for latents: encoding with any diffusers VAE, normalisation, packing into tokens."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.encoding.vae import LatentScale, draw_latent, encode_pixels, has_frames
from sd3_light.tasks.units import Draw, PipelineUnit, Values


class EncodeImage(PipelineUnit):
    """Encodes an image (PIL, or an array [H, W, 3] of bytes) with the module's VAE, of images or of videos.

    The moments are mean and log-variance [2C, h, w]; a VAE without a distribution (DC-AE) gives the latent [C, h, w].
    """

    reads, writes, uses = ("image",), ("moments",), ("vae",)

    def run(self, module: Any, image: Any) -> Values:  # type: ignore[override]
        """Return the moments."""
        pixels = torch.from_numpy(np.array(image))
        if pixels.ndim != 3 or pixels.shape[-1] != 3:
            raise UserError(f"EncodeImage: an image has shape {tuple(pixels.shape)}, not [H, W, 3]; convert it to RGB")
        return {"moments": _encode(module.vae, pixels)}


class EncodeVideo(PipelineUnit):
    """Encodes a video (bytes [F, H, W, 3]) with the module's video VAE into moments [2C, f, h, w].

    With ``sample=False`` it keeps the means [C, f, h, w] only, as Wan is trained: `DrawLatent` then draws nothing, and
    the moments take half the space on disk.
    """

    reads, writes, uses = ("video",), ("moments",), ("vae",)

    def __init__(self, sample: bool = True) -> None:
        self.sample = sample

    def run(self, module: Any, video: Any) -> Values:  # type: ignore[override]
        """Return the moments."""
        frames = video if isinstance(video, Tensor) else torch.from_numpy(np.array(video))
        if frames.ndim != 4 or frames.shape[-1] != 3:
            raise UserError(f"EncodeVideo: a video has shape {tuple(frames.shape)}, not [F, H, W, 3]; stack RGB frames")
        if not has_frames(module.vae.encoder):
            raise UserError(f"EncodeVideo: {type(module.vae).__name__} encodes images; give the VAE of a video model")
        _require_whole_groups(module.vae, len(frames))
        moments = _encode(module.vae, frames)
        return {"moments": moments if self.sample else moments.chunk(2)[0]}


def _require_whole_groups(vae: Any, frames: int) -> None:
    """Raise if the VAE would silently drop the last frames: it encodes the first frame, then groups."""
    group = getattr(vae.config, "scale_factor_temporal", None) or 1
    if rest := (frames - 1) % group:
        raise UserError(
            f"EncodeVideo: a video has {frames} frames; {type(vae).__name__} encodes {group}n + 1 of them: give "
            f"frames={frames - rest}"
        )


def _encode(vae: Any, pixels: Tensor) -> Tensor:
    return encode_pixels(vae, pixels[None].to(vae.device))[0].float()


class DrawLatent(PipelineUnit):
    """Draws a latent from the moments, again in every epoch, and normalises it as the VAE's config says."""

    reads, writes, draws = ("moments",), ("latents",), True

    def run(self, module: Any, moments: Tensor, draw: Draw) -> Values:  # type: ignore[override]
        """Return the normalised latent, as the denoiser expects it."""
        config = module.vae.config
        channels = getattr(config, "z_dim", None) or config.latent_channels
        if len(moments) == channels:  # the latent itself
            return {"latents": normalise_latent(moments, config)}
        noise = draw("posterior", (len(moments) // 2, *moments.shape[1:]))
        return {"latents": normalise_latent(draw_latent(moments[None], noise[None])[0], config)}


def normalise_latent(raw: Tensor, config: Any) -> Tensor:
    """Return a latent [C, ...] normalised by ``latents_mean`` and ``latents_std`` of the VAE's config, if it has them,
    or by ``scaling_factor`` and ``shift_factor``; a config with neither leaves it as it is.
    """
    names = ("latents_mean", "latents_std", "scaling_factor", "shift_factor")
    return LatentScale.of_config({name: getattr(config, name, None) for name in names}).normalise(raw[None])[0]
