"""The torch engine: one process, or several under torchrun with replicated (DDP) or sharded (FSDP2) weights."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd3_light.config import TrainConfig
from sd3_light.engines.launch import Launch
from sd3_light.engines.prefetch import to_device
from sd3_light.engines.protocol import PARAM_KIND, MicroBatch, StepResult, TensorPiece
from sd3_light.engines.weight_layouts import Replicas, Shards, WeightLayout
from sd3_light.engines.writers import assign_writers
from sd3_light.flow.bands import NUM_BANDS, sum_by_band
from sd3_light.optim.build import make_optimizer


class TorchEngine:
    """Trains float32 weights.

    ``module(features, label)`` returns losses with the key ``loss``, and under ``each`` the flow loss of every sample;
    its trainable parameters are those of ``module.transformer``, whose names are the canonical ones. A step with a
    non-finite loss or gradient is skipped; the device decides that without a synchronization. With replicated weights
    ranks 0 to ``writers`` - 1 share the writing of checkpoints.
    """

    sequential_micro_batches = True

    def __init__(
        self, module: nn.Module, config: TrainConfig, launch: Launch, device: torch.device, writers: int = 1
    ) -> None:
        self.rank, self.world, self.device = launch.rank, launch.world, device
        self.module: Any = module.to(device)
        self.clip = config.gradient_clipping
        bf16 = device.type == "cuda" and config.model.transformer_dtype == "bfloat16"
        self.layout: WeightLayout = (
            Shards(self.module, launch, device, bf16)
            if config.parallel == "fsdp2" and launch.world > 1
            else Replicas(self.module, launch, writers)
        )
        self.writers = self.layout.writers
        denoiser: Any = self.module.transformer
        self._parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in denoiser.named_parameters() if parameter.requires_grad
        }
        assert all(weight.dtype == torch.float32 for weight in self._parameters.values()), "weights must be float32"
        self.optimizer = make_optimizer(self._parameters, config.optimizer, device)
        self._weights = {name: self.layout.held(weight) for name, weight in self._parameters.items()}

    @staticmethod
    def engine_name(config: TrainConfig, launch: Launch) -> str:
        """Return a short name of engine and layout, for the log."""
        return f"torch {config.parallel}" if launch.world > 1 else "torch"

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """This process's part of the trainable float32 weights, live, by canonical name."""
        return self._weights

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The full shape of every trainable weight."""
        return {name: tuple(weight.shape) for name, weight in self._parameters.items()}

    @property
    def updates_started(self) -> int:
        """How often the optimizer began to change weights."""
        return self.optimizer.updates_started

    # --- steps ---------------------------------------------------------------------------------

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Run forward and backward over the micro-batches, clip by the global norm, and step."""
        self.optimizer.set_rate(lr)
        for weight in self._parameters.values():
            weight.grad = None
        numbers = torch.zeros((), device=self.device)
        names: tuple[str, ...] = ()
        shapes = set()
        for number, batch in enumerate(batches):
            features, label = to_device(batch, self.device)
            shapes.add(tuple(features[0].shape))
            assert len(shapes) == 1, "micro-batches of a step must be equal"
            with self.layout.accumulating(last=number == len(batches) - 1):
                losses: dict[str, Tensor] = dict(self.layout.run(features, label))
                (losses["loss"] / len(batches)).backward()
            bands = _bands(losses.pop("each", None), features, self.device)
            names = tuple(losses)
            numbers = numbers + StepResult.pack(losses, bands) / len(batches)
        return self._finish_step(names, self.sum_over_ranks(numbers) / self.world)

    def _finish_step(self, names: tuple[str, ...], numbers: Tensor) -> StepResult:
        norm = self._clipped_norm()
        finite = torch.isfinite(numbers[: len(names)]).all() & torch.isfinite(norm)
        self.optimizer.step(skip=(~finite).float())
        return StepResult(names, torch.cat([numbers, norm.float().view(1), finite.float().view(1)]))

    def _clipped_norm(self) -> Tensor:
        """Clip the gradients and return their global norm before clipping."""
        missing = [name for name, weight in self._parameters.items() if weight.grad is None]
        assert not missing, f"no gradient reached {missing[:3]}"
        grads = [self.layout.held(weight.grad) for weight in self._parameters.values() if weight.grad is not None]
        norm = self._norm(grads)
        if self.clip:
            torch._foreach_mul_(grads, torch.clamp(self.clip / (norm + 1e-6), max=1.0))
        return norm

    def _norm(self, parts: Sequence[Tensor]) -> Tensor:
        squares = torch.stack(torch._foreach_norm(list(parts))).square().sum()
        return self.layout.sum_parts(squares).sqrt()

    def weight_norm(self) -> float:
        """Return the norm over all trainable weights."""
        return float(self._norm(list(self._weights.values())))

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Return [sum of the flow losses, number of samples] of this process's micro-batch; padding has weight 0."""
        features, label = to_device(batch, self.device)
        each = self.module(features, label)["each"].double()
        weight = label[2].double() if len(label) > 2 else torch.ones_like(each)
        return torch.stack([(each * weight).sum(), weight.sum()])

    @torch.no_grad()
    def denoise(self, features: tuple[Tensor, ...]) -> Tensor:
        """Return the predicted velocity, for sampling; all processes must call it equally often."""
        velocity: Tensor = self.module.denoise(to_device((features, ()), self.device)[0])
        return velocity

    def sum_over_ranks(self, numbers: Tensor) -> Tensor:
        """Sum numbers over all processes."""
        if self.world > 1:
            dist.all_reduce(numbers)
        return numbers

    # --- state ---------------------------------------------------------------------------------

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield the weights, then the optimizer state of each."""
        yield from self.like_weights(PARAM_KIND, self._weights)
        self.optimizer.prepare_state()
        for writer, (name, weight) in zip(self._writer_of, self._parameters.items(), strict=True):
            for kind, value in self.optimizer.state(name).items():
                if value.shape == weight.shape:
                    yield self._piece(f"{kind}/{name}", self.layout.held(value), writer, weight)
                else:  # a counter or another table: every process holds all of it
                    shape = tuple(value.shape)
                    yield TensorPiece(f"{kind}/{name}", value.detach().view(-1), 0, shape, writer == self.rank)

    def like_weights(self, kind: str, held: Mapping[str, Tensor]) -> Iterator[TensorPiece]:
        """Yield the pieces of tensors laid out like the weights."""
        for writer, (name, weight) in zip(self._writer_of, self._parameters.items(), strict=True):
            yield self._piece(f"{kind}/{name}", held[name], writer, weight)

    @cached_property
    def _writer_of(self) -> list[int]:
        """The writer of each weight, for tensors that all processes hold."""
        return assign_writers([weight.numel() for weight in self._parameters.values()], self.writers)

    def _piece(self, name: str, held: Tensor, writer: int, weight: Tensor) -> TensorPiece:
        start = self.layout.start(weight)
        return TensorPiece(
            name, held.view(-1), start, tuple(weight.shape), self.layout.writes(writer) and held.numel() > 0
        )

    def gather(self, held: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Gather copies of tensors laid out like the weights in rank 0's host memory."""
        gathered = {}
        for name, weight in self._parameters.items():
            tensor = self.layout.gather(held[name], weight)
            if self.rank == 0:
                gathered[name] = tensor.to("cpu", copy=True)
        return gathered if self.rank == 0 else None


def _bands(each: Tensor | None, features: Sequence[Tensor], device: torch.device) -> Tensor:
    if each is None:
        return torch.zeros(2, NUM_BANDS, device=device)
    return sum_by_band(each, features[1] / 1000)
