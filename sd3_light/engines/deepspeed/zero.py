"""DeepSpeed's data-parallel engine on the whole module, with ZeRO 1 to 3."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from sd3_light.config import TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.core.model import TrainedModel
from sd3_light.engines.deepspeed.engine_base import DeepSpeedBase
from sd3_light.engines.deepspeed.shard_state import ShardState
from sd3_light.engines.deepspeed.stage_state import StageState
from sd3_light.engines.networks import Networks
from sd3_light.engines.prefetch import equal_micro_batches
from sd3_light.engines.protocol import MicroBatch, StepResult, loss_sums, require_gradients
from sd3_light.engines.torch import draw_pass, micro_losses
from sd3_light.flow.objective import NUM_BANDS
from sd3_light.launch import Launch


class ZeroEngine(DeepSpeedBase):
    """Trains float32 weights, replicated (ZeRO 1 and 2) or sharded (ZeRO 3).

    ``module(batch)`` returns losses as for `TorchEngine`. A step with a non-finite loss or gradient is
    skipped.
    """

    sequential_micro_batches = True

    def __init__(self, module: TrainedModel, config: TrainConfig, launch: Launch, device: torch.device) -> None:
        super().__init__(module.to(device), launch, device)
        self.writers = launch.world_size
        self._reached: set[str] = set()  # the weights with a gradient of this backward pass
        if module.objective.draws:
            self.networks = Networks(module, launch, device)
            module.release = self._free_gathered_weights
        parameters = module.trainable()
        shapes = {name: weight.shape for name, weight in parameters.items()}
        self._initialize(self.module, parameters, config)
        zero = self.engine.optimizer
        optimizer = self.optimizer.torch_optimizer
        if config.zero_stage == 3:
            self._take_state(ShardState(launch, parameters, shapes, optimizer, zero))
            self.parts_group = dist.group.WORLD
        else:
            stage_of = dict.fromkeys(parameters, 0)
            self._take_state(StageState(launch, parameters, stage_of, shapes, optimizer, zero))
            for name, weight in parameters.items():
                weight.register_post_accumulate_grad_hook(partial(self._reach, name))

    def _reach(self, name: str, weight: Tensor) -> None:
        self._reached.add(name)

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Run forward and backward over the micro-batches, clip by the global norm, and step."""
        self.optimizer.set_rate(lr)
        numbers = torch.zeros(len(self.names) + 2 * NUM_BANDS, device=self.device)
        for number, batch in enumerate(equal_micro_batches(batches), start=1):
            if self.networks is not None:
                batch = draw_pass(self.module, self.networks, batch.to(self.device), len(batches))
            losses, bands = micro_losses(self.engine, batch, self.device)
            numbers += StepResult.pack(losses, bands) / len(batches)
            self._expect_gradients(losses["loss"])
            self.engine.backward(losses["loss"])
            if number < len(batches):
                self.engine.step()
        return self._finish_step(self.sum_over_ranks(numbers) / self.world_size)

    def _expect_gradients(self, loss: Tensor) -> None:
        """Let the backward pass of whole weights raise if it misses one, before they are reduced over processes."""
        if isinstance(self.state, StageState):
            self._reached.clear()
            loss.register_hook(lambda _: _at_end_of_backward(self._require_gradients))

    def _require_gradients(self) -> None:
        require_gradients(name for name in self.state.shapes if name not in self._reached)

    def _finish_step(self, numbers: Tensor) -> StepResult:
        finite = torch.isfinite(numbers[: len(self.names)]).all()
        self._skip_unless(finite)
        self.engine.step()
        norm = torch.as_tensor(self.engine.optimizer._global_grad_norm, device=self.device).float()
        finite &= torch.isfinite(norm)
        if self.networks is not None:
            self.networks.step()
        return StepResult(self.names, torch.cat([numbers, norm.view(1), finite.float().view(1)]))

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Return the `loss_sums` of this process's micro-batch."""
        batch = batch.to(self.device)
        each = self.module.evaluate(batch)
        self._free_gathered_weights()
        return loss_sums(each, batch.get("weight"))

    @torch.no_grad()
    def denoise(self, batch: Batch) -> Tensor:
        """Return the predicted velocity, for sampling; all processes must call it equally often."""
        velocity: Tensor = self.module.denoise(batch.to(self.device))
        self._free_gathered_weights()
        return velocity

    def _free_gathered_weights(self) -> None:
        """Free the weights that ZeRO-3 keeps gathered without a backward pass: they may change before the next."""
        if isinstance(self.state, ShardState):
            self.engine.optimizer.parameter_offload.partition_all_parameters()


def _at_end_of_backward(act: Callable[[], None]) -> None:
    """Call ``act`` when the backward pass that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(act)
