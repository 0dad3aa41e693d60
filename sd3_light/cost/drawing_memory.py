"""The memory of a model that draws images with all of its parts: text encoders, denoiser and VAE."""

from pathlib import Path

from sd3_light.cost.amount import GIB
from sd3_light.model.folder import TRANSFORMER, components, stored_weights

RESERVE = GIB
"""Margin for library buffers and fragmentation."""
BYTES_PER_PIXEL = 4096
"""Peak activations of SD3's VAE: eight maps of 128 channels in float32, including kernel workspaces."""
LARGEST_IMAGE_PIXELS = 1024 * 1024
"""A batch has at least one image; memory is reserved for one of this size."""


def drawing_bytes(folder: Path, item_bytes: int, on_gpu: bool = True, denoiser: int | None = None) -> int:
    """Return the bytes of all parts of a model folder: the VAE in float32, others with ``item_bytes`` per weight.

    On a GPU they include activations of the VAE and a margin. ``denoiser`` counts the weights of a denoiser in place
    of the folder's own. Only headers are read.
    """
    counts = {name: sum(count for _, count in stored_weights(folder / name)) for name in components(folder)}
    if denoiser is not None:
        counts[TRANSFORMER.name] = denoiser
    weights = sum(count * (4 if name == "vae" else item_bytes) for name, count in counts.items())
    return weights + (LARGEST_IMAGE_PIXELS * BYTES_PER_PIXEL + RESERVE if on_gpu else 0)
