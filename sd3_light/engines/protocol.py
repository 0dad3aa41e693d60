"""The protocol between an engine and the training loop and checkpoints."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch
from sd3_light.flow.objective import NUM_BANDS
from sd3_light.optim.build import Optimizer
from sd3_light.optim.chunks import Tensors

if TYPE_CHECKING:
    from sd3_light.engines.networks import Networks

MicroBatch = Batch
StepStream = Generator[Sequence[MicroBatch], None, None]
"""Yields the micro-batches of each optimizer step; closing it also closes their source."""

PARAM_KIND = "param"
"""The kind under which a checkpoint stores the weights themselves."""


@dataclass(frozen=True)
class StepNumbers:
    """One optimizer step: losses (means over micro-batches and ranks), gradient norm, and whether it was taken.

    A step with a non-finite loss or gradient is skipped. ``bands`` are sums of the sample losses per band of timesteps
    and ``band_counts`` the number of samples per band, both divided by the number of micro-batches and ranks.
    """

    losses: dict[str, float]
    grad_norm: float
    taken: bool
    bands: tuple[float, ...] = (0.0,) * NUM_BANDS
    band_counts: tuple[float, ...] = (0.0,) * NUM_BANDS


class HostCopy:
    """Numbers that are copied from the device asynchronously: only `read` waits for them, not for later work."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(numbers.device))
        else:
            self._host = numbers

    @property
    def ready(self) -> bool:
        """Whether `read` would return without waiting."""
        return self._event is None or self._event.query()

    def seconds_since(self, earlier: "HostCopy") -> float | None:
        """Return the device's seconds between two copies that have arrived; None on a CPU."""
        if self._event is None or earlier._event is None:
            return None
        return float(earlier._event.elapsed_time(self._event)) / 1000

    def read(self) -> Any:
        """Return a list, or a float for a single number, waiting for the device if necessary."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


class StepResult(HostCopy):
    """A step's numbers; ``seconds_since`` counts from the end of an earlier step."""

    def __init__(self, names: Sequence[str], numbers: Tensor) -> None:
        super().__init__(numbers)
        self.names = tuple(names)
        self.first = numbers[0]
        """The first loss, on the device."""

    @staticmethod
    def pack(losses: Tensors, bands: Tensor) -> Tensor:
        """Pack losses and bands into one vector, so that ranks sum them in one collective."""
        return torch.cat([torch.stack([loss.detach().float() for loss in losses.values()]), bands.flatten()])

    def read(self) -> StepNumbers:
        """Return the numbers, waiting for the device if necessary."""
        *values, grad_norm, taken = super().read()
        count = len(self.names)
        bands = values[count : count + NUM_BANDS]
        counts = values[count + NUM_BANDS :]
        losses = dict(zip(self.names, values[:count], strict=True))
        return StepNumbers(losses, grad_norm, bool(taken), tuple(bands), tuple(counts))


@dataclass(frozen=True)
class TensorPiece:
    """A flat part of one tensor of the run that this rank holds.

    ``values`` is a 1-D view of live memory: elements ``start`` to ``start + len(values)`` of a tensor of ``shape``.
    Among replicas only one ``writes``. The name is ``KIND/NAME`` with the stock denoiser's parameter name. ``hosted``:
    it is in host memory, too large for a copy, and changes with the next step.
    """

    name: str
    values: Tensor
    start: int
    shape: tuple[int, ...]
    writes: bool = True
    hosted: bool = False


ToHost = Callable[[str, Tensor], Tensor]
"""Returns a copy of a named tensor in host memory."""


def to_host(name: str, tensor: Tensor) -> Tensor:
    """Return a copy in host memory, in float32."""
    return tensor.to("cpu", torch.float32, copy=True)


class Engine(Protocol):
    """Runs steps and exposes its part of the weights and optimizer state by canonical name.

    ``weights`` are this rank's part of the trainable weights, live, by the stock denoiser's parameter names;
    ``shapes`` are the full shapes of all trainable weights of the model. Ranks 0 to ``writers`` - 1 write their pieces
    of a checkpoint. ``sequential_micro_batches``: the engine takes a step's micro-batches one after another and needs
    at most two of them on the device at a time. ``networks`` is None if the objective does nothing before a pass.
    """

    rank: int
    world_size: int
    writers: int
    sequential_micro_batches: bool
    optimizer: Optimizer
    weights: Tensors
    shapes: Mapping[str, tuple[int, ...]]
    networks: "Networks | None" = None

    @property
    def updates_started(self) -> int:
        """How often the optimizer began to change weights. If a failed step raised it, weights may be inconsistent."""
        return self.optimizer.updates_started

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Run one optimizer step over equally sized micro-batches."""

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Return [sum of the sample flow losses, number of samples, sum of squares] of this rank's micro-batch."""

    def sum_over_ranks(self, numbers: Tensor) -> Tensor:
        """Sum numbers over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(numbers)
        return numbers

    def weight_norm(self) -> Tensor:
        """Return the norm over all trainable weights, on the device."""

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield this rank's part of weights and optimizer state; copying into the values loads a checkpoint."""

    def weight_pieces(self) -> Iterator[TensorPiece]:
        """Yield the weights of `pieces` alone."""
        yield from self.like_weights(PARAM_KIND, self.weights)
        if self.networks is not None:
            yield from self.networks.weights()

    def like_weights(self, kind: str, held: Tensors) -> Iterator[TensorPiece]:
        """Yield the pieces of tensors laid out like the weights, such as their averages; they may be of some only."""

    def gather(self, held: Tensors, to_host: ToHost = to_host) -> dict[str, Tensor] | None:
        """Return tensors laid out like the weights, gathered in rank 0's host memory; None on other ranks.

        ``to_host(name, tensor)`` makes the copy of each. All ranks must call it.
        """

    def denoise(self, batch: Batch) -> Tensor:
        """Return the predicted velocity, for sampling; all ranks must call it equally often."""


def loss_sums(each: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return [sum of the sample losses, number of samples, sum of squares] in float64; padding has weight 0."""
    each = each.double()
    weight = torch.ones_like(each) if weight is None else weight.double()
    return torch.stack([(each * weight).sum(), weight.sum(), (each.square() * weight).sum()])


def require_gradients(missing: Iterable[str]) -> None:
    """Raise a `UserError` about the first of the weights that a backward pass did not reach."""
    for name in missing:
        raise UserError(
            f"no gradient reached {name} of the denoiser; use it in denoise, or freeze it with requires_grad_(False)"
        )


def norms(tensors: Iterable[Tensor]) -> Sequence[Tensor]:
    """Return the norm of each tensor, in float32."""
    parts = list(tensors)
    dtype = None if all(part.dtype == torch.float32 for part in parts) else torch.float32
    return torch._foreach_norm(parts, dtype=dtype)


def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements."""
    return torch.stack(tuple(norms(tensors))).square().sum()


def assign_writers(sizes: Sequence[int], writers: int) -> list[int]:
    """Return which rank writes each of the tensors that several ranks hold as equal copies, balanced by size.

    Each, largest first, goes to the least loaded writer.
    """
    totals = [(0, writer) for writer in range(writers)]
    heapify(totals)
    assigned = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):  # stable: ties keep their order
        total, writer = totals[0]
        assigned[number] = writer
        heapreplace(totals, (total + sizes[number], writer))
    return assigned
