"""What denoisers that take whole patches as channels get and return: the tokens of images."""

import torch
from torch import Tensor

from sd3_light.core.batch import Batch, references
from sd3_light.flow.packing import pack_latents, unpack_latents


def packed_images(batch: Batch) -> Tensor:
    """Return the tokens of the noisy latents, then those of the references."""
    return torch.cat([pack_latents(image) for image in (batch["noisy"], *references(batch))], 1)


def unpacked_image(tokens: Tensor, batch: Batch) -> Tensor:
    """Return the latents whose tokens come first."""
    height, width = batch["noisy"].shape[-2:]
    return unpack_latents(tokens[:, : (height // 2) * (width // 2)], height, width)


def rounded_times(batch: Batch) -> Tensor:
    """Return the times of a batch, as the stock pipelines round them."""
    return (1000 * batch["t"]).to(batch["noisy"].dtype) / 1000
