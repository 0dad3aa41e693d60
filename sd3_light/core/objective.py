"""What a denoiser is trained for: named losses of every sample, from one prediction or several.

An objective may read features of chosen blocks, run heads on them, compare with a teacher, train other networks, and
draw its own batches. Engines know none of this: they call `TrainedModel`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch

Value = TypeVar("Value")
Teacher = Literal["start", "average"] | Path
"""A model to compare with: the start (the denoiser without its adapter, or a frozen copy), the run's main average, or
the denoiser of another folder of the same family."""


@dataclass(frozen=True)
class Prediction:
    """The result of a denoiser's pass over a batch.

    ``features`` are the image tokens [B, N, D] after chosen blocks, counted from 1; of a block that tokens skip
    (routing) only those that run through it. ``extras`` are a family's own.
    """

    velocity: Tensor
    features: Mapping[int, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Network:
    """A network in float32 that is trained beside the denoiser by its own AdamW, every ``every`` steps.

    Every process holds all of it. It is part of checkpoints, and of no average or export.
    """

    module: nn.Module
    lr: float
    every: int = 1
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0


class Predicts(Protocol):
    """A model in a pass with gradients, as an objective sees it."""

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """Run the denoiser; ``taps`` are the blocks whose features are returned."""


class Observes(Protocol):
    """A model before a pass, as an objective sees it: without gradients. ``step`` counts the steps done."""

    @property
    def step(self) -> int:
        """The number of steps before this one."""

    @property
    def steps(self) -> int | None:
        """The number of steps of the whole run; None if it is not known."""

    def infer(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """Run the denoiser as it is now."""

    def teach(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """Run the objective's teacher."""

    def first(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """Run the denoiser as it was at the start of the run."""

    def without_text(self, batch: Batch) -> Batch:
        """Return the batch with the text of guidance without a prompt in place of the prompts."""


class Model(Predicts, Observes, Protocol):
    """A model as an objective sees it in validation."""


class Objective(ABC):
    """A training loss: the sum of ``weights[NAME]`` times the mean of each of its `losses`, in this order.

    ``taps`` are the blocks whose features it reads, and ``reads`` columns of the cache that it needs beside those of
    the family: a column ``moments.NAME`` arrives as ``noisy.NAME`` and ``target.NAME``, with the noise and the time of
    the sample's own latents, and others as they are. ``words`` are the sample's `randomness.occurrence_words`, for
    further draws. ``heads`` are trained beside the denoiser by the run's optimizer; they are part of checkpoints,
    and of no average or export. ``networks`` have separate optimizers. ``teacher`` is the model of
    `Observes.teach`; with ``keeps_start`` the start is kept beside it, for `Observes.first`.
    """

    weights: Mapping[str, float]
    taps: tuple[int, ...] = ()
    reads: tuple[str, ...] = ()
    heads: Mapping[str, nn.Module] = MappingProxyType({})
    networks: Mapping[str, Network] = MappingProxyType({})
    teacher: Teacher | None = None
    keeps_start: bool = False

    @abstractmethod
    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """Return the losses of every sample, NAME -> [B], from one prediction."""

    def __call__(self, model: Predicts, batch: Batch) -> dict[str, Tensor]:
        """Return the losses of every sample; objectives of several passes override it."""
        return self.losses(model.predict(batch, self.taps), batch)

    def draw(self, model: Observes, batch: Batch) -> Batch:
        """Return the batch of a pass: with a teacher's predictions, or one that the run draws itself.

        It must depend on its arguments and ``model.step`` alone, so that a resumed run draws the same. ``t`` may become
        one time per token [B, N].
        """
        return batch

    def network_losses(self, model: Observes, batch: Batch) -> dict[str, Tensor]:
        """Return the losses [B] of the ``networks`` by name, on the batch that `draw` returned."""
        return {}

    def evaluate(self, model: Model, batch: Batch) -> Tensor:
        """Return the validation loss [B] of an objective that draws its batches, on one that is not drawn."""
        return next(iter(self(model, batch).values()))

    def head(self, name: str, tokens: Tensor) -> Any:
        """Run a head on features, in bfloat16 where the denoiser or the head's gathered weights are."""
        module = self.heads[name]
        is_half = torch.bfloat16 in (tokens.dtype, *(weight.dtype for weight in module.parameters()))
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=is_half):
            return module(tokens)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """What it must remember between steps: tensors by name, equal in every process, which checkpoints have."""
        return {}

    @property
    def draws(self) -> bool:
        """Whether something happens before a pass."""
        return type(self).draw is not Objective.draw or bool(self.networks)

    def why_whole(self) -> str | None:
        """Return why every process needs the whole model at once, so that pipelines cannot run it; None if not."""
        reasons = {
            "heads": bool(self.heads),
            "other networks": bool(self.networks),
            "a teacher": self.teacher is not None,
            "features of blocks": bool(self.taps),
            "its own batches": self.draws,
            "several passes": type(self).__call__ is not Objective.__call__,
        }
        return next((reason for reason, applies in reasons.items() if applies), None)


class Objectives(Objective):
    """The sum of several objectives, which share the prediction of the batch."""

    def __init__(self, parts: Sequence[Objective]) -> None:
        self.parts = tuple(parts)
        self.weights = _joined("losses", [part.weights for part in parts])
        self.taps = tuple(sorted({tap for part in parts for tap in part.taps}))
        self.reads = tuple(dict.fromkeys(name for part in parts for name in part.reads))
        self.heads = _joined("heads", [part.heads for part in parts])
        self.networks = _joined("networks", [part.networks for part in parts])
        teachers = list(dict.fromkeys(part.teacher for part in parts if part.teacher is not None))
        if len(teachers) > 1:
            names = " and ".join(map(str, teachers))
            raise UserError(f"an objective has one teacher, not {names}; keep one")
        self.teacher = teachers[0] if teachers else None
        self.keeps_start = any(part.keeps_start for part in parts)

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.losses`."""
        return {name: each for part in self.parts for name, each in part.losses(out, batch).items()}

    def __call__(self, model: Predicts, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.__call__`."""
        shared = _SharedPass(model, batch, self.taps)
        return {name: each for part in self.parts for name, each in part(shared, batch).items()}

    def draw(self, model: Observes, batch: Batch) -> Batch:
        """See `Objective.draw`."""
        for part in self.parts:
            batch = part.draw(model, batch)
        return batch

    def network_losses(self, model: Observes, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.network_losses`."""
        return {name: each for part in self.parts for name, each in part.network_losses(model, batch).items()}

    def evaluate(self, model: Model, batch: Batch) -> Tensor:
        """See `Objective.evaluate`."""
        return self.parts[0].evaluate(model, batch)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """See `Objective.state`."""
        return _joined("state", [part.state for part in self.parts])

    @property
    def draws(self) -> bool:
        """See `Objective.draws`."""
        return any(part.draws for part in self.parts)

    def why_whole(self) -> str | None:
        """See `Objective.why_whole`."""
        return next((reason for part in self.parts if (reason := part.why_whole())), None)


class _SharedPass:
    """A model whose prediction of one batch is computed once, with the features that all objectives read."""

    def __init__(self, model: Predicts, batch: Batch, taps: Sequence[int]) -> None:
        self._model = model
        self._batch = batch
        self._taps = taps
        self._out: Prediction | None = None

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """See `Predicts.predict`."""
        if batch is not self._batch:
            return self._model.predict(batch, taps)
        if self._out is None:
            self._out = self._model.predict(batch, self._taps)
        return self._out


def _joined(kind: str, tables: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Return one table of several, whose names must differ."""
    joined: dict[str, Value] = {}
    for table in tables:
        for name, value in table.items():
            if name in joined:
                raise UserError(f"two objectives have {kind} of the name {name!r}; rename one")
            joined[name] = value
    return joined
