"""torch's own engine: one process, or several under torchrun with whole (DDP) or cut (FSDP2) weights."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sd3_light.config import TrainConfig
from sd3_light.engines.launch import Launch
from sd3_light.engines.layouts import Layout, Replicas, Shards
from sd3_light.engines.prefetch import to_device
from sd3_light.engines.protocol import PARAM_KIND, MicroBatch, StepResult, TensorPiece
from sd3_light.engines.writers import assign_writers
from sd3_light.flow.bands import NUM_BANDS, sum_by_band
from sd3_light.optim.build import make_optimizer


class TorchEngine:
    """Steps over float32 weights.

    ``module(features, label)`` returns losses with the key ``loss``, and under ``each`` the flow loss of every sample;
    its trainable parameters are those of ``module.transformer``, whose names are the canonical ones. A step whose loss
    or gradient is not finite is not taken, which the device decides by itself. Of whole weights the first ``writers``
    processes write their shares of a checkpoint.
    """

    sequential_micro_batches = True

    def __init__(
        self, module: nn.Module, config: TrainConfig, launch: Launch, device: torch.device, writers: int = 1
    ) -> None:
        self.rank, self.world, self.device = launch.rank, launch.world, device
        self.module: Any = module.to(device)
        self.clip = config.gradient_clipping
        bf16 = device.type == "cuda" and config.model.transformer_dtype == "bfloat16"
        self.layout: Layout = (
            Shards(self.module, launch, device, bf16)
            if config.parallel == "fsdp2" and launch.world > 1
            else Replicas(self.module, launch, device, writers)
        )
        self.writers = self.layout.writers
        denoiser: Any = self.module.transformer
        self._parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in denoiser.named_parameters() if parameter.requires_grad
        }
        assert all(weight.dtype == torch.float32 for weight in self._parameters.values()), "weights learn in fp32"
        self.optimizer = make_optimizer(self._parameters, config.optimizer, device)
        self._weights = {name: self.layout.held(weight) for name, weight in self._parameters.items()}

    @staticmethod
    def engine_name(config: TrainConfig, launch: Launch) -> str:
        """Engine and layout in a few words, for the log."""
        return f"torch {config.parallel}" if launch.world > 1 else "torch"

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """What this process holds of the trainable float32 weights, live, by canonical name."""
        return self._weights

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shape of every trainable weight."""
        return {name: tuple(weight.shape) for name, weight in self._parameters.items()}

    # --- steps ---------------------------------------------------------------------------------

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Forward and backward over the micro-batches, clip by the global norm, step."""
        self.optimizer.set_rate(lr)
        for weight in self._parameters.values():
            weight.grad = None
        numbers = torch.zeros((), device=self.device)
        names: tuple[str, ...] = ()
        shapes = set()
        for number, prepared in enumerate(batches):
            features, label = to_device(prepared, self.device)
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
        """The norm of all gradients together, before they are scaled down to the limit."""
        missing = [name for name, weight in self._parameters.items() if weight.grad is None]
        assert not missing, f"no gradient reached {missing[:3]}"
        grads = [self.layout.held(weight.grad) for weight in self._parameters.values() if weight.grad is not None]
        norm = self._norm(grads)
        if self.clip:
            torch._foreach_mul_(grads, torch.clamp(self.clip / (norm + 1e-6), max=1.0))
        return norm

    def _norm(self, parts: Sequence[Tensor]) -> Tensor:
        squares = torch.stack(torch._foreach_norm(list(parts))).square().sum()
        return self.layout.add_parts(squares).sqrt()

    def weight_norm(self) -> float:
        """The norm over all trainable weights."""
        return float(self._norm(list(self._weights.values())))

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> Tensor:
        """[sum of the flow losses, number of samples] of this process's micro-batch; padding weighs nothing."""
        features, label = to_device(batch, self.device)
        each = self.module(features, label)["each"].double()
        weight = label[2].double() if len(label) > 2 else torch.ones_like(each)
        return torch.stack([(each * weight).sum(), weight.sum()])

    @torch.no_grad()
    def denoise(self, features: tuple[Tensor, ...]) -> Tensor:
        """The predicted velocity, for sampling; all processes call it equally often."""
        velocity: Tensor = self.module.denoise(to_device((features, ()), self.device)[0])
        return velocity

    def sum_over_ranks(self, numbers: Tensor) -> Tensor:
        """Numbers of all processes added up."""
        if self.world > 1:
            dist.all_reduce(numbers)
        return numbers

    # --- state ---------------------------------------------------------------------------------

    def pieces(self) -> Iterator[TensorPiece]:
        """Weights, then what the optimizer remembers of each."""
        yield from self.like_weights(PARAM_KIND, self._weights)
        self.optimizer.prepare_state()
        for writer, (name, weight) in zip(self._writer_of, self._parameters.items(), strict=True):
            for kind, value in self.optimizer.state(name).items():
                if value.shape == weight.shape:
                    yield self._piece(f"{kind}/{name}", self.layout.held(value), writer, weight)
                else:  # a count or a table of its own: every process has it whole
                    shape = tuple(value.shape)
                    yield TensorPiece(f"{kind}/{name}", value.detach().view(-1), 0, shape, writer == self.rank)

    def like_weights(self, kind: str, held: Mapping[str, Tensor]) -> Iterator[TensorPiece]:
        """Pieces of tensors that lie as the weights do."""
        for writer, (name, weight) in zip(self._writer_of, self._parameters.items(), strict=True):
            yield self._piece(f"{kind}/{name}", held[name], writer, weight)

    @cached_property
    def _writer_of(self) -> list[int]:
        """Of each weight who writes what all processes have alike."""
        return assign_writers([weight.numel() for weight in self._parameters.values()], self.writers)

    def _piece(self, name: str, held: Tensor, writer: int, weight: Tensor) -> TensorPiece:
        start = self.layout.start(weight)
        return TensorPiece(
            name, held.view(-1), start, tuple(weight.shape), self.layout.writes(writer) and held.numel() > 0
        )

    def gather(self, held: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """All of what lies as the weights do, in rank 0's host memory; a copy."""
        found = {}
        for name, weight in self._parameters.items():
            tensor = self.layout.gather(held[name], weight)
            if self.rank == 0:
                found[name] = tensor.to("cpu", copy=True)
        return found if self.rank == 0 else None


def _bands(each: Tensor | None, features: Sequence[Tensor], device: torch.device) -> Tensor:
    if each is None:
        return torch.zeros(2, NUM_BANDS, device=device)
    return sum_by_band(each, features[1] / 1000)
