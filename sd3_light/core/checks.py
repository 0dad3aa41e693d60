"""What `check` and `new` ask a family about a model folder. Only configs and headers are read."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sd3_light.config import Fault, ModelConfig, TrainConfig
from sd3_light.core.start import WeightsStart


class ModelFact(NamedTuple):
    """A number about the weights that `check` shows: its name, the value, what it means, and a summary (or nothing)."""

    name: str
    value: str
    meaning: str
    summary: str = ""


class ModelChecks(ABC):
    """The faults of a model folder and of the keys that describe it; a fault's file is left empty."""

    @abstractmethod
    def folder_faults(self, model: ModelConfig) -> Iterator[Fault]:
        """Yield what is missing or damaged in `diffusers_path`; its denoiser counts only if weights start there."""

    @abstractmethod
    def has_size(self, model: ModelConfig) -> bool:
        """Return whether the files exist that determine the size of the denoiser."""

    @abstractmethod
    def encoder_faults(self, model: ModelConfig, start: WeightsStart | None) -> Iterator[Fault]:
        """Yield what is wrong with text encoders and VAE, alone and for the denoiser, if that is known."""

    @abstractmethod
    def key_faults(self, train: TrainConfig, start: WeightsStart) -> Iterator[Fault]:
        """Yield the keys of [model] and [objective] that do not describe the weights."""

    def largest_side(self, start: WeightsStart, model: ModelConfig) -> int | None:
        """Return the pixels at which the denoiser's position table ends; None if it has no table."""
        return None

    def side_step(self, model: ModelConfig) -> int:
        """Return the number of pixels that sides of images are multiples of."""
        return 16

    @abstractmethod
    def facts(self, start: WeightsStart) -> tuple[ModelFact, ...]:
        """Return what `check` shows about the weights, beside their number."""

    @abstractmethod
    def trained_side(self, folder: Path) -> int:
        """Return the side in pixels of the images that the denoiser of a model folder was trained on."""

    @abstractmethod
    def text_limit(self, folder: Path) -> int | None:
        """Return the largest `t5_max_length` that the tokenizer of a model folder allows; None: any."""


def model_fault(key: str, problem: str, value: object = None, hint: str | None = None) -> Fault:
    """Return a fault of a config key, without its file."""
    return Fault("", key, problem, None if value is None else str(value), hint=hint)
