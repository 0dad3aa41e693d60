"""DeepSpeed's pipeline over the list of layers: stages times data parallel, with ZeRO 0 or 1."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import utils as partitions
from deepspeed.utils.timer import NoopTimer
from torch import Tensor, nn

from sd3_light.config import TrainConfig, UserError
from sd3_light.core.batch import Batch, references
from sd3_light.core.model import TrainedModel
from sd3_light.engines.deepspeed.engine_base import DeepSpeedBase
from sd3_light.engines.deepspeed.instructions import instructions
from sd3_light.engines.deepspeed.runtime import quiet
from sd3_light.engines.deepspeed.stage_state import StageState
from sd3_light.engines.prefetch import equal_micro_batches
from sd3_light.engines.protocol import StepResult, loss_sums, sum_of_squares
from sd3_light.engines.torch import sums_by_band
from sd3_light.flow.objective import NUM_BANDS
from sd3_light.launch import Launch
from sd3_light.optim.chunks import Named

_TARGETS = ("t", "target", "mask", "weight")
"""What the last stage takes of a batch."""


class _Stages(PipelineModule):
    """The layers of one stage, partitioned as configured and without DeepSpeed's printout.

    With a single stage ``run_all()`` runs all layers and DeepSpeed's input is ignored.
    """

    def __init__(self, layers: Sequence[nn.Module], config: TrainConfig, loss: Any, run_all: Callable[[], Any]) -> None:
        self._config = config
        self._run_all = run_all
        with quiet():
            super().__init__(layers=list(layers), num_stages=config.pipeline_stages, loss_fn=loss)

    def forward(self, state: Any) -> Any:
        """Return the output of the stage's last layer."""
        return self._run_all() if self.num_stages == 1 else super().forward(state)

    def _partition_layers(self, method: str = "") -> None:
        method = self._config.partition_method
        stages = self._config.pipeline_stages
        count = len(self._layer_specs)
        if method == "manual":
            self.parts = [0, *self._config.partition_split, count]
        elif method == "uniform":
            self.parts = partitions.partition_uniform(count, stages)
        else:
            self.parts = partitions.partition_balanced(self._count_layer_params(), stages)
        for number, (start, stop) in enumerate(pairwise(self.parts)):
            if not sum(self._count_layer_params()[start:stop]):
                raise UserError(
                    f"pipeline stage {number} (layers {start} to {stop - 1}) has nothing to train; lower "
                    "pipeline_stages, choose another partition_method, or freeze less"
                )
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


class PipelineEngine(DeepSpeedBase):
    """Trains float32 weights; each process holds one stage of the model.

    The module's `pipeline_layers` are partitioned, and the last stage computes the losses and sends
    them to all. A single stage runs the module as the torch engine does. All stages of a pipeline read the same
    micro-batches: the first takes the denoiser's inputs and the last the target, so neither is sent between processes.
    A step with a non-finite loss or gradient is skipped.
    """

    state: StageState

    def __init__(
        self, module: TrainedModel, config: TrainConfig, launch: Launch, device: torch.device, writers: int = 1
    ) -> None:
        super().__init__(module, launch, device)
        self.launch = launch
        self.stages = config.pipeline_stages
        self.stage = launch.stage(config.pipeline_stages)
        self.replicas = launch.world_size // self.stages
        self.sequential_micro_batches = self.stages == 1
        self.clip = config.gradient_clipping
        self.eval_pieces = config.eval_gradient_accumulation_steps if self.stages > 1 else 1
        names = {id(weight): name for name, weight in module.trainable().items()}
        stages = _Stages(self.module.pipeline_layers(), config, self._loss, self._run_all_layers)
        parameters = {names[id(weight)]: weight for weight in stages.parameters() if weight.requires_grad}
        self._initialize(stages, parameters, config)
        self.engine.timers = NoopTimer()  # its timers would collect events that are never read
        self.engine._INSTRUCTION_MAP = instructions(self.engine, self._before_reduction, self._step)
        if config.zero_stage:
            self.engine.optimizer.scaled_global_norm = self._zero_norm
        self.parts_group = self.engine.mpu.get_pipe_parallel_group() if self.stages > 1 else None
        zero = self.engine.optimizer if config.zero_stage else None
        self._take_state(self._make_state(stages, parameters, names, zero, writers))
        self.writers = self.state.writers
        self._inputs: deque[Batch] = deque()
        self._targets: deque[Batch] = deque()
        self._handle_outputs = self._train_loss
        self._weight = 1.0

    def _make_state(
        self, stages: _Stages, parameters: Named, names: Mapping[int, str], zero: Any, writers: int
    ) -> StageState:
        """Return this process's state, and free the layers of other stages."""
        stage_of = {}
        shapes = {}
        for index, layer in enumerate(stages._layer_specs):
            for weight in layer.parameters():
                if weight.requires_grad:
                    stage_of[names[id(weight)]] = stages.stage_owner(index)
                    shapes[names[id(weight)]] = weight.shape
        for index, layer in enumerate(stages._layer_specs):
            if stages.stage_owner(index) != self.stage:
                layer.to("meta")
        optimizer = self.optimizer.torch_optimizer
        return StageState(self.launch, parameters, stage_of, shapes, optimizer, zero, writers)

    def train_step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """Run the micro-batches through the pipeline and back, then step, clipped by the norm over all stages."""
        self.optimizer.set_rate(lr)
        self._numbers = torch.zeros(len(self.names) + 2 * NUM_BANDS, device=self.device)
        self._handle_outputs = self._train_loss
        self._weight = 1 / len(batches)
        self.engine.reset_activation_shape()
        self.engine.train_batch(self._feed(batches))
        return StepResult(self.names, self._numbers)

    def _feed(self, batches: Sequence[Batch]) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        """Yield micro-batches for DeepSpeed, already on the device: its own copies would synchronize.

        Targets are queued here, because DeepSpeed's need a mask, and so are the inputs of a single stage, which it
        would copy twice. The first of several stages gets copies, which must outlive other micro-batches.
        """
        first = self.stage == 0
        last = self.stage == self.stages - 1
        for batch in equal_micro_batches(batches if self.sequential_micro_batches else _pad_texts(batches)):
            own = (batch if first else batch.select(_TARGETS)).to(self.device)
            times = (1000 * own["t"]).float()
            if last:
                self._targets.append(own.select(_TARGETS))
            if self.sequential_micro_batches:
                self._inputs.append(own)
            yield self._first_inputs(own, times) if first and not last else (times,), times

    def _first_inputs(self, batch: Batch, times: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that the first layer takes."""
        lengths = batch.lengths("prompt")
        counts = () if lengths is None else (lengths.to(self.device, non_blocking=True),)
        corners = batch.select(("corners",)).tensors()
        return (batch["noisy"], times, batch["prompt"], batch["pooled"], *counts, *corners, *references(batch))

    def _run_all_layers(self) -> Any:
        """Run all layers on the next queued micro-batch."""
        return self.module.run(self._inputs.popleft())

    def _loss(self, outputs: tuple[Tensor, ...], _: object) -> Tensor:
        """Handle the outputs of the next micro-batch; DeepSpeed calls it on the last stage."""
        return self._handle_outputs(outputs, self._targets.popleft())

    def _train_loss(self, outputs: tuple[Tensor, ...], batch: Batch) -> Tensor:
        losses: dict[str, Tensor] = dict(self.module.losses(outputs, batch))
        bands = sums_by_band(losses.pop("each"), batch["t"])
        self._numbers += StepResult.pack(losses, bands) * self._weight
        return losses["loss"]

    def _before_reduction(self) -> None:
        missing = [name for name, weight in self.state.parameters.items() if weight.grad is None]
        assert not missing, f"no gradient reached {missing[:3]}"  # DeepSpeed would use zeros, and decay the weight

    def _step(self, take: Any) -> None:
        """Share the last stage's numbers with all stages, then step if they are finite."""
        self._numbers = self.sum_over_ranks(self._numbers) / self.replicas
        self._finite = torch.isfinite(self._numbers[: len(self.names)]).all()
        if self.state.zero is None:
            self._clip()
        take()
        self._numbers = torch.cat([self._numbers, self._norm.float().view(1), self._finite.float().view(1)])

    def _clip(self) -> None:
        """Clip the gradients by their global norm (without ZeRO)."""
        grads: Any = [weight.grad for weight in self.state.parameters.values()]
        norm = self._record_norm(sum_of_squares(grads))
        if self.clip:
            torch._foreach_mul_(grads, torch.clamp(self.clip / (norm + 1e-6), max=1.0))

    def _zero_norm(self) -> Tensor:
        """Return the global gradient norm, by which ZeRO clips.

        ZeRO's own version reduces over stages per parameter group. That hangs or mixes up groups when stages have
        different numbers of them, as here: embeddings are not decayed.
        """
        grads = [grad for group in self.engine.optimizer.averaged_gradients.values() for grad in group]
        return self._record_norm(self.sum_over_ranks(sum_of_squares(grads)))

    def _record_norm(self, squares: Tensor) -> Tensor:
        """Return the norm from its squares, and skip the step if the norm or the loss is not finite."""
        self._norm = squares.sqrt()
        self._finite = self._finite & torch.isfinite(self._norm)
        self._skip_unless(self._finite)
        return self._norm

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Return the `loss_sums` on the last stage, zeros elsewhere."""
        self._sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        self._run(batch.split(self.eval_pieces if batch.size % self.eval_pieces == 0 else 1), self._eval_loss)
        return self._sums

    def _eval_loss(self, outputs: tuple[Tensor, ...], batch: Batch) -> Tensor:
        each: Tensor = self.module.losses(outputs, batch)["each"]
        self._sums += loss_sums(each, batch.get("weight"))
        return each.mean()

    @torch.no_grad()
    def denoise(self, batch: Batch) -> Tensor:
        """Return the predicted velocity on all stages; all processes must call it equally often."""
        size = tuple(batch["noisy"].shape)
        self._velocity = torch.empty(size, device=self.device)
        self._run([batch], partial(self._keep_velocity, size[-2:]))
        if self.parts_group is not None:
            last = self.world_size - self.replicas + self.rank % self.replicas  # the last stage of this pipeline
            dist.broadcast(self._velocity, last, group=self.parts_group)
        return self._velocity

    def _keep_velocity(self, size: Sequence[int], outputs: tuple[Tensor, ...], *_: object) -> Tensor:
        self._velocity = self.module.velocity(outputs, size)
        return self._velocity.mean()

    def _run(self, batches: Sequence[Batch], handle_outputs: Any) -> None:
        self._handle_outputs = handle_outputs
        self.engine.reset_activation_shape()
        self.engine.eval_batch(
            self._feed(batches), reduce_output=None, bcast_loss=False, num_micro_batches=len(batches)
        )


def _pad_texts(batches: Sequence[Batch]) -> Iterator[Batch]:
    """Pad texts to one length, because stages exchange shapes once per step. Padding of real text is masked."""
    longest = max(batch["prompt"].shape[1] for batch in batches)
    for batch in batches:
        yield batch.padded_to("prompt", longest)
