"""What an engine trains: a denoiser with its loss, behind one module."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from sd3_light.core.batch import Batch

Losses = dict[str, Tensor]
"""``loss`` with its gradient, its parts by name, and ``each``: the flow loss of every sample [B]."""


class StepDropout(Protocol):
    """Dropout that is a function of the step: see `model.adapter_layers.AdapterDropout`."""

    def begin(self, step: int) -> None:
        """Start the micro-batches of ``step``."""

    def forward(self, device: torch.device, layer: int | None = None) -> None:
        """Seed this micro-batch's dropout."""


class TrainedModel(nn.Module):
    """Batch in, losses out. Every engine holds one, whatever the family.

    Weights have the names of the stock denoiser, in checkpoints and exports alike.
    """

    denoiser: nn.Module
    dropout: StepDropout | None = None
    """The dropout of an adapter on the denoiser."""

    @property
    @abstractmethod
    def loss_names(self) -> tuple[str, ...]:
        """The names of a micro-batch's losses besides ``each``, in order."""

    @abstractmethod
    def forward(self, batch: Batch) -> Losses:
        """Return the loss with its gradient, and its parts and ``each`` without."""

    @abstractmethod
    def denoise(self, batch: Batch) -> Tensor:
        """Return the velocity in float32, computed as in training; the caller enables or disables grad."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return what trains, by its name in the stock denoiser."""
        return {name: weight for name, weight in self.denoiser.named_parameters() if weight.requires_grad}

    def blocks(self) -> Sequence[nn.Module]:
        """Return the blocks that are computed one after another: what is compiled, sharded and checkpointed."""
        return denoiser_blocks(self.denoiser)

    def pipeline_layers(self) -> Sequence[nn.Module]:
        """Return the layers as modules that run one after another, in several processes, as in `forward`."""
        raise NotImplementedError(f"{type(self).__name__} has no layers for a pipeline")


def denoiser_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """Return the blocks of a denoiser in their order: the members of its lists of blocks.

    A block is a member of a `ModuleList` with two or more linear layers; lists inside blocks do not count.
    """
    lists = [child for parent in block_parents(denoiser) for child in parent.children() if is_block_list(child)]
    return [block for modules in lists for block in modules.children()]


def block_parents(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules with a list of blocks."""
    if any(is_block_list(child) for child in module.children()):
        yield module
    else:
        for child in module.children():
            yield from block_parents(child)


def is_block_list(module: nn.Module) -> bool:
    """Return whether a module is a list of blocks."""

    def is_block(member: nn.Module) -> bool:
        return sum(isinstance(layer, nn.Linear) for layer in member.modules()) >= 2

    return isinstance(module, nn.ModuleList) and any(is_block(member) for member in module)
