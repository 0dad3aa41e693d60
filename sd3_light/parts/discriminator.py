"""The adversary of the VAE: says for each patch of an image whether it is real."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Discriminator(nn.Sequential):
    """Strided convolutions; one score per patch of 16 pixels, above 0 for real ones."""

    def __init__(self, seed: int, width: int = 48) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
            for _ in range(3):
                layers += [nn.Conv2d(width, 2 * width, 4, 2, 1), nn.GroupNorm(8, 2 * width), nn.LeakyReLU(0.2)]
                width *= 2
            super().__init__(*layers, nn.Conv2d(width, 1, 3, 1, 1))


def frozen_call(module: nn.Module, images: Tensor) -> Any:
    """Call a module so that gradients reach its input and not its weights."""
    return functional_call(module, {name: value.detach() for name, value in module.named_parameters()}, (images,))
