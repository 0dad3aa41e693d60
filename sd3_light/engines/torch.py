"""The torch engine: one process, or several under torchrun with replicated (DDP) or sharded (FSDP2) weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from sd3_light.config import TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.core.model import TrainedModel
from sd3_light.engines.cuda_graphs import CudaRecorder, MicroBatchGraphs, Numbers, Recorder
from sd3_light.engines.hosted import HostedBlocks, by_block
from sd3_light.engines.networks import Networks
from sd3_light.engines.prefetch import equal_micro_batches
from sd3_light.engines.protocol import (
    PARAM_KIND,
    Engine,
    MicroBatch,
    StepResult,
    TensorPiece,
    ToHost,
    assign_writers,
    loss_sums,
    require_gradients,
    sum_of_squares,
    to_host,
)
from sd3_light.engines.release import GradientRelease
from sd3_light.engines.weight_layouts import Replicas, replicate, shard
from sd3_light.flow.objective import NUM_BANDS, sum_by_band
from sd3_light.launch import Launch
from sd3_light.model.block_swap import trained_blocks
from sd3_light.optim.build import make_optimizer
from sd3_light.optim.chunks import Named
from sd3_light.optim.draws import StepDraws


class TorchEngine(Engine):
    """Trains float32 weights, or those that the config stores in bfloat16.

    A step with a non-finite loss or gradient is skipped; the device decides that without a synchronization. With
    `gradient_release` a gradient that is not finite skips what is left of the step. With
    replicated weights ranks 0 to ``writers`` - 1 share the writing of checkpoints. ``lay_out`` distributes the module
    over the processes in place of the config's ``parallel``.
    """

    sequential_micro_batches = True
    graphs: MicroBatchGraphs | None = None

    def __init__(
        self,
        module: TrainedModel,
        config: TrainConfig,
        launch: Launch,
        device: torch.device,
        writers: int = 1,
        lay_out: Callable[[TrainedModel], Replicas] | None = None,
    ) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.device = device
        self.module = module.to(device)
        self.clip = config.gradient_clipping
        self.networks = Networks(module, launch, device) if module.objective.draws else None
        if lay_out is not None:
            self.layout = lay_out(self.module)
        elif config.parallel == "fsdp2" and launch.world_size > 1:
            self.layout = shard(self.module, launch, device)
        else:
            self.layout = replicate(self.module, launch, writers)
        self.writers = self.layout.writers
        parameters = self._parameters = self.module.trainable()
        dtypes = {weight.dtype for weight in parameters.values()}
        stored = config.optimizer.weight_dtype
        assert dtypes <= {torch.float32, getattr(torch, stored)}, f"weights must be float32 or {stored}"
        self._draws = StepDraws(config.seed)
        groups: Sequence[Named] | None = [parameters] if torch.bfloat16 in dtypes else None
        if config.gradient_release:
            groups = by_block(parameters, module.blocks())
        # heads train by AdamW: their lists of layers are no blocks
        self.optimizer = make_optimizer(self.module.denoiser, parameters, config.optimizer, device, self._draws, groups)
        self.weights: Mapping[str, Tensor] = {name: self.layout.held(weight) for name, weight in parameters.items()}
        self._hosted: HostedBlocks | None = None
        if (swapped := trained_blocks(self.module.denoiser)) is not None:
            assert config.gradient_release, "weights in host memory are updated in the backward pass"
            self.weights = self._hosted = HostedBlocks(*swapped, parameters, self.optimizer)
        step = None if self._hosted is None else partial(self._hosted.step, self.optimizer)
        self._release = GradientRelease(self.optimizer, step) if config.gradient_release else None
        self.shapes = {name: tuple(weight.shape) for name, weight in parameters.items()}

    @staticmethod
    def engine_name(config: TrainConfig, launch: Launch) -> str:
        """Return a short name of engine and layout, for the log."""
        return f"torch {config.parallel}" if launch.world_size > 1 else "torch"

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Run forward and backward over the micro-batches, clip by the global norm, and step."""
        self.optimizer.set_rate(lr)
        self._draws.step = self.module.step
        self._clear_gradients()
        numbers = torch.zeros((), device=self.device)
        names: tuple[str, ...] = ()
        for number, batch in enumerate(equal_micro_batches(batches), start=1):
            if self.networks is not None:
                batch = draw_pass(self.module, self.networks, batch.to(self.device), len(batches))
            with self.layout.accumulating(last=number == len(batches)):
                if self.graphs is None:
                    names, packed = self._run_pass(batch, len(batches))
                else:
                    names, packed = self.graphs.run(self.module.recordable(batch), len(batches))
            numbers = numbers + packed
        return self._finish_step(names, self.sum_over_ranks(numbers) / self.world_size)

    def use_graphs(self, recorder: Recorder | None = None) -> None:
        """Run forward and backward passes as CUDA graphs from now on; see `cost/graph_choice.py` for when."""
        weights = list(self._parameters.values())
        self.graphs = MicroBatchGraphs(self._run_pass, weights, recorder or CudaRecorder(self.device))

    def _clear_gradients(self) -> None:
        if self.graphs is not None:
            self.graphs.clear_gradients()
            return
        for weight in self._parameters.values():
            weight.grad = None

    def _run_pass(self, batch: Batch, count: int) -> Numbers:
        """Queue forward and backward pass of one of ``count`` micro-batches."""
        losses, bands = micro_losses(self.layout.run, batch, self.device)
        loss = losses["loss"] / count
        if self._release is not None:
            assert count == 1, "a gradient is used once"
            self._release.begin(loss)
        loss.backward()
        return tuple(losses), StepResult.pack(losses, bands) / count

    def _finish_step(self, names: tuple[str, ...], numbers: Tensor) -> StepResult:
        norm = self._clipped_norm() if self._release is None else self._release.finish()
        finite = torch.isfinite(numbers[: len(names)]).all() & torch.isfinite(norm)
        if self._release is None:
            self.optimizer.step(skip=(~finite).float())
        if self.networks is not None:
            self.networks.step()
        return StepResult(names, torch.cat([numbers, norm.float().view(1), finite.float().view(1)]))

    def _clipped_norm(self) -> Tensor:
        """Clip the gradients and return their global norm before clipping."""
        if self.layout.needs_all_gradients:
            require_gradients(name for name, weight in self._parameters.items() if weight.grad is None)
        grads = [self.layout.held(weight.grad) for weight in self._parameters.values() if weight.grad is not None]
        norm = self._norm(grads)
        if self.clip:
            torch._foreach_mul_(grads, torch.clamp(self.clip / (norm + 1e-6), max=1.0))
        return norm

    def _norm(self, parts: Sequence[Tensor]) -> Tensor:
        return self.layout.sum_parts(sum_of_squares(parts)).sqrt()

    def weight_norm(self) -> Tensor:
        """Return the norm over all trainable weights, on the device."""
        return self._norm(list(self.weights.values())) if self._hosted is None else self._hosted.norm(self.device)

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Return the `loss_sums` of this process's micro-batch."""
        batch = batch.to(self.device)
        return loss_sums(self.module.evaluate(batch), batch.get("weight"))

    @torch.no_grad()
    def denoise(self, batch: Batch) -> Tensor:
        """Return the predicted velocity, for sampling; all processes must call it equally often."""
        return self.module.denoise(batch.to(self.device))

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield the weights, then the optimizer state of each."""
        yield from self.like_weights(PARAM_KIND, self.weights)
        self.optimizer.prepare_state()
        if self._hosted is not None:
            self._hosted.settle()
        for writer, (name, weight) in zip(self._writer_of, self._parameters.items(), strict=True):
            for kind, value in self.optimizer.state(name).items():
                if value.shape == weight.shape:
                    yield self._piece(f"{kind}/{name}", self.layout.held(value), writer, weight)
                else:  # a counter or another table: every process holds all of it
                    shape = tuple(value.shape)
                    flat = value.detach().view(-1)
                    yield TensorPiece(f"{kind}/{name}", flat, 0, shape, writer == self.rank, self._is_hosted(name))
        if self.networks is not None:
            yield from self.networks.pieces()

    def like_weights(self, kind: str, held: Mapping[str, Tensor]) -> Iterator[TensorPiece]:
        """Yield the pieces of tensors laid out like the weights."""
        for writer, (name, weight) in zip(self._writer_of, self._parameters.items(), strict=True):
            if name in held:
                yield self._piece(f"{kind}/{name}", held[name], writer, weight)

    @cached_property
    def _writer_of(self) -> list[int]:
        """The writer of each weight, for tensors that all processes hold."""
        return assign_writers([weight.numel() for weight in self._parameters.values()], self.writers)

    def _piece(self, name: str, held: Tensor, writer: int, weight: Tensor) -> TensorPiece:
        start = self.layout.start(weight)
        writes = self.layout.writes(writer) and held.numel() > 0
        hosted = self._is_hosted(name.partition("/")[2])
        return TensorPiece(name, held.view(-1), start, tuple(weight.shape), writes, hosted)

    def _is_hosted(self, name: str) -> bool:
        return self._hosted is not None and self._hosted.holds(name)

    def gather(self, held: Mapping[str, Tensor], to_host: ToHost = to_host) -> dict[str, Tensor] | None:
        """Gather copies of tensors laid out like the weights in rank 0's host memory."""
        gathered = {}
        for name, weight in self._parameters.items():
            if name not in held:
                continue
            tensor = self.layout.gather(held[name], weight)
            if self.rank == 0:
                gathered[name] = to_host(name, tensor)
        return gathered if self.rank == 0 else None


def draw_pass(model: TrainedModel, networks: Networks, batch: Batch, count: int) -> Batch:
    """Return one of ``count`` micro-batches as the objective draws it, and train the objective's networks on it."""
    drawn = model.draw(batch)
    networks.accumulate(drawn, count)
    return drawn


def micro_losses(run: Callable[..., Any], batch: Batch, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Return the losses that ``run(batch)`` returns, and ``each`` of them as sums by timestep band.

    The sums are zeros if neither the batch nor the losses have times.
    """
    batch = batch.to(device)
    losses: dict[str, Tensor] = dict(run(batch))
    each = losses.pop("each")
    t = losses.pop("t", batch.get("t"))
    return losses, each.new_zeros(2, NUM_BANDS) if t is None else sums_by_band(each, t)


def sums_by_band(each: Tensor, t: Tensor) -> Tensor:
    """Return the sums of sample losses by timestep band, of times with the rounding of the denoiser's input.

    A sample with a time per token is in the band of their mean.
    """
    times = t if t.dim() == 1 else t.flatten(1).mean(1)
    return sum_by_band(each, (1000 * times) / 1000)
