"""What a task may be told besides the arguments that the documented signature has."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch.utils.data import Dataset

from sd3_light.config import EmaConfig, OptimizerConfig
from sd3_light.config.faults import UserError

Engine = Literal["accelerate", "torch", "deepspeed"]
SCHEDULES = ("constant", "linear", "cosine", "step")


def _whole(least: int, optional: bool = False) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        return (optional and value is None) or (type(value) is int and value >= least)

    return fits


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value < 1


def _one_of(*values: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in values, f"one of {', '.join(values)}"


_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("num_epochs", "batch_size", "logging_steps", "ema_update_every", "keep_last_n_checkpoints"),
        _whole(1),
        "a whole number from 1 on",
    ),
    (
        ("save_steps", "max_steps", "gradient_accumulation_steps", "checkpoint_steps", "eval_steps", "draw_steps"),
        _whole(1, optional=True),
        "a whole number from 1 on",
    ),
    (("lr_step_size",), _whole(1, optional=True), "a whole number from 1 on"),
    (("num_workers", "warmup_steps", "seed", "max_nonfinite_steps"), _whole(0), "a whole number from 0 on"),
    (("learning_rate",), lambda value: _number(value) and value > 0, "a number above 0"),
    (("weight_decay", "gradient_clipping"), lambda value: _number(value) and value >= 0, "a number from 0 on"),
    (("lr_step_gamma",), lambda value: value is None or (_number(value) and value > 0), "a number above 0"),
    (("ema_decay",), lambda value: value is None or _share(value), "a number from 0 to below 1, such as 0.999"),
    (
        ("betas",),
        lambda value: isinstance(value, tuple | list) and len(value) == 2 and all(map(_share, value)),
        "two numbers from 0 to below 1, such as (0.9, 0.999)",
    ),
    (("resume",), lambda value: isinstance(value, bool), "True or False"),
    (("bucket_of", "draw"), lambda value: value is None or callable(value), "a function"),
    (("lr_scheduler",), *_one_of(*SCHEDULES)),
    (("optimizer",), *_one_of("adamw", "adamw8bit", "muon")),
    (("engine",), *_one_of("accelerate", "torch", "deepspeed")),
)
"""Which values fit the settings of these names, and what to give in place of others."""


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
        if isinstance(args, Mapping):
            raise UserError("args is a dict, whose keys are no attributes; give argparse.Namespace(**args)")
        said = {name: getattr(args, name) for name in known if getattr(args, name, None) is not None}
        settings = replace(TaskSettings(), **{**given, **said})
        settings._require()
        return settings

    def _require(self) -> None:
        for names, fits, words in _RULES:
            for name in names:
                if not fits(value := getattr(self, name)):
                    raise UserError(f"{name} is {value!r}; give {words}")
        for one, other in (("eval_dataset", "eval_steps"), ("draw", "draw_steps")):
            given = [name for name in (one, other) if getattr(self, name) is not None]
            if len(given) == 1:
                raise UserError(f"{given[0]} needs {other if given == [one] else one} beside it; give both or none")
        by_step = [name for name in ("lr_step_size", "lr_step_gamma") if getattr(self, name) is not None]
        if self.lr_scheduler == "step" and len(by_step) < 2:
            raise UserError("lr_scheduler 'step' needs lr_step_size and lr_step_gamma")
        if self.lr_scheduler != "step" and by_step:
            raise UserError(f"{by_step[0]} has no meaning without lr_scheduler='step'; leave it out")

    @property
    def optimizer_table(self) -> OptimizerConfig:
        """As `[optimizer]` says it."""
        keys = {"type": self.optimizer, "lr": float(self.learning_rate), "weight_decay": float(self.weight_decay)}
        return OptimizerConfig.model_validate({**keys, "betas": tuple(map(float, self.betas))})

    @property
    def ema_table(self) -> EmaConfig:
        """As `[ema]` says it."""
        if self.ema_decay is None:
            return EmaConfig()
        return EmaConfig(enable=True, decay=self.ema_decay, update_every=self.ema_update_every)
