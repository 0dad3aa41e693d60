"""What an engine trains: a denoiser with its loss, behind one module.

Its blocks are checkpointed, and tapped for their features.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch
from sd3_light.core.objective import Objective, Prediction

Value = TypeVar("Value")
HEADS = "heads."
"""Begins the names of weights that belong to the objective's heads."""
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

    Weights have the names of the stock denoiser, in checkpoints and exports alike, and those of the objective's heads
    begin with `HEADS`. A family's own model defines `predict`. ``dropout`` is that of an adapter on the denoiser,
    ``teacher`` the prediction of the objective's teacher, ``start`` that of the first weights, where an objective or an
    adapter keeps them. ``empty_text`` replaces a batch's text by that of guidance. ``release`` frees weights that an
    engine gathered for a pass of `infer`; ``restore`` puts the run's own weights back where a teacher left others
    while the model ``is_drawing``. Samples are drawn inside of ``as_exported``, without what training alone has.
    ``step`` counts the steps done, ``steps`` those of the whole run. With a ``text_step`` real text is padded to
    multiples of it, where that changes no result: compiled blocks then see few shapes.
    """

    compute_dtype: torch.dtype = torch.float32

    def __init__(self, denoiser: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.dropout: StepDropout | None = None
        self.teacher: Callable[[Batch, Sequence[int]], Prediction] | None = None
        self.empty_text: Callable[[Batch], Batch] | None = None
        self.start: Callable[[Batch, Sequence[int]], Prediction] | None = None
        self.release: Callable[[], None] = lambda: None
        self.restore: Callable[[], None] = lambda: None
        self.is_drawing = False
        self.as_exported: Callable[[], AbstractContextManager[None]] = nullcontext
        self.step = 0
        self.steps: int | None = None
        self.text_step: int | None = None
        self.use(objective)

    def use(self, objective: Objective) -> None:
        """Train for this objective; call it before an engine takes the model."""
        self.objective = objective
        self.heads = nn.ModuleDict(dict(objective.heads))

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

    def begin(self, step: int) -> None:
        """Start a step; ``step`` counts those before it."""
        self.step = step
        if self.dropout is not None:
            self.dropout.begin(step)

    @torch.no_grad()
    def draw(self, batch: Batch) -> Batch:
        """Return the batch of a pass: see `Objective.draw`."""
        self.is_drawing = True
        try:
            return self.objective.draw(self, batch)
        finally:
            self.is_drawing = False
            self.restore()

    @torch.no_grad()
    def infer(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """Run the denoiser outside of `forward`, without gradients."""
        self.restore()
        return self.infer_in_place(batch, taps)

    @torch.no_grad()
    def infer_in_place(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """Run the denoiser with the weights that it holds now, without gradients."""
        out = self.predict(batch, taps)
        self.release()
        return out

    @torch.no_grad()
    def teach(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """Run the objective's teacher."""
        assert self.teacher is not None, f"the teacher of {type(self.objective).__name__} is not loaded"
        return self.teacher(batch, taps)

    def without_text(self, batch: Batch) -> Batch:
        """Return the batch with the text of guidance without a prompt in place of the prompts."""
        if self.empty_text is None:
            name = type(self.objective).__name__
            raise UserError(f"{name} needs the text of guidance, which only runs of a config have; use train.run")
        return self.empty_text(batch)

    @torch.no_grad()
    def first(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """Run the denoiser as it was at the start of the run."""
        assert self.start is not None, "the start is not kept"
        return self.start(batch, taps)

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the validation loss of every sample [B]: ``each``, unless the objective draws its batches."""
        return self.objective.evaluate(self, batch) if self.objective.draws else self.forward(batch)["each"]

    def denoise(self, batch: Batch) -> Tensor:
        """Return the velocity of the exported model in float32; the caller enables or disables grad."""
        with self.as_exported():
            return self.predict(batch).velocity.float()

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return what trains, by its name in the stock denoiser, then the heads."""
        named = [*self.denoiser.named_parameters(), *self.heads.named_parameters(HEADS.removesuffix("."))]
        return {name: weight for name, weight in named if weight.requires_grad}

    def blocks(self) -> Sequence[nn.Module]:
        """Return the blocks that are computed one after another: what is compiled, sharded and checkpointed."""
        return denoiser_blocks(self.denoiser)

    def recordable(self, batch: Batch) -> Batch:
        """Return a batch with the same losses whose work can be recorded: the host has no lengths of its texts, and few
        shapes recur."""
        return batch

    def pipeline_layers(self) -> Sequence[nn.Module]:
        """Return the layers as modules that run one after another, in several processes, as in `forward`."""
        raise NotImplementedError(f"{type(self).__name__} has no layers for a pipeline")


def of_denoiser(named: Mapping[str, Value]) -> dict[str, Value]:
    """Return what belongs to the denoiser: averages and exports have no heads."""
    return {name: value for name, value in named.items() if not name.startswith(HEADS)}


def denoiser_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """Return the blocks of a denoiser in their order: the members of its lists of blocks.

    A block is a member of a `ModuleList` with two or more linear layers; lists inside blocks do not count.
    """
    return [block for modules in block_lists(denoiser) for block in modules.children()]


def block_lists(module: nn.Module) -> list[nn.Module]:
    """Return the lists of blocks of a network, in their order."""
    return [child for parent in block_parents(module) for child in parent.children() if is_block_list(child)]


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


@contextmanager
def tapped(
    blocks: Sequence[nn.Module], taps: Sequence[int], image_tokens: Callable[[Any], Tensor]
) -> Iterator[dict[int, Tensor]]:
    """Keep the tokens after the blocks ``taps``, counted from 1, in the dictionary that the block gets.

    ``image_tokens`` takes a block's output. A block that a backward pass computes again is kept once.
    """
    features: dict[int, Tensor] = {}

    def keep(number: int, module: nn.Module, inputs: Any, output: Any) -> None:
        features.setdefault(number, image_tokens(output))

    handles = [blocks[number - 1].register_forward_hook(partial(keep, number)) for number in taps]
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().removeprefix("aten::")
    is_saved = name.startswith(("mm", "addmm", "bmm", "_scaled_dot_product", "torch_attn::_varlen_attn"))
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


save_products = partial(create_selective_checkpoint_contexts, _policy)
"""The `context_fn` of a checkpoint that keeps the results of matrix products and attention."""
