"""A family's own kernels in place of the stock blocks: whether they run on this process's device."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from sd3_light.config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch import nn


class FastBlocks(ABC):
    """See `Cost.why_stock` for what a config rules out."""

    @abstractmethod
    def why_not(self, config: TrainConfig, device: "torch.device", denoiser: "nn.Module | None") -> str | None:
        """Return why this device, or this denoiser if it is known, runs the stock blocks; None: it need not."""

    @abstractmethod
    def kernel_problem(
        self, config: TrainConfig, device: "torch.device", denoiser: "nn.Module", fp8: bool
    ) -> str | None:
        """Return what is wrong with the kernels on this device, in a test of a few seconds; None if nothing is."""
