"""The samplers, each with the times as training shifted them.

All are diffusers' own. They place their times a little differently: Euler and Heun from 1 down to sigma_min, DPM++
from 0.999 in equal parts, rounded down to whole thousandths for the model.
"""

from typing import TYPE_CHECKING, Any

from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler

from sd3_light.config.faults import UserError

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline

SAMPLERS = {"euler": "Euler", "heun": "Heun", "dpm++": "DPM++ 2M"}
"""Our name of each sampler -> the name that other programs know it by."""

_DYNAMIC = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
# Settings of a scheduler that bend the times further; the other samplers' classes do not know them.
_BENDS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas", "shift_terminal")


def flow_scheduler(shift: float | None, flux_shift: bool) -> FlowMatchEulerDiscreteScheduler:
    """Stock Euler steps with the trained shift: 1.0 where there was none, dynamic with `flux_shift`."""
    return FlowMatchEulerDiscreteScheduler(shift=shift or 1.0, use_dynamic_shifting=flux_shift)


def check_sampler(name: str) -> None:
    """A UserError with the choices, unless there is a sampler of this name."""
    if name not in SAMPLERS:
        raise UserError(f"--sampler {name}: there is none of this name; choose among {', '.join(SAMPLERS)}")


def use_sampler(pipe: "StableDiffusion3Pipeline", name: str) -> None:
    """Let a pipeline draw by this sampler from now on, with the shift of the scheduler it has."""
    check_sampler(name)
    pipe.scheduler = _sampler(pipe.scheduler, name)


def _sampler(given: Any, name: str) -> Any:
    if not isinstance(given, FlowMatchEulerDiscreteScheduler):
        kind = type(given).__name__
        raise UserError(f"the model's scheduler is a {kind}; its folder must say FlowMatchEulerDiscreteScheduler")
    config = given.config
    if name == "euler":
        return given
    bent = [key for key in _BENDS if config.get(key)]
    if bent:
        raise UserError(
            f"--sampler {name}: the model's scheduler has {', '.join(bent)}, only euler knows it; use euler"
        )
    if name == "heun":
        return _heun(config)
    return _dpm(config)


def _heun(config: Any) -> FlowMatchHeunDiscreteScheduler:
    if config.use_dynamic_shifting:
        raise UserError(
            "--sampler heun: the model was trained with flux_shift, which diffusers' Heun lacks; use euler or dpm++"
        )
    return FlowMatchHeunDiscreteScheduler(num_train_timesteps=config.num_train_timesteps, shift=config.shift)


def _dpm(config: Any) -> DPMSolverMultistepScheduler:
    if config.use_dynamic_shifting and config.time_shift_type != "exponential":
        raise UserError(
            f"--sampler dpm++: diffusers has no {config.time_shift_type} time shift for it; use --sampler euler"
        )
    scheduler = DPMSolverMultistepScheduler(
        num_train_timesteps=config.num_train_timesteps,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=config.shift,
        use_dynamic_shifting=config.use_dynamic_shifting,
    )
    # the pipeline reads these from whatever scheduler it has, and its own defaults are others
    scheduler.register_to_config(**{key: config[key] for key in _DYNAMIC})
    return scheduler
