"""Latents as tokens of whole patches, as Flux and its relatives take them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sd3_light.config.faults import UserError


def pack_latents(latents_BCHW: Tensor, patch_size: int = 2) -> Tensor:
    """Return tokens [B, (H / p) (W / p), C p p], one per patch of p x p latent pixels, as Flux and Qwen-Image do."""
    height, width = latents_BCHW.shape[-2:]
    if height % patch_size or width % patch_size:
        raise UserError(
            f"latents of {height} x {width} cannot be packed into patches of {patch_size}; crop the images so that "
            "their sides are multiples of the VAE's factor times the patch size"
        )
    patches: Tensor = latents_BCHW.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))  # [B, C, h, p, w, p]
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack_latents(tokens: Tensor, height: int, width: int, patch_size: int = 2) -> Tensor:
    """Return the latents [B, C, height, width] of packed tokens."""
    patches = tokens.unflatten(2, (-1, patch_size, patch_size)).unflatten(1, (height // patch_size, -1))
    latents: Tensor = patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
    assert latents.shape[-2:] == (height, width), (tokens.shape, height, width)
    return latents


def grid_positions(sides: Sequence[int], device: torch.device) -> Tensor:
    """Return the positions [N, axes] of tokens in a grid with these sides, the last axis first to change."""
    return torch.cartesian_prod(*(torch.arange(side, device=device) for side in sides))
