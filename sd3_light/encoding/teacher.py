"""A vision model's features of images, as a cache stores them for [objective.alignment].

They are resampled to the denoiser's tokens and normalised over each image (iREPA, arXiv 2512.10794), wide ones
projected by fixed random directions, which keep angles on average. A token's features are scaled to int8 by their
largest: only their direction is compared.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel

from sd3_light.config.faults import UserError
from sd3_light.config.schema_objective import LARGEST_WIDTH
from sd3_light.model.part_configs import load_part
from sd3_light.model.vision import VisionSettings, feature_width, vision_settings

_SEED = 0  # of the projection, which all caches share
_EPSILON = 1e-6
_LEVELS = 127  # of int8


class VisionTeacher(nn.Module):
    """Maps pixels to features on a grid; see `teacher_features`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.settings: VisionSettings = vision_settings(folder)
        model = load_vision_model(self.settings.folder)
        self.model = getattr(model, "vision_model", model)
        self.width = feature_width(self.settings.folder)
        self.register_buffer("projection", projection(self.width))

    def forward(self, pixels_BHWC: Tensor, grid: tuple[int, int], flip: bool = False) -> Tensor:
        """Return features [B, D, h, w] in float32 of pixels [B, H, W, 3], with ``flip`` of the mirrored images."""
        pixels = pixels_BHWC.flip(2) if flip else pixels_BHWC
        settings = self.settings
        cells_BDHW = self._cells(scaled_pixels(pixels, settings.side, settings.mean, settings.std))
        resampled = functional.interpolate(cells_BDHW, grid, mode="bilinear", antialias=True, align_corners=False)
        normalised = spatially_normalised(resampled)
        matrix: Any = self.projection
        return normalised if matrix is None else torch.einsum("bdhw,dk->bkhw", normalised, matrix)

    def _cells(self, pixels_BCHW: Tensor) -> Tensor:
        """Return the features of the model's own cells [B, D, h, w]: patches, or those of the last stage but one."""
        out = self.model(pixel_values=pixels_BCHW, output_hidden_states=True)
        tokens: Tensor = out.last_hidden_state
        if tokens.dim() == 4:
            tokens = out.hidden_states[-2]
        else:
            side = int(self.settings.side // self.model.config.patch_size)
            tokens = tokens[:, -side * side :].transpose(1, 2).unflatten(2, (side, side))  # after class and registers
        if tokens.shape[1] != self.width:
            folder = self.settings.folder
            raise UserError(f"{folder} has features of {tokens.shape[1]}, its config says {self.width}; give another")
        return tokens.float()


def projection(width: int) -> Tensor | None:
    """Return orthonormal random directions [width, `LARGEST_WIDTH`] for wide features; None for others."""
    if width <= LARGEST_WIDTH:
        return None
    generator = torch.Generator().manual_seed(_SEED)
    normals = torch.randn(width, LARGEST_WIDTH, generator=generator, dtype=torch.float64)
    directions: Tensor = torch.linalg.qr(normals)[0]
    return directions.float()


def spatially_normalised(features_BDHW: Tensor) -> Tensor:
    """Return features without the mean of each image, and with deviation 1 over it: where things are is left."""
    mean = features_BDHW.mean((2, 3), keepdim=True)
    deviation = features_BDHW.std((2, 3), keepdim=True, correction=0)
    return (features_BDHW - mean) / (deviation + _EPSILON)


def quantised(features_BDHW: Tensor) -> Tensor:
    """Return each token's features as int8, relative to their largest."""
    largest = features_BDHW.abs().amax(1, keepdim=True).clamp(min=_EPSILON)
    return (features_BDHW / largest * _LEVELS).round().to(torch.int8)


def load_vision_model(folder: Path) -> Any:
    """Load a vision model or a dual encoder in float32 from safetensors; nothing in the folder is executed."""
    model = load_part(AutoModel, folder, dtype=torch.float32, trust_remote_code=False)
    return model.eval().requires_grad_(False)


def scaled_pixels(pixels_BHWC: Tensor, side: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return uint8 pixels [B, H, W, 3] as a vision model's square inputs [B, 3, side, side]."""
    pixels = pixels_BHWC.permute(0, 3, 1, 2).float()
    if pixels.shape[2:] != (side, side):
        pixels = functional.interpolate(pixels, (side, side), mode="bilinear", antialias=True, align_corners=False)
        pixels = pixels.round().clamp(0, 255)
    shift, scale = (torch.tensor(values, device=pixels.device)[:, None, None] for values in (mean, std))
    return (pixels / 255 - shift) / scale
