"""The memory of a model that draws images with all of its parts: text encoders, denoiser and VAE."""

from collections.abc import Mapping

from sd3_light.cost.amount import GIB

RESERVE = GIB
"""Margin for library buffers and fragmentation."""
BYTES_PER_PIXEL = 4096
"""Peak activations of SD3's VAE: eight maps of 128 channels in float32, including kernel workspaces."""
LARGEST_IMAGE_PIXELS = 1024 * 1024
"""A batch has at least one image; memory is reserved for one of this size."""


def drawing_bytes(weights: Mapping[str, int], item_bytes: int, on_gpu: bool = True, kept: int = 0) -> int:
    """Return the bytes of parts by their number of weights: the VAE in float32, others with ``item_bytes`` per weight.

    ``kept`` weights of the denoiser are in float32 too. On a GPU the bytes include activations of the VAE and a margin.
    """
    total = sum(count * (4 if name == "vae" else item_bytes) for name, count in weights.items())
    total += kept * (4 - item_bytes)
    return total + (LARGEST_IMAGE_PIXELS * BYTES_PER_PIXEL + RESERVE if on_gpu else 0)
