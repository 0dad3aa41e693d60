"""An engine around a task script's Accelerator, which places, wraps and runs the module; the engine steps and saves.

No scheduler or optimizer is prepared (accelerate steps a prepared scheduler once per process). The setup that results
is checked: the number of processes, the kind of distribution, and whether the weights are sharded.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sd3_light.config import OptimizerConfig
from sd3_light.config.faults import UserError
from sd3_light.engines.launch import Launch
from sd3_light.engines.protocol import StepResult
from sd3_light.engines.torch import TorchEngine
from sd3_light.engines.weight_layouts import Replicas, Shards, WeightLayout
from sd3_light.flow.bands import NUM_BANDS
from sd3_light.optim.build import make_optimizer

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


def module_bands(module: Any) -> Tensor:
    """Return the losses of a module's last batch by timestep band; zeros if it has a custom forward pass."""
    bands: Tensor | None = getattr(module, "bands", None)
    device = next(module.transformer.parameters()).device
    return torch.zeros(2, NUM_BANDS, device=device) if bands is None else bands


class _PreparedReplicas(Replicas):
    """Replicated weights; accelerate wrapped the module."""

    def __init__(self, run: nn.Module, launch: Launch, writers: int) -> None:
        self.run, self.rank, self.writers = run, launch.rank, writers


class _PreparedShards(Shards):
    """Weights sharded by accelerate's FSDP2."""

    def __init__(self, run: nn.Module, launch: Launch) -> None:
        self.run, self.rank, self.writers = run, launch.rank, launch.world


class TaskEngine(TorchEngine):
    """Trains a module that takes whole batches.

    ``module(batch)`` returns the loss, ``module.each(batch, quantile)`` the loss of each sample in validation. An
    ``accelerator`` wraps the module; without one, several processes use DDP (`engine="torch"`).
    """

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
        self.layout: WeightLayout = self._make_layout(launch, writers)
        self.writers = self.layout.writers
        self._parameters = dict(self.module.named_trainable())
        if not self._parameters:
            raise UserError(
                "nothing to train: no parameter of the module's transformer requires gradients; unfreeze some of them"
            )
        narrow = [name for name, weight in self._parameters.items() if weight.dtype != torch.float32]
        if narrow:
            raise UserError(
                f"{narrow[0]} is {self._parameters[narrow[0]].dtype}; trainable weights must be float32: call "
                ".float() on the transformer"
            )
        self.optimizer = make_optimizer(self._parameters, optimizer, device)
        self._weights = {name: self.layout.held(weight) for name, weight in self._parameters.items()}

    def _make_layout(self, launch: Launch, writers: int) -> WeightLayout:
        if self.accelerator is None:
            return Replicas(self.module, launch, writers)
        run = self.accelerator.prepare_model(self.module)
        is_sharded = any(isinstance(parameter, DTensor) for parameter in run.parameters())
        if self.accelerator.distributed_type == DistributedType.FSDP and not is_sharded:
            raise UserError("accelerate ignored its FSDP2 plugin, as it does on CPUs; remove the plugin there")
        if is_sharded:
            return _PreparedShards(run, launch)
        if launch.world > 1 and not isinstance(run, DistributedDataParallel):
            raise UserError(f"accelerate wrapped the module in {type(run).__name__}, not in DDP; start with torchrun")
        return _PreparedReplicas(run, launch, writers)

    def train_step(self, batches: Sequence[Any], lr: float) -> StepResult:
        """Run forward and backward over the micro-batches, clip by the global norm, and step."""
        self.optimizer.set_rate(lr)
        for weight in self._parameters.values():
            weight.grad = None
        numbers = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            with self.layout.accumulating(last=number == len(batches) - 1), self._autocast():
                loss = self.layout.run(batch)
            with self.layout.accumulating(last=number == len(batches) - 1):
                (loss / len(batches)).backward()
            numbers = numbers + StepResult.pack({"loss": loss.detach().float()}, module_bands(self.module)) / len(
                batches
            )
        missing = [name for name, weight in self._parameters.items() if weight.grad is None]
        if missing:
            raise UserError(
                f"no gradient reached {missing[0]} of the denoiser; use it in denoise, or freeze it with "
                "requires_grad_(False)"
            )
        return self._finish_step(("loss",), self.sum_over_ranks(numbers) / self.world)

    @torch.no_grad()
    def evaluate(self, batch: Any) -> Tensor:
        """Return [sum of the losses, number of samples] of ``(samples, quantile)``; padding has weight 0."""
        samples, quantile = batch
        with self._autocast():
            each = self.module.each(samples, quantile).double()
        weight = torch.tensor([float(sample["repeat"] == 0) for sample in samples], device=each.device).double()
        return torch.stack([(each * weight).sum(), weight.sum()])

    def denoise(self, features: tuple[Tensor, ...]) -> Tensor:
        """Not used by tasks: their modules sample by themselves."""
        raise NotImplementedError

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.accelerator is None else cast(Any, self.accelerator.autocast())
