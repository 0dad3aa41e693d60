"""What a denoiser is trained for: named losses of every sample, from one prediction or several."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from sd3_light.core.batch import Batch


@dataclass(frozen=True)
class Prediction:
    """The result of a denoiser's pass over a batch.

    ``features`` are the image tokens [B, N, D] after chosen blocks, counted from 1. ``extras`` are a family's own.
    """

    velocity: Tensor
    features: Mapping[int, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Tensor] = field(default_factory=dict)


class Predicts(Protocol):
    """A model as an objective sees it."""

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """Run the denoiser; ``taps`` are the blocks whose features are returned."""


class Objective(ABC):
    """A training loss: the sum of ``weights[NAME]`` times the mean of each of its `losses`, in this order.

    ``taps`` are the blocks whose features it reads.
    """

    weights: Mapping[str, float]
    taps: tuple[int, ...] = ()

    @abstractmethod
    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """Return the losses of every sample, NAME -> [B], from one prediction."""

    def __call__(self, model: Predicts, batch: Batch) -> dict[str, Tensor]:
        """Return the losses of every sample; objectives of several passes override it, and run in no pipeline."""
        return self.losses(model.predict(batch, self.taps), batch)


class Objectives(Objective):
    """The sum of several objectives that share one prediction."""

    def __init__(self, parts: Sequence[Objective]) -> None:
        self.parts = tuple(parts)
        self.weights = {name: weight for part in parts for name, weight in part.weights.items()}
        self.taps = tuple(sorted({tap for part in parts for tap in part.taps}))

    def losses(self, out: Prediction, batch: Batch) -> dict[str, Tensor]:
        """See `Objective.losses`."""
        return {name: each for part in self.parts for name, each in part.losses(out, batch).items()}
