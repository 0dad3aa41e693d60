"""`TaskSettings`: everything that `launch_training_task` takes besides its documented arguments."""

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Strict, ValidationError, model_validator

from sd3_light.config import AdapterConfig, EmaConfig, ModelConfig, OptimizerConfig, TrainConfig
from sd3_light.config.base import (
    Allowed,
    Count,
    CountOrAll,
    CountOrZero,
    Decay,
    NotNegative,
    Positive,
    StepsOrShare,
    Table,
    field_types,
    invalid_value,
    wrong_value,
)
from sd3_light.config.faults import UserError
from sd3_light.config.schema_tables import OptimizerName
from sd3_light.data.order import WINDOW
from sd3_light.optim.customized import CustomizedOptimizer

_FUNCTION = Allowed("a function")
_Flag = Annotated[bool, Strict(), Allowed("True or False")]
_OFFLOADING = ("enable_model_cpu_offload", "enable_optimizer_cpu_offload", "cpu_offload_split_threshold")
_DEFAULT_ZERO_STAGE = 2
_BETAS = Allowed("two numbers from 0 to below 1, such as (0.9, 0.999)")


class TaskSettings(Table):
    """How a task trains. Intervals are in optimizer steps.

    ``bucket_of(index)`` names the group of samples that may share a batch, such as those of one size; by default all
    may. ``gradient_accumulation_steps`` defaults to the accelerator's. The schedule "constant" is constant after the
    warm-up. Without ``checkpoint_steps`` a checkpoint is written at the end and when the process is asked to stop.
    ``swap_blocks`` is that of a train TOML. ``draw(module)`` returns an image. ``ema`` has the keys of [ema], for
    several averages: all are validated, and at the end the logger saves the others beside the main one, as
    ``FILE.NAME.safetensors``.
    """

    learning_rate: Positive = 1e-5
    weight_decay: NotNegative = 1e-2
    num_workers: CountOrZero = 1
    prefetch_batches_per_worker: Count = 1
    save_steps: Count | None = None
    num_epochs: Count = 1
    max_steps: Count | None = None
    batch_size: Count = 1
    bucket_of: Annotated[Callable[[int], Hashable], _FUNCTION] | None = None
    shuffle_window: Count | None = None
    cache_residence: Literal["auto", "stream", "host", "device"] = "auto"
    gradient_accumulation_steps: Count | None = None
    gradient_clipping: NotNegative = 1.0
    swap_blocks: CountOrAll = 0
    lr_scheduler: Literal["constant", "linear", "cosine", "step"] = "constant"
    warmup_steps: CountOrZero = 0
    lr_step_size: Count | None = None
    lr_step_gamma: Positive | None = None
    cooldown_steps: StepsOrShare = 0
    cooldown_shape: Literal["linear", "sqrt"] = "linear"
    optimizer: OptimizerName = "adamw"
    customized_optimizer: Annotated[str, Allowed("the path of a class, such as 'torch.optim.Adam'")] | None = None
    betas: Annotated[tuple[Decay, Decay], _BETAS] = (0.9, 0.999)
    ema_decay: Decay | None = None
    ema_update_every: Count = 1
    ema: Annotated[EmaConfig, Allowed("the keys of [ema], such as {'decay': 0.999, 'track': [...]}")] | None = None
    seed: CountOrZero = 0
    checkpoint_steps: Count | None = None
    keep_last_n_checkpoints: Count = 1
    stop_if_first_save_fails: _Flag = True
    resume: _Flag = False
    eval_dataset: Any = None
    eval_steps: Count | None = None
    eval_at_fixed_t: _Flag = False
    draw: Annotated[Callable[[Any], Any], _FUNCTION] | None = None
    draw_steps: Count | None = None
    logging_steps: Count = 1
    max_nonfinite_steps: CountOrZero = 10
    engine: Literal["accelerate", "torch", "deepspeed"] = "accelerate"
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    zero_stage: Literal[1, 2, 3] | None = None

    @staticmethod
    def of(settings: Mapping[str, Any], args: Any = None) -> "TaskSettings":
        """Return the settings of a call; attributes of ``args``, such as an argparse namespace, override if not None.

        An invalid setting is a one-line `UserError` that names it and the remedy.
        """
        names = TaskSettings.model_fields.keys()
        for name in _OFFLOADING:
            if settings.get(name) or getattr(args, name, None):
                raise UserError(f"{name} is not supported; leave it out and train an adapter with base_bits=4 instead")
        settings = {name: value for name, value in settings.items() if name not in _OFFLOADING}
        if unknown := sorted(settings.keys() - names):
            raise UserError(f"launch_training_task does not know {unknown[0]!r}; it knows {', '.join(sorted(names))}")
        if isinstance(args, Mapping):
            raise UserError("args is a dict, whose keys are not attributes; give argparse.Namespace(**args)")
        overrides = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
        if (workers := getattr(args, "dataset_num_workers", None)) is not None:
            overrides["num_workers"] = workers
        values = {**settings, **overrides}
        try:
            return TaskSettings.model_validate(values)
        except ValidationError as error:
            raise UserError(_first_problem(error, values)) from error

    @model_validator(mode="after")
    def _require_consistent(self) -> Self:
        if self.draw is not None and self.draw_steps is None:
            raise invalid_value("draw needs draw_steps beside it; give both or none")
        if self.draw is None and self.draw_steps is not None:
            raise invalid_value("draw_steps needs draw beside it; give both or none")
        if self.customized_optimizer is not None and (self.optimizer != "adamw" or self.engine == "deepspeed"):
            other = "optimizer" if self.optimizer != "adamw" else 'engine="deepspeed"'
            raise invalid_value(f"customized_optimizer does not go with {other}; give one of them")
        if self.engine == "deepspeed" and self.optimizer != "adamw":
            raise invalid_value(
                f'engine="deepspeed" supports AdamW only, not {self.optimizer!r}; use adamw or another engine'
            )
        if self.parallel != "ddp" and self.engine != "torch":
            raise invalid_value('parallel="fsdp2" is a layout of engine="torch"; give both, or accelerate\'s plugin')
        if self.swap_blocks and (self.engine == "deepspeed" or self.parallel == "fsdp2"):
            raise invalid_value("swap_blocks needs whole weights, which DeepSpeed and FSDP2 do not leave; use 0")
        if self.zero_stage is not None and self.engine != "deepspeed":
            raise invalid_value('zero_stage has no effect without engine="deepspeed"; leave it out')
        if self.zero_stage == 3:
            raise invalid_value(
                "zero_stage=3 is not supported for tasks: it shards the weights, which modules and loggers read whole; "
                "use 1 or 2, or accelerate's FSDP2"
            )
        if self.ema is not None and self.ema_decay is not None:
            raise invalid_value("ema and ema_decay both set the decay; give one of them")
        step_settings = [name for name in ("lr_step_size", "lr_step_gamma") if getattr(self, name) is not None]
        if self.lr_scheduler == "step" and len(step_settings) < 2:
            raise invalid_value("lr_scheduler='step' needs lr_step_size and lr_step_gamma")
        if self.lr_scheduler != "step" and step_settings:
            raise invalid_value(f"{step_settings[0]} has no effect without lr_scheduler='step'; leave it out")
        if self.cooldown_steps and self.lr_scheduler in ("linear", "cosine"):
            raise invalid_value(f"lr_scheduler={self.lr_scheduler!r} decays by itself; leave cooldown_steps out")
        return self

    def plain_values(self) -> dict[str, Any]:
        """Return the settings that are numbers, texts or flags, to show in a tracker."""
        return {name: value for name, value in self if isinstance(value, str | int | float)}

    def train_config(
        self, output_dir: Path, micro_batches: int, adapter: AdapterConfig | None, is_bf16: bool
    ) -> TrainConfig:
        """Return the settings as those of a train TOML, which engines and estimates read."""
        shared = TaskSettings.model_fields.keys() & TrainConfig.model_fields.keys()
        own = {
            "output_dir": output_dir,
            "epochs": self.num_epochs,
            "micro_batch_size_per_gpu": self.batch_size,
            "gradient_accumulation_steps": micro_batches,
            "num_dataloader_workers": self.num_workers,
            "dataloader_prefetch_per_worker": self.prefetch_batches_per_worker,
            "shuffle_window": self.shuffle_window or WINDOW,
            "zero_stage": (self.zero_stage or _DEFAULT_ZERO_STAGE) if self.engine == "deepspeed" else 0,
            "checkpoint_every_n_steps": self.checkpoint_steps,
            "save_every_n_steps": self.save_steps,
            "save_every_n_epochs": None if self.save_steps else 1,
            "eval_datasets": () if self.eval_dataset is None else (self.eval_dataset,),
            "eval_every_n_steps": self.eval_steps,
            "compile": False,
            "optimizer": self._optimizer(),
            "ema": self._ema(),
            "adapter": adapter,
            "model": ModelConfig.model_construct(
                diffusers_path=output_dir, transformer_dtype="bfloat16" if is_bf16 else "float32"
            ),
        }
        # without validation: the settings are valid, and no file is read by these paths
        return TrainConfig.model_construct(**{**{name: getattr(self, name) for name in shared}, **own})

    def _optimizer(self) -> OptimizerConfig:
        table = {"type": self.optimizer, "lr": self.learning_rate, "weight_decay": self.weight_decay}
        if self.customized_optimizer is not None:
            return CustomizedOptimizer.model_validate({**table, "path": self.customized_optimizer})
        return OptimizerConfig.model_validate({**table, "betas": self.betas})

    def _ema(self) -> EmaConfig:
        if self.ema is not None:
            return self.ema.model_copy(update={"enable": True})
        if self.ema_decay is None:
            return EmaConfig()
        return EmaConfig(enable=True, decay=self.ema_decay, update_every=self.ema_update_every)


def _first_problem(error: ValidationError, values: Mapping[str, Any]) -> str:
    """Return the first problem as one line."""
    problem = error.errors(include_url=False)[0]
    if not problem["loc"]:
        return problem["msg"]
    name = str(problem["loc"][0])
    return str(wrong_value(name, values[name], field_types(TaskSettings)[name]))
