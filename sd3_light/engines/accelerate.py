"""An engine around a task script's Accelerator, which places, wraps and runs the module; the engine steps and saves.

No scheduler or optimizer is prepared (accelerate steps a prepared scheduler once per process). The setup that results
is checked: the number of processes, the kind of distribution, and whether the weights are sharded.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sd3_light.config import OptimizerConfig
from sd3_light.config.faults import UserError
from sd3_light.core.batch import Batch
from sd3_light.engines.torch import TorchEngine, require_gradients, task_loss_sums, task_losses, task_parameters
from sd3_light.engines.weight_layouts import Replicas, Shards, replicate
from sd3_light.launch import Launch

_REPLICATED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def launch_from_accelerator(accelerator: Accelerator) -> Launch:
    """Return the accelerator's rank and world; raise a `UserError` for setups that are not supported."""
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        raise UserError('accelerate\'s DeepSpeed plugin is not supported; pass engine="deepspeed" and no plugin')
    if kind not in _REPLICATED and not (kind == DistributedType.FSDP and getattr(accelerator, "is_fsdp2", False)):
        raise UserError(f"accelerate's {kind.value} is not supported; use DDP or FSDP2 (fsdp_version: 2)")
    if accelerator.mixed_precision == "fp16":
        raise UserError("mixed_precision='fp16' needs loss scaling, which is not supported; use 'bf16' or 'no'")
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != accelerator.num_processes:
        raise UserError(f"accelerate reports {accelerator.num_processes} processes, torch {world}; start with torchrun")
    return Launch(accelerator.process_index, accelerator.local_process_index, accelerator.num_processes)


class TaskEngine(TorchEngine):
    """Trains a module that takes whole batches.

    ``module(batch)`` returns the loss, ``module.each(batch, quantile)`` the loss of each sample in validation. An
    ``accelerator`` wraps the module; without one, several processes use DDP (`engine="torch"`).
    """

    _in_turn = staticmethod(iter)

    def __init__(
        self,
        module: Any,
        optimizer: OptimizerConfig,
        clip: float,
        launch: Launch,
        device: torch.device,
        accelerator: Accelerator | None = None,
        writers: int = 1,
    ) -> None:
        self.rank, self.world, self.device, self.clip = launch.rank, launch.world, device, clip
        self.module, self.accelerator = module.to(device), accelerator
        self.layout = self._make_layout(launch, writers)
        self._take_weights(task_parameters(self.module), optimizer)

    def _make_layout(self, launch: Launch, writers: int) -> Replicas:
        if self.accelerator is None:
            return replicate(self.module, launch, writers)
        run = self.accelerator.prepare_model(self.module)
        is_sharded = any(isinstance(parameter, DTensor) for parameter in run.parameters())
        if self.accelerator.distributed_type == DistributedType.FSDP and not is_sharded:
            raise UserError("accelerate ignored its FSDP2 plugin, as it does on CPUs; remove the plugin there")
        if is_sharded:
            return Shards(run, launch)
        if launch.world > 1 and not isinstance(run, DistributedDataParallel):
            raise UserError(f"accelerate wrapped the module in {type(run).__name__}, not in DDP; start with torchrun")
        return Replicas(run, launch, writers)

    def _losses(self, batch: Any) -> tuple[dict[str, Tensor], Tensor]:
        with self._autocast():
            return task_losses(self.layout.run, self.module, batch)

    def _require_gradients(self) -> None:
        # an accelerator that finds unused parameters says that there may be some
        if getattr(getattr(self.accelerator, "ddp_handler", None), "find_unused_parameters", False):
            return
        require_gradients(name for name, weight in self._parameters.items() if weight.grad is None)

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        """Return the sums of `task_loss_sums`."""
        with self._autocast():
            return task_loss_sums(self.module, batch)

    def denoise(self, batch: Batch) -> Tensor:
        """Not used by tasks: their modules sample by themselves."""
        raise NotImplementedError

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.accelerator is None else cast(Any, self.accelerator.autocast())
