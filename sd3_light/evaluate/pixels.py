"""How close an image is to the true one by its pixels alone: no model is involved."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from sd3_light.sources.preprocess import Pixels

PIXEL_METRICS = ("psnr", "edges")
MAX_PSNR = 60.0
"""dB of equal images, so that means stay finite."""
_LUMA = torch.tensor((0.299, 0.587, 0.114), dtype=torch.float64)
_TOLERANCE = 64  # edges are blurred over this part of the longer side, so that a small shift costs little


def pixel_scores(images: Sequence[Pixels], truths: Sequence[Pixels]) -> dict[str, Tensor]:
    """Return PSNR and edge agreement of each image with its truth; an image of another size is scaled to it."""
    pairs = [(_scaled(image, truth), truth) for image, truth in zip(images, truths, strict=True)]
    values = [[psnr(*pair) for pair in pairs], [edge_agreement(*pair) for pair in pairs]]
    return {name: torch.tensor(column, dtype=torch.float64) for name, column in zip(PIXEL_METRICS, values, strict=True)}


def psnr(image: Pixels, truth: Pixels) -> float:
    """Return the peak signal-to-noise ratio in dB, at most `MAX_PSNR`."""
    error = float(np.square(image.astype(np.float64) - truth).mean()) / 255**2
    return float(-10 * np.log10(max(error, 10 ** (-MAX_PSNR / 10))))


def edge_agreement(image: Pixels, truth: Pixels) -> float:
    """Return the correlation of the strengths of edges: 1 for equal edges, about 0 for unrelated ones or none."""
    maps = torch.stack([_edges(image), _edges(truth)])
    centred = maps - maps.mean(1, keepdim=True)
    norms = centred.norm(dim=1)
    return float(centred[0] @ centred[1] / norms.prod()) if norms.min() > 1e-9 else 0.0


def _edges(pixels: Pixels) -> Tensor:
    """Return the length of the gradient of the brightness, slightly blurred, as a vector."""
    luma = torch.from_numpy(pixels.astype(np.float64)) @ _LUMA / 255
    down, right = torch.gradient(luma)
    radius = max(1, max(luma.shape) // _TOLERANCE)
    blurred = F.avg_pool2d(torch.hypot(down, right)[None, None], 2 * radius + 1, stride=1, padding=radius)
    return blurred.flatten()


def _scaled(image: Pixels, truth: Pixels) -> Pixels:
    if image.shape == truth.shape:
        return image
    size = (truth.shape[1], truth.shape[0])
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))
