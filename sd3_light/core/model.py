"""What an engine trains: a denoiser with its loss, behind one module."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from sd3_light.core.batch import Batch
from sd3_light.core.objective import Objective, Prediction

Losses = dict[str, Tensor]
"""``loss`` with its gradient, its parts by name, and ``each``: the first of them for every sample [B].

A model whose batches have no times returns them as ``t``.
"""


class StepDropout(Protocol):
    """Dropout that is a function of the step: see `model.adapter_layers.AdapterDropout`."""

    def begin(self, step: int) -> None:
        """Start the micro-batches of ``step``."""

    def forward(self, device: torch.device, layer: int | None = None) -> None:
        """Seed this micro-batch's dropout."""


class TrainedModel(nn.Module):
    """A denoiser with its objective: batch in, losses out. Every engine holds one, whatever the family.

    Weights have the names of the stock denoiser, in checkpoints and exports alike. A family's own model defines
    `predict`. ``dropout`` is that of an adapter on the denoiser. ``has_layers``: it has `pipeline_layers`.
    """

    compute_dtype: torch.dtype = torch.float32
    has_layers = False

    def __init__(self, denoiser: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.objective = objective
        self.dropout: StepDropout | None = None

    @abstractmethod
    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """Run the denoiser as in training; ``taps`` are the blocks whose features are returned."""

    @property
    def loss_names(self) -> tuple[str, ...]:
        """The names of a micro-batch's losses besides ``each``, in order."""
        return ("loss", *self.objective.weights)

    def forward(self, batch: Batch) -> Losses:
        """Return the loss with its gradient, and its parts and ``each`` without."""
        return self.total(self.objective(self, batch))

    def total(self, each: Mapping[str, Tensor]) -> Losses:
        """Return the losses of `forward` from those of every sample."""
        weights = self.objective.weights
        assert list(each) == list(weights), (list(each), list(weights))
        means = {name: values.mean() for name, values in each.items()}
        loss = sum(weights[name] * mean for name, mean in means.items())
        assert isinstance(loss, Tensor), "an objective has at least one loss"
        first = next(iter(each.values()))
        return {"loss": loss, **{name: mean.detach() for name, mean in means.items()}, "each": first.detach()}

    def denoise(self, batch: Batch) -> Tensor:
        """Return the velocity in float32, computed as in training; the caller enables or disables grad."""
        return self.predict(batch).velocity.float()

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


def compile_blocks(denoiser: nn.Module) -> None:
    """Compile each block in place; blocks of the same shape share compiled code."""
    for block in denoiser_blocks(denoiser):
        block.compile()
