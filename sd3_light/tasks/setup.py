"""How a task runs, from its settings: accelerator, engine, micro-batches."""

import torch
from accelerate import Accelerator

from sd3_light.config.faults import UserError
from sd3_light.engines import Engine, Launch, deepspeed
from sd3_light.engines.accelerate import TaskEngine
from sd3_light.engines.processes import ProcessGroups
from sd3_light.tasks.module import DiffusionTrainingModule
from sd3_light.tasks.settings import TaskSettings


def running_accelerator(accelerator: Accelerator | None, settings: TaskSettings) -> Accelerator | None:
    """Return the accelerator if it runs the task; other engines ignore one."""
    if settings.engine != "accelerate":
        return None
    if not isinstance(accelerator, Accelerator):
        raise UserError('engine="accelerate" needs an Accelerator; give one, or engine="torch"')
    return accelerator


def engine_from_settings(
    model: DiffusionTrainingModule,
    settings: TaskSettings,
    micro_batches: int,
    launch: Launch,
    device: torch.device,
    accelerator: Accelerator | None,
    groups: ProcessGroups,
) -> Engine:
    """Return the engine that the settings name, with the module in it."""
    optimizer, clip = settings.optimizer_table, settings.gradient_clipping
    if settings.engine == "deepspeed":
        return deepspeed.make_task_engine(model, optimizer, clip, micro_batches, launch, device)
    return TaskEngine(model, optimizer, clip, launch, device, accelerator, groups.writers)


def accumulation_steps(accelerator: Accelerator | None, settings: TaskSettings) -> int:
    """Return the micro-batches per step, from the settings or the accelerator; two different numbers are an error."""
    default = 1 if accelerator is None else int(accelerator.gradient_accumulation_steps)
    steps = settings.gradient_accumulation_steps
    if steps is not None and default not in (1, steps):
        raise UserError(
            f"gradient_accumulation_steps is {steps} here and {default} in the Accelerator; give one of them"
        )
    return steps or default
