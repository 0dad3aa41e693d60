"""The samplers, each with the timestep shift of training.

All are diffusers' schedulers. Their timesteps differ slightly: Euler and Heun go from 1 down to sigma_min, DPM++ from
0.999 in equal steps, rounded down to thousandths for the model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    SchedulerMixin,
)

from sd3_light.config.faults import UserError
from sd3_light.core.sampling import PipelineInputs
from sd3_light.model.part_configs import read_config

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

SAMPLERS = {"euler": "Euler", "heun": "Heun", "dpm++": "DPM++ 2M"}
"""Our name of each sampler -> the name in other programs."""

_DYNAMIC = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
_LAST_TIME = "shift_terminal"
# Scheduler settings that change the timesteps further; the other samplers do not support them.
_EULER_ONLY = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas", "shift_terminal")


def flow_scheduler(
    shift: float | None, flux_shift: bool, kept: Mapping[str, Any] | None = None, last_time: float | None = None
) -> FlowMatchEulerDiscreteScheduler:
    """Return the stock Euler scheduler with the shift of training: 1.0 by default, dynamic with `flux_shift`.

    ``kept`` is the config of a scheduler to use as it is; ``last_time`` is that of the last call.
    """
    if kept is not None:
        ends = {} if last_time is None else {_LAST_TIME: last_time}
        scheduler: FlowMatchEulerDiscreteScheduler = FlowMatchEulerDiscreteScheduler.from_config({**kept, **ends})
        return scheduler
    return FlowMatchEulerDiscreteScheduler(
        shift=shift or 1.0, use_dynamic_shifting=flux_shift, shift_terminal=last_time
    )


def ending_at(scheduler: Any, last_time: float) -> Any:
    """Return a scheduler whose last call is at this time; of another kind than flow matching's Euler as it is."""
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        return scheduler
    return type(scheduler).from_config({**scheduler.config, _LAST_TIME: last_time})


def folder_scheduler(folder: Path, shift: float | None = None) -> Any:
    """Return the scheduler of a diffusers folder, in the class that it names; ``shift`` replaces its own shift."""
    config = read_config(folder / "scheduler", "scheduler")
    name = config.get("_class_name")
    kind = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, SchedulerMixin)):
        raise UserError(f"{folder}: its scheduler is a {name!r:.80}, which diffusers lacks; download the folder again")
    scheduler_class: Any = kind
    scheduler = scheduler_class.from_config(config)
    return scheduler if shift is None else with_shift(scheduler, shift)


def with_shift(scheduler: Any, shift: float) -> Any:
    """Return a scheduler with a constant shift; one that has it already as it is. Raises UserError if it has none."""
    if shift == shift_of(scheduler):
        return scheduler
    keys = [key for key in ("flow_shift", "shift") if key in scheduler.config]
    if not keys:
        raise UserError(f"shift: the model's scheduler, a {type(scheduler).__name__}, has none; leave it out")
    return type(scheduler).from_config({**scheduler.config, keys[0]: shift, "use_dynamic_shifting": False})


def shift_of(scheduler: Any) -> float | None:
    """Return the constant shift of a scheduler; None if it depends on the resolution, or there is none."""
    config = scheduler.config
    shift: float | None = config.get("flow_shift", config.get("shift"))
    return None if config.get("use_dynamic_shifting") else shift


def set_timesteps(
    scheduler: Any, steps: int, tokens: int, device: "torch.device", sigmas: Sequence[float] | None = None
) -> None:
    """Set a scheduler's timesteps as stock pipelines do; a dynamic shift depends on the number of image ``tokens``.

    ``sigmas`` are those of a pipeline that has its own, before the shift.
    """
    config = scheduler.config
    options: dict[str, Any] = {}
    if config.use_dynamic_shifting:
        slope = (config.max_shift - config.base_shift) / (config.max_image_seq_len - config.base_image_seq_len)
        options["mu"] = tokens * slope + (config.base_shift - slope * config.base_image_seq_len)
    if sigmas is not None:
        options["sigmas"] = sigmas
    scheduler.set_timesteps(steps, device=device, **options)


def check_sampler(name: str) -> None:
    """Raise a UserError with the choices for an unknown sampler."""
    if name not in SAMPLERS:
        raise UserError(f"--sampler {name}: unknown sampler; choose one of {', '.join(SAMPLERS)}")


def use_sampler(pipe: "DiffusionPipeline", name: str, policy: PipelineInputs | None = None) -> None:
    """Replace a pipeline's scheduler with this sampler, with the same shift. "euler" keeps a model's own scheduler.

    ``policy`` knows the samplers that the pipeline can draw with; without it, all are tried.
    """
    check_sampler(name)
    scheduler = pipe.scheduler
    if name == "euler":
        return
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        kind = type(scheduler).__name__
        raise UserError(f"--sampler {name}: the model has its own scheduler, a {kind}; leave the option out")
    config = scheduler.config
    unsupported = [key for key in _EULER_ONLY if config.get(key)]
    if unsupported:
        raise UserError(
            f"--sampler {name}: the model's scheduler sets {', '.join(unsupported)}, which only euler supports; "
            "use --sampler euler"
        )
    if policy is not None and not policy.takes_sampler(name, config.use_dynamic_shifting):
        kind = type(pipe).__name__
        raise UserError(f"--sampler {name}: {kind} sets times that this sampler does not support; use --sampler euler")
    pipe.scheduler = _heun(config) if name == "heun" else _dpm(config)


def sampler_title(scheduler: Any, name: str) -> str:
    """Return the name of a sampler in other programs; of a model's own scheduler its class."""
    is_own = name == "euler" and not isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    return type(scheduler).__name__ if is_own else SAMPLERS[name]


def _heun(config: Any) -> FlowMatchHeunDiscreteScheduler:
    if config.use_dynamic_shifting:
        raise UserError(
            "--sampler heun: diffusers' Heun does not support flux_shift, which the model needs; use euler or dpm++"
        )
    return FlowMatchHeunDiscreteScheduler(num_train_timesteps=config.num_train_timesteps, shift=config.shift)


def _dpm(config: Any) -> DPMSolverMultistepScheduler:
    if config.use_dynamic_shifting and config.time_shift_type != "exponential":
        raise UserError(
            f"--sampler dpm++: diffusers does not support its {config.time_shift_type} time shift; use --sampler euler"
        )
    scheduler = DPMSolverMultistepScheduler(
        num_train_timesteps=config.num_train_timesteps,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=config.shift,
        use_dynamic_shifting=config.use_dynamic_shifting,
    )
    # the pipeline reads these from its scheduler, and its defaults differ
    scheduler.register_to_config(**{key: config[key] for key in _DYNAMIC})
    return scheduler
