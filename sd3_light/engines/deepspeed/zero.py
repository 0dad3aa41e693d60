"""DeepSpeed's data-parallel engine on the whole module, with ZeRO 2 or 3."""

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from torch import Tensor

from sd3_light.config import TrainConfig
from sd3_light.engines.deepspeed.engine_base import DeepSpeedBase
from sd3_light.engines.deepspeed.runtime import quiet, settings
from sd3_light.engines.deepspeed.shard_state import ShardState
from sd3_light.engines.deepspeed.stage_state import PipelineGrid, StageState
from sd3_light.engines.launch import Launch
from sd3_light.engines.prefetch import to_device
from sd3_light.engines.protocol import MicroBatch, StepResult
from sd3_light.flow.bands import NUM_BANDS, sum_by_band
from sd3_light.optim.build import make_optimizer


class ZeroEngine(DeepSpeedBase[StageState | ShardState]):
    """Trains float32 weights, replicated (ZeRO 2) or sharded (ZeRO 3).

    ``module(features, label)`` returns losses as for `TorchEngine`. A step with a non-finite loss or gradient is
    skipped.
    """

    sequential_micro_batches = True

    def __init__(self, module: Any, config: TrainConfig, launch: Launch, device: torch.device) -> None:
        self.rank, self.world, self.writers, self.device = launch.rank, launch.world, launch.world, device
        self.module = module.to(device)
        self.names: tuple[str, ...] = self.module.loss_names
        denoiser = self.module.transformer
        parameters = {name: weight for name, weight in denoiser.named_parameters() if weight.requires_grad}
        shapes = {name: tuple(weight.shape) for name, weight in parameters.items()}
        assert all(weight.dtype == torch.float32 for weight in parameters.values()), "weights must be float32"
        self.optimizer = make_optimizer(parameters, config.optimizer, device)
        with quiet():
            self.engine: Any = deepspeed.initialize(
                model=self.module,
                optimizer=self.optimizer.torch_optimizer,
                config=settings(config),
                dist_init_required=False,
            )[0]
        grid, zero = PipelineGrid(launch.rank, 1, launch.world), self.engine.optimizer
        self.state: StageState | ShardState = (
            ShardState(grid, parameters, shapes, self.optimizer.torch_optimizer, zero)
            if config.zero_stage == 3
            else StageState(
                grid,
                parameters,
                dict.fromkeys(parameters, 0),
                shapes,
                self.optimizer.torch_optimizer,
                zero,
                launch.world,
            )
        )

    # --- steps ---------------------------------------------------------------------------------

    def train_step(self, batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Run forward and backward over the micro-batches, clip by the global norm, and step."""
        self.optimizer.set_rate(lr)
        shapes = set()
        numbers = torch.zeros(len(self.names) + 2 * NUM_BANDS, device=self.device)
        for number, batch in enumerate(batches, start=1):
            features, label = to_device(batch, self.device)
            shapes.add(tuple(features[0].shape))
            assert len(shapes) == 1, "micro-batches of a step must be equal"
            losses: dict[str, Tensor] = dict(self.engine(features, label))
            bands = sum_by_band(losses.pop("each"), features[1] / 1000)
            numbers += StepResult.pack({name: losses[name] for name in self.names}, bands) / len(batches)
            self.engine.backward(losses["loss"])
            if number < len(batches):
                self.engine.step()
        return self._finish_step(self.sum_over_ranks(numbers) / self.world)

    def _finish_step(self, numbers: Tensor) -> StepResult:
        finite = torch.isfinite(numbers[: len(self.names)]).all()
        optimizer: Any = self.optimizer.torch_optimizer
        optimizer.grad_scale, optimizer.found_inf = None, (~finite).float()
        self.engine.step()
        norm = torch.as_tensor(self.engine.optimizer._global_grad_norm, device=self.device).float()
        finite &= torch.isfinite(norm)
        return StepResult(self.names, torch.cat([numbers, norm.view(1), finite.float().view(1)]))

    def weight_norm(self) -> float:
        """Return the norm over all trainable weights."""
        return self.state.norm(None)

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Return [sum of the flow losses, number of samples] of this process's micro-batch; padding has weight 0."""
        features, label = to_device(batch, self.device)
        each = self.engine(features, label)["each"].double()
        self._free_gathered_weights()
        weight = label[2].double() if len(label) > 2 else torch.ones_like(each)
        return torch.stack([(each * weight).sum(), weight.sum()])

    @torch.no_grad()
    def denoise(self, features: tuple[Tensor, ...]) -> Tensor:
        """Return the predicted velocity, for sampling; all processes must call it equally often."""
        velocity: Tensor = self.module.denoise(to_device((features, ()), self.device)[0])
        self._free_gathered_weights()
        return velocity

    def _free_gathered_weights(self) -> None:
        """Free the weights that ZeRO-3 keeps gathered without a backward pass: they may change before the next."""
        if isinstance(self.state, ShardState):
            self.engine.optimizer.parameter_offload.partition_all_parameters()
