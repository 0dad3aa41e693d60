"""What a task may be told besides the arguments that the documented signature has."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch.utils.data import Dataset

from sd3_light.config import EmaConfig, OptimizerConfig
from sd3_light.config.faults import UserError

Engine = Literal["accelerate", "torch", "deepspeed"]
SCHEDULES = ("constant", "linear", "cosine", "step")


@dataclass(frozen=True)
class TaskSettings:
    """How a task trains. Counts of steps are optimizer steps.

    ``bucket_of(index)`` names the samples that may share a batch, such as by size; without it all may.
    ``gradient_accumulation_steps`` None takes the accelerator's. ``constant`` is constant from the end of the warm-up
    on. ``checkpoint_steps`` None: at the end and when the process is told to stop. ``draw(module)`` gives a picture.
    """

    learning_rate: float = 1e-5
    weight_decay: float = 1e-2
    num_workers: int = 1
    save_steps: int | None = None
    num_epochs: int = 1
    max_steps: int | None = None
    batch_size: int = 1
    bucket_of: Callable[[int], Hashable] | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float = 1.0
    lr_scheduler: Literal["constant", "linear", "cosine", "step"] = "constant"
    warmup_steps: int = 0
    lr_step_size: int | None = None
    lr_step_gamma: float | None = None
    optimizer: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    ema_decay: float | None = None
    ema_update_every: int = 1
    seed: int = 0
    checkpoint_steps: int | None = None
    keep_last_n_checkpoints: int = 1
    resume: bool = False
    eval_dataset: Dataset[Any] | None = None
    eval_steps: int | None = None
    draw: Callable[[Any], Any] | None = None
    draw_steps: int | None = None
    logging_steps: int = 1
    max_nonfinite_steps: int = 10
    engine: Engine = "accelerate"

    @staticmethod
    def of(given: Mapping[str, Any], args: Any = None) -> "TaskSettings":
        """The settings of a call; an attribute of ``args`` (an argparse namespace, say) that is not None overrides."""
        known = {field.name for field in fields(TaskSettings)}
        if unknown := sorted(given.keys() - known):
            raise UserError(f"launch_training_task does not know {unknown[0]!r}; it knows {', '.join(sorted(known))}")
        said = {name: getattr(args, name) for name in known if getattr(args, name, None) is not None}
        settings = replace(TaskSettings(), **{**given, **said})
        settings._require()
        return settings

    def _require(self) -> None:
        wrong = [
            name
            for name in ("num_epochs", "batch_size", "logging_steps", "ema_update_every")
            if not (isinstance(getattr(self, name), int) and getattr(self, name) >= 1)
        ]
        optional = ("save_steps", "max_steps", "gradient_accumulation_steps", "checkpoint_steps", "eval_steps")
        wrong += [name for name in optional if (value := getattr(self, name)) is not None and value < 1]
        if wrong:
            raise UserError(f"{wrong[0]} is {getattr(self, wrong[0])!r}; give a whole number from 1 on")
        if self.lr_scheduler not in SCHEDULES:
            raise UserError(f"lr_scheduler is {self.lr_scheduler!r}; give one of {', '.join(SCHEDULES)}")
        if self.lr_scheduler == "step" and None in (self.lr_step_size, self.lr_step_gamma):
            raise UserError("lr_scheduler 'step' needs lr_step_size and lr_step_gamma")
        if self.eval_steps is not None and self.eval_dataset is None:
            raise UserError("eval_steps needs an eval_dataset")

    @property
    def optimizer_table(self) -> OptimizerConfig:
        """As `[optimizer]` says it."""
        keys = {"type": self.optimizer, "lr": float(self.learning_rate), "weight_decay": float(self.weight_decay)}
        return OptimizerConfig.model_validate({**keys, "betas": self.betas})

    @property
    def ema_table(self) -> EmaConfig:
        """As `[ema]` says it."""
        if self.ema_decay is None:
            return EmaConfig()
        return EmaConfig(enable=True, decay=self.ema_decay, update_every=self.ema_update_every)
