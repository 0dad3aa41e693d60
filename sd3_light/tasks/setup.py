"""What a task is made of by its settings: where it runs, its engine and precision, its learning rate."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from accelerate import Accelerator

from sd3_light.config.faults import UserError
from sd3_light.engines import Engine, Launch, deepspeed
from sd3_light.engines.accelerate import TaskEngine, launch_from_accelerator
from sd3_light.engines.processes import ProcessGroups
from sd3_light.optim.schedules import learning_rate as rate_at
from sd3_light.tasks.module import DiffusionTrainingModule
from sd3_light.tasks.settings import TaskSettings


def place_of(accelerator: Accelerator | None, wishes: TaskSettings) -> tuple[Launch, torch.device]:
    """Who this process is, and its device; the accelerator says so where it runs the task."""
    if wishes.engine != "accelerate":
        launch = Launch.detect()
        return launch, launch.device()
    if not isinstance(accelerator, Accelerator):
        raise UserError('engine="accelerate" needs an Accelerator; give one, or engine="torch"')
    return launch_from_accelerator(accelerator), accelerator.device


def engine_of(
    model: DiffusionTrainingModule,
    wishes: TaskSettings,
    micro: int,
    launch: Launch,
    device: torch.device,
    accelerator: Accelerator | None,
    groups: ProcessGroups,
) -> Engine:
    """The engine that was asked for, with the module in it."""
    optimizer, clip = wishes.optimizer_table, wishes.gradient_clipping
    if wishes.engine != "deepspeed":
        wrapping = accelerator if wishes.engine == "accelerate" else None
        return TaskEngine(model, optimizer, clip, launch, device, wrapping, groups.writers)
    return deepspeed.make_task_engine(model, optimizer, clip, micro, launch, device)


def computes_in_bf16(accelerator: Accelerator | None, wishes: TaskSettings) -> bool:
    """Whether steps run under autocast; other engines do not ask an accelerator that was given besides."""
    return wishes.engine == "accelerate" and accelerator is not None and accelerator.mixed_precision == "bf16"


def autocast_of(accelerator: Accelerator | None, wishes: TaskSettings) -> AbstractContextManager[Any]:
    """Inside the block people's own functions compute with the module as a step does."""
    if accelerator is None or not computes_in_bf16(accelerator, wishes):
        return nullcontext()
    return cast(AbstractContextManager[Any], accelerator.autocast())


def accumulation_of(accelerator: Accelerator | None, wishes: TaskSettings) -> int:
    """Micro-batches a step: as asked for, or as the accelerator says. Two different numbers are a fault."""
    own = 1 if accelerator is None else int(accelerator.gradient_accumulation_steps)
    asked = wishes.gradient_accumulation_steps
    if asked is not None and own not in (1, asked):
        raise UserError(f"gradient_accumulation_steps is {asked} here and {own} in the Accelerator; give one of them")
    return asked or own


def rate_of(wishes: TaskSettings, step: int, total: int) -> float:
    """The learning rate of a step."""
    return rate_at(
        step,
        peak=wishes.learning_rate,
        schedule=wishes.lr_scheduler,
        warmup=wishes.warmup_steps,
        total=total,
        step_size=wishes.lr_step_size,
        step_gamma=wishes.lr_step_gamma,
    )
