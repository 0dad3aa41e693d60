"""How a task runs, from its settings: process and device, engine, precision."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator

from sd3_light.config.faults import UserError
from sd3_light.engines import Engine, Launch, deepspeed
from sd3_light.engines.accelerate import TaskEngine, launch_from_accelerator
from sd3_light.engines.processes import ProcessGroups
from sd3_light.tasks.module import DiffusionTrainingModule
from sd3_light.tasks.settings import TaskSettings


def launch_and_device(accelerator: Accelerator | None, settings: TaskSettings) -> tuple[Launch, torch.device]:
    """Return this process's launch and device: the accelerator's if it runs the task."""
    if settings.engine != "accelerate":
        launch = Launch.detect()
        return launch, launch.device()
    if not isinstance(accelerator, Accelerator):
        raise UserError('engine="accelerate" needs an Accelerator; give one, or engine="torch"')
    return launch_from_accelerator(accelerator), accelerator.device


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
    wrapping = accelerator if settings.engine == "accelerate" else None
    return TaskEngine(model, optimizer, clip, launch, device, wrapping, groups.writers)


def computes_in_bf16(accelerator: Accelerator | None, settings: TaskSettings) -> bool:
    """Whether steps run under autocast; engines other than "accelerate" ignore an accelerator."""
    return settings.engine == "accelerate" and accelerator is not None and accelerator.mixed_precision == "bf16"


def autocast(accelerator: Accelerator | None, settings: TaskSettings) -> AbstractContextManager[Any]:
    """Return a context in which the module computes as in a training step."""
    if accelerator is None or not computes_in_bf16(accelerator, settings):
        return nullcontext()
    return cast(AbstractContextManager[Any], accelerator.autocast())


def accumulation_steps(accelerator: Accelerator | None, settings: TaskSettings) -> int:
    """Return the micro-batches per step, from the settings or the accelerator; two different numbers are an error."""
    default = 1 if accelerator is None else int(accelerator.gradient_accumulation_steps)
    steps = settings.gradient_accumulation_steps
    if steps is not None and default not in (1, steps):
        raise UserError(
            f"gradient_accumulation_steps is {steps} here and {default} in the Accelerator; give one of them"
        )
    return steps or default
