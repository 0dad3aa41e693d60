"""What a script gives to a launcher, and what follows from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from sd3_light.config import VALIDATION, AdapterConfig, TrainConfig
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch
from sd3_light.engines.accelerate import launch_from_accelerator
from sd3_light.runlog import info
from sd3_light.tasks.batches import ReadItem, SampleOrder, TaskBatches, any_item_of, item_of
from sd3_light.tasks.logger import ModelLogger, require_logger
from sd3_light.tasks.models import CustomForward, UnitModel, task_model
from sd3_light.tasks.settings import TaskSettings
from sd3_light.tasks.sides import Sides, sides_of


@dataclass(frozen=True)
class TaskCall:
    """The arguments of `launch_training_task`, checked."""

    accelerator: Accelerator | None
    dataset: Any
    model: UnitModel | CustomForward
    logger: Any
    settings: TaskSettings
    folder: Path

    @staticmethod
    def of(
        accelerator: Accelerator | None, dataset: Any, model: nn.Module, logger: ModelLogger, settings: TaskSettings
    ) -> "TaskCall":
        """Raise a `UserError` unless model and logger are what they are used as."""
        call = TaskCall(accelerator, dataset, task_model(model), logger, settings, require_logger(logger))
        call.require_evaluation()
        return call

    @cached_property
    def running(self) -> Accelerator | None:
        """The accelerator if it runs the task; other engines ignore one, but not a DeepSpeed plugin."""
        engine = self.settings.engine
        if engine != "accelerate":
            if getattr(self.accelerator, "distributed_type", None) == DistributedType.DEEPSPEED:
                raise UserError(
                    f'engine="{engine}" does not use the Accelerator\'s DeepSpeed plugin; create it without the '
                    'plugin, and choose the stage by engine="deepspeed" and zero_stage=1 or 2'
                )
            if getattr(self.accelerator, "mixed_precision", "no") != "no":
                info(f'engine="{engine}" does not use the Accelerator\'s mixed_precision')
            return None
        if not isinstance(self.accelerator, Accelerator):
            raise UserError('engine="accelerate" needs an Accelerator; give one, or engine="torch"')
        return self.accelerator

    @cached_property
    def launch(self) -> Launch:
        """The rank and world of this process."""
        return Launch.detect() if self.running is None else launch_from_accelerator(self.running)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.launch.device() if self.running is None else self.running.device

    @property
    def is_bf16(self) -> bool:
        """Whether the accelerator computes in bfloat16."""
        return self.running is not None and self.running.mixed_precision == "bf16"

    @cached_property
    def micro_batches(self) -> int:
        """The micro-batches per step, from the settings or the accelerator; two different numbers are an error."""
        default = 1 if self.accelerator is None else int(self.accelerator.gradient_accumulation_steps)
        steps = self.settings.gradient_accumulation_steps
        if steps is not None and default not in (1, steps):
            raise UserError(
                f"gradient_accumulation_steps is {steps} here and {default} in the Accelerator; give one of them"
            )
        return steps or default

    @cached_property
    def samples(self) -> SampleOrder:
        """The order of the samples."""
        settings = self.settings
        batch = settings.batch_size * self.micro_batches * self.launch.world_size
        indices = None if self.sides is None else self.sides.indices("train")
        return SampleOrder(self.dataset, settings.seed, batch, settings.bucket_of, settings.shuffle_window, indices)

    @cached_property
    def sides(self) -> Sides | None:
        """The sides of the dataset; None if all samples are trained on."""
        return sides_of(self.dataset)

    @property
    def read(self) -> ReadItem:
        """What reads a sample of the dataset."""
        return any_item_of if isinstance(self.model, CustomForward) else item_of

    def evaluation_batches(self) -> Iterator[tuple[str, TaskBatches]]:
        """Yield the name and the batches of each evaluation set: each sample once, in order."""
        batch = self.settings.batch_size * self.launch.world_size
        bucket_of = self.settings.bucket_of
        held_out = None if self.sides is None else self.sides.indices(VALIDATION)
        if held_out:
            samples = SampleOrder(self.dataset, 0, batch, bucket_of, indices=held_out)
            yield VALIDATION, TaskBatches(self.dataset, samples, self.launch, 1, self.read)
        data = self.settings.eval_dataset
        if data is not None:
            yield "eval", TaskBatches(data, SampleOrder(data, 0, batch, bucket_of), self.launch, 1, self.read)

    @property
    def evaluates(self) -> bool:
        """Whether there is an evaluation set, or a part of the dataset is held out."""
        return self.settings.eval_dataset is not None or self.sides is not None

    def require_evaluation(self) -> None:
        """Raise a `UserError` unless evaluation sets have an interval, and an interval has an evaluation set."""
        if self.evaluates and self.settings.eval_steps is None:
            name = "eval_dataset" if self.sides is None else "ImageFolder with validation"
            raise UserError(f"{name} needs eval_steps beside it; give both or none")
        if self.settings.eval_steps is not None and not self.evaluates:
            raise UserError("eval_steps needs eval_dataset beside it, or ImageFolder with validation; give both")

    @cached_property
    def total_steps(self) -> int:
        """The steps of all epochs, at most `max_steps`."""
        total = self.settings.num_epochs * self.samples.order.steps_per_epoch
        return total if self.settings.max_steps is None else min(total, self.settings.max_steps)

    @cached_property
    def config(self) -> TrainConfig:
        """The settings as those of a train TOML."""
        weights = list(self.model.denoiser.parameters())
        adapter = getattr(self.model.module, "adapter", None)
        if adapter is None and len(self.model.trained_weights()) < len(weights):
            adapter = AdapterConfig.model_construct()  # the rest is frozen, as under an adapter
        is_bf16 = self.is_bf16 or any(weight.dtype == torch.bfloat16 for weight in weights)
        config = self.settings.train_config(self.folder, self.micro_batches, adapter, is_bf16)
        dtype = str(getattr(self.logger, "save_dtype", torch.float32)).removeprefix("torch.")
        return config.model_copy(update={"save_dtype": dtype})

    def hooks_accelerator(self) -> Accelerator | None:
        """Return the accelerator for the logger's hooks; loggers of other packages always use one."""
        if isinstance(self.logger, ModelLogger):
            return self.accelerator
        own: Accelerator = self.accelerator or Accelerator(cpu=self.device.type == "cpu")
        world_size = self.launch.world_size
        if own.num_processes != world_size:  # several processes would write each file
            raise UserError(
                f"the logger's Accelerator has {own.num_processes} processes, the task {world_size}; start with "
                "torchrun, on CPUs with ACCELERATE_USE_CPU=true, or use sd3_light.tasks.ModelLogger"
            )
        return own
