"""What the loop and the checkpoint ask of an engine."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sd3_light.flow.bands import NUM_BANDS

MicroBatch = tuple[tuple[Any, ...], tuple[Any, ...]]
StepStream = Generator[Sequence[MicroBatch], None, None]
"""The micro-batches of one optimizer step after another; closing it lets go of who makes them."""

PARAM_KIND = "param"
"""The kind under which a checkpoint stores the weights themselves."""


@dataclass(frozen=True)
class StepNumbers:
    """One optimizer step: losses (means over micro-batches and ranks), gradient norm, and whether it was taken.

    A step whose loss or gradient is not finite is not taken. ``bands`` are the sums of the samples' losses by their
    time, and ``band_counts`` how many there were, both as shares of the step.
    """

    losses: dict[str, float]
    grad_norm: float
    taken: bool
    bands: tuple[float, ...] = (0.0,) * NUM_BANDS
    band_counts: tuple[float, ...] = (0.0,) * NUM_BANDS


class StepResult:
    """A step's numbers on their way from the device: nobody waits for them until they are read."""

    def __init__(self, names: Sequence[str], numbers: Tensor) -> None:
        self.names = tuple(names)
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))
        else:
            self._host = numbers

    @staticmethod
    def pack(losses: Mapping[str, Tensor], bands: Tensor) -> Tensor:
        """Losses and bands as one vector, so that ranks add them up at once."""
        return torch.cat([torch.stack([loss.detach().float() for loss in losses.values()]), bands.flatten()])

    @property
    def ready(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> StepNumbers:
        """The numbers; waits for the device where it must."""
        if self._event is not None:
            self._event.synchronize()
        *values, grad_norm, taken = self._host.tolist()
        count = len(self.names)
        bands, counts = values[count : count + NUM_BANDS], values[count + NUM_BANDS :]
        losses = dict(zip(self.names, values[:count], strict=True))
        return StepNumbers(losses, grad_norm, bool(taken), tuple(bands), tuple(counts))


@dataclass(frozen=True)
class TensorPiece:
    """A flat part of one tensor of the run that this rank holds.

    ``values`` is a 1-D view of live memory: elements ``start`` to ``start + len(values)`` of a tensor of ``shape``. Of
    replicas one ``writes``. The name is ``KIND/NAME`` with the stock denoiser's parameter name.
    """

    name: str
    values: Tensor
    start: int
    shape: tuple[int, ...]
    writes: bool = True


class Engine(Protocol):
    """Runs steps; shows what it holds of weights and optimizer state by canonical names.

    Ranks 0 to ``writers`` - 1 write their pieces of a checkpoint. ``sequential_micro_batches``: the engine takes a
    step's micro-batches one after another and needs at most two of them on the device at a time.
    """

    rank: int
    world: int
    writers: int
    sequential_micro_batches: bool

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """What this rank holds of the trainable float32 weights, live, by the stock denoiser's parameter names."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shape of every trainable weight of the model, whichever rank holds it."""

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """One optimizer step over equal micro-batches."""

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """[sum of the samples' flow losses, number of samples] of this rank's micro-batch; nothing is learned."""

    def sum_over_ranks(self, numbers: Tensor) -> Tensor:
        """Numbers of all ranks added up."""

    def weight_norm(self) -> float:
        """The norm over all trainable weights."""

    def pieces(self) -> Iterator[TensorPiece]:
        """This rank's part of weights and optimizer state; copying into them loads."""

    def like_weights(self, kind: str, held: Mapping[str, Tensor]) -> Iterator[TensorPiece]:
        """Pieces of tensors that lie as the weights do, such as an average of them."""

    def gather(self, held: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Tensors that lie as the weights do, brought together in rank 0's host memory; None elsewhere. All ranks
        call it."""

    def denoise(self, features: tuple[Tensor, ...]) -> Tensor:
        """The predicted velocity, for sampling; all ranks call it equally often."""
