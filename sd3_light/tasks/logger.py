"""`ModelLogger`: when a task saves, and under which file names."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.config.schema_tables import MonitoringConfig
from sd3_light.engines.errors import as_user_error
from sd3_light.export.of_run import gather_trainable
from sd3_light.export.trained_file import write_trained, write_weights
from sd3_light.runlog import info


class ModelLogger:
    """Saves what trains to ``output_path``.

    The files are ``step-N.safetensors`` every ``save_steps`` optimizer steps, or ``epoch-E.safetensors`` after each
    epoch. If only an adapter trains, only its weights are saved.

    ``remove_prefix_in_ckpt`` is removed from the names in the file; then ``state_dict_converter`` may rename them. A
    module with a custom forward chooses its weights and names by ``export_trainable_state_dict``, if it has one. A task
    with an EMA saves the averaged weights.

    `log.jsonl` and TensorBoard are always written; ``enable_wandb_log`` adds Weights & Biases. The other arguments of
    DiffSynth's logger are accepted if they are off or not needed here.
    """

    def __init__(
        self,
        output_path: str | Path,
        remove_prefix_in_ckpt: str | None = None,
        state_dict_converter: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] | None = None,
        save_dtype: torch.dtype = torch.float32,
        enable_tensorboard_log: bool = True,
        enable_swanlab_log: bool = False,
        swanlab_project: str | None = None,
        enable_wandb_log: bool = False,
        wandb_project: str = "sd3-light",
        enable_csv_log: bool = False,
    ) -> None:
        if not isinstance(output_path, str | Path):
            raise UserError(f"ModelLogger: output_path is {output_path!r}; give a folder")
        dtype: Any = save_dtype
        if not isinstance(dtype, torch.dtype) or not save_dtype.is_floating_point:
            raise UserError(f"ModelLogger: save_dtype is {save_dtype!r}; give torch.float32, bfloat16 or float16")
        if state_dict_converter is not None and not callable(state_dict_converter):
            raise UserError(
                "ModelLogger: state_dict_converter is not a function; give one from state dict to state dict"
            )
        if enable_swanlab_log:
            raise UserError("ModelLogger: enable_swanlab_log is not supported; use enable_wandb_log, or TensorBoard")
        if enable_csv_log:
            info(f"enable_csv_log: every loss is in {Path(output_path) / 'log.jsonl'}")
        self.monitoring = MonitoringConfig(enable_wandb=enable_wandb_log, wandb_tracker_name=wandb_project)
        self.output_path = Path(output_path)
        self.remove_prefix_in_ckpt = remove_prefix_in_ckpt or ""
        self.state_dict_converter = state_dict_converter
        self.save_dtype = save_dtype
        self.num_steps = 0
        self._saved_at = -1

    def on_step_end(self, accelerator: Any, model: Any, save_steps: int | None = None, **fields: Any) -> None:
        """Save after an optimizer step if ``save_steps`` is due.

        An override is called after every step; ``fields`` has the step's ``loss``, a tensor on the device.
        """
        self.num_steps += 1
        if save_steps is not None and self.num_steps % save_steps == 0:
            self.save_model(accelerator, model, f"step-{self.num_steps}.safetensors")

    def on_epoch_end(self, accelerator: Any, model: Any, epoch_id: int) -> None:
        """Save after an epoch."""
        self.save_model(accelerator, model, f"epoch-{epoch_id}.safetensors")

    def on_training_end(self, accelerator: Any, model: Any, save_steps: int | None = None) -> None:
        """Save after the last step what the intervals left out."""
        if save_steps is not None and self._saved_at != self.num_steps:
            self.save_model(accelerator, model, f"step-{self.num_steps}.safetensors")

    def save_model(self, accelerator: Any, model: Any, file_name: str) -> Path:
        """Write ``file_name``; all processes call it, the main one writes."""
        self._saved_at = self.num_steps
        path = self.output_path / file_name
        transformer = None if getattr(model, "has_custom_forward", True) else model.transformer
        state = gather_trainable(model if transformer is None else transformer)
        if state is not None:
            facts = {"step": self.num_steps, "class": type(transformer or model).__name__}
            with torch.autocast("cpu", enabled=False):  # hooks may run under autocast; files keep what was trained
                if transformer is None:
                    write_weights(path, self._converted(self._exported(model, state)), self.save_dtype, facts)
                else:
                    rename = self._converted if self.remove_prefix_in_ckpt or self.state_dict_converter else None
                    write_trained(path, state, transformer, model.adapter, self.save_dtype, facts, rename)
            info(f"saved {path}")
        return path

    def _exported(self, model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that a module with a custom forward wants to save."""
        if not hasattr(model, "export_trainable_state_dict"):
            return state
        with as_user_error(f"export_trainable_state_dict of {type(model).__name__}"):
            return dict(model.export_trainable_state_dict(state, remove_prefix=self.remove_prefix_in_ckpt))

    def _converted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        plain = {name.removeprefix(self.remove_prefix_in_ckpt): tensor for name, tensor in tensors.items()}
        if self.state_dict_converter is None:
            return plain
        with as_user_error("state_dict_converter"):
            state: dict[str, Any] = dict(self.state_dict_converter(plain))
        wrong = [name for name, tensor in state.items() if not isinstance(tensor, Tensor)]
        if wrong or not state:
            raise UserError(
                f"state_dict_converter returned no tensor for {wrong[:1] or 'any name'}; return a state dict"
            )
        return state


def require_logger(logger: Any) -> Path:
    """Return the folder of a logger: a `ModelLogger`, or an object with its attributes and methods."""
    names = ("output_path", "on_step_end", "on_epoch_end", "on_training_end")
    if missing := [name for name in names if not hasattr(logger, name)]:
        kind = type(logger).__name__
        raise UserError(f"the logger is a {kind}; give ModelLogger(output_path), or a class with {missing[0]}")
    return Path(logger.output_path)


def call_on_step_end(logger: Any, accelerator: Any, model: Any, save_steps: int | None, loss: Tensor) -> None:
    """Call ``on_step_end`` with the step's loss, if it takes one."""
    parameters = inspect.signature(logger.on_step_end).parameters.values()
    takes_loss = any(item.name == "loss" or item.kind == item.VAR_KEYWORD for item in parameters)
    logger.on_step_end(accelerator, model, save_steps, **({"loss": loss} if takes_loss else {}))
