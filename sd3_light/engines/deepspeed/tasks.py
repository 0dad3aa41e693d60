"""DeepSpeed for custom tasks: ZeRO-2 over a module that takes whole batches."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sd3_light.config import OptimizerConfig
from sd3_light.config.faults import UserError
from sd3_light.engines.accelerate import module_bands
from sd3_light.engines.deepspeed.zero import ZeroEngine
from sd3_light.engines.launch import Launch
from sd3_light.engines.protocol import StepResult
from sd3_light.flow.bands import NUM_BANDS


class TaskZeroEngine(ZeroEngine):
    """Like `engines.accelerate.TaskEngine`, with gradients and optimizer state sharded by ZeRO-2; AdamW only."""

    def __init__(
        self,
        module: Any,
        optimizer: OptimizerConfig,
        clip: float,
        accumulation: int,
        launch: Launch,
        device: torch.device,
    ) -> None:
        if optimizer.type != "adamw":
            raise UserError(
                f'engine="deepspeed" supports AdamW only, not {optimizer.type!r}; use adamw or another engine'
            )
        module.loss_names = ("loss",)
        settings: Any = SimpleNamespace(
            optimizer=optimizer, zero_stage=2, gradient_clipping=clip, gradient_accumulation_steps=accumulation
        )
        super().__init__(module, settings, launch, device)

    def train_step(self, batches: Sequence[Any], lr: float) -> StepResult:
        """Run forward and backward over the micro-batches, clip by the global norm, and step."""
        self.optimizer.set_rate(lr)
        numbers = torch.zeros(1 + 2 * NUM_BANDS, device=self.device)
        for number, batch in enumerate(batches, start=1):
            loss = self.engine(batch)
            numbers += StepResult.pack({"loss": loss.detach().float()}, module_bands(self.module)) / len(batches)
            self.engine.backward(loss)
            if number < len(batches):
                self.engine.step()
        return self._finish_step(self.sum_over_ranks(numbers) / self.world)

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        """Return [sum of the losses, number of samples] of ``(samples, quantile)``; padding has weight 0."""
        samples, quantile = batch
        each = self.module.each(samples, quantile).double()
        weight = torch.tensor([float(sample["repeat"] == 0) for sample in samples], device=each.device).double()
        return torch.stack([(each * weight).sum(), weight.sum()])
