"""The contract of a family in training: how its batches are prepared, how its denoiser is trained, its own kernels."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from sd3_light.config import TrainConfig
from sd3_light.core.start import WeightsStart

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sd3_light.core.batch import Batch
    from sd3_light.core.model import TrainedModel


class Preparer(Protocol):
    """Turns cached rows into batches, with random draws per sample (law 1). Small: workers get a copy."""

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> "Batch":
        """Return noisy, t, the conditioning, target and, where there is one, mask.

        ``timestep_quantile`` makes a validation batch: that quantile of t for all samples, noise that depends on the
        sample alone, the posterior's mean and no dropout.
        """

    def prepare_into(self, batch: Any, empty: Any, timestep_quantile: float | None = None) -> "Batch":
        """Like `prepare_inputs`, with most of the bytes in memory that ``empty`` returns."""

    def prepare_clean(self, batch: Any, allocate: Any = None) -> "Batch":
        """Return moments, t, the conditioning, words and so on, to get noise later."""

    def add_noise(self, clean: "Batch", evaluation: bool = False) -> "Batch":
        """Return the batch of `prepare_inputs` for one of `prepare_clean`, both on the host."""

    def noise_adder(self, device: "torch.device") -> "Callable[[Batch], Batch]":
        """Return a function that turns a batch of `prepare_clean` on the device into one of `prepare_inputs`."""

    def resident(self, cache: Any, seed: int) -> "ResidentPreparer":
        """Return what prepares the same batches from a cache in memory; ``seed`` is that of the order."""


class ResidentPreparer(Protocol):
    """Prepares the batches of a `Preparer` from a cache in memory: the same numbers."""

    @property
    def preparer(self) -> Preparer:
        """The preparer whose batches these are."""

    def indices(self, picks: Any) -> "Batch":
        """Return where a batch's tensors are; caption, flip, time and text dropout are drawn per sample (law 1)."""

    def gather(self, batch: "Batch", empty: Any = None) -> "Batch":
        """Return a batch of `Preparer.prepare_clean` for indices; ``empty`` allocates its largest tensors."""


class TrainingParts(ABC):
    """What a run of the family needs beside its weights."""

    @abstractmethod
    def preparer(self, config: TrainConfig, start: WeightsStart, empty_text: "dict[str, Tensor] | None") -> Preparer:
        """Return what turns cached rows into batches; ``empty_text`` are the features of the empty caption."""

    @abstractmethod
    def model(self, denoiser: "nn.Module", config: TrainConfig, fast: bool) -> "TrainedModel":
        """Return the denoiser with its loss; ``fast`` selects the family's own kernels."""


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
