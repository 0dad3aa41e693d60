"""DeepSpeed for custom tasks: ZeRO-2 over a module that takes whole batches."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sd3_light.config import OptimizerConfig
from sd3_light.config.faults import UserError
from sd3_light.engines.accelerate import task_loss_sums, task_losses
from sd3_light.engines.deepspeed.zero import ZeroEngine
from sd3_light.engines.launch import Launch


class TaskZeroEngine(ZeroEngine):
    """Like `engines.accelerate.TaskEngine`, with gradients and optimizer state sharded by ZeRO-2; AdamW only."""

    _in_turn = staticmethod(iter)

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

    def _losses(self, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        return task_losses(self.engine, self.module, batch)

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        """Return the sums of `task_loss_sums`."""
        return task_loss_sums(self.module, batch)
