"""Weights that a script's Accelerator distributes: it places and wraps the module, the torch engine steps and saves.

No scheduler or optimizer is prepared (accelerate steps a prepared scheduler once per process). The setup that results
is checked: the number of processes, the kind of distribution, and whether the weights are sharded.
"""

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sd3_light.config.faults import UserError
from sd3_light.core.model import TrainedModel
from sd3_light.engines.weight_layouts import Replicas, Shards
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
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != accelerator.num_processes:
        raise UserError(
            f"accelerate reports {accelerator.num_processes} processes, torch {world_size}; start with torchrun"
        )
    return Launch(accelerator.process_index, accelerator.local_process_index, accelerator.num_processes)


def accelerated(module: TrainedModel, accelerator: Accelerator, launch: Launch, writers: int) -> Replicas:
    """Let the accelerator wrap the module, which then computes under its autocast; return the layout that results."""
    run = accelerator.prepare_model(module)
    if any(isinstance(parameter, DTensor) for parameter in run.parameters()):
        return Shards(run, launch)
    if accelerator.distributed_type == DistributedType.FSDP:
        raise UserError("accelerate ignored its FSDP2 plugin, as it does on CPUs; remove the plugin there")
    if launch.world_size > 1 and not isinstance(run, DistributedDataParallel):
        raise UserError(f"accelerate wrapped the module in {type(run).__name__}, not in DDP; start with torchrun")
    layout = Replicas(run, launch, writers)
    # an accelerator that finds unused parameters says that there may be some
    layout.needs_all_gradients = not getattr(getattr(accelerator, "ddp_handler", None), "find_unused_parameters", False)
    return layout
