"""The flow-matching loss of a DiffSynth pipeline, as a function of the pipeline and its inputs."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sd3_light.config.faults import UserError

_PIPE = ("scheduler", "model_fn", "in_iteration_models", "torch_dtype", "device")
_SCHEDULER = ("timesteps", "add_noise", "training_target", "training_weight")


def pipe_flow_loss(pipe: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the weighted squared error of the pipeline's prediction at a random timestep, from the global generators.

    ``input_latents`` is the clean sample. ``min_timestep_boundary`` and ``max_timestep_boundary``, fractions of the
    scheduler's timesteps, limit the choice; ``first_frame_latents`` replace the first frame, which then has no loss.
    """
    _require_pipe(pipe, inputs)
    scheduler = pipe.scheduler
    clean = inputs["input_latents"]
    count = len(scheduler.timesteps)
    low, high = (int(inputs.get(f"{side}_timestep_boundary", at) * count) for side, at in (("min", 0), ("max", 1)))
    if not 0 <= low < high <= count:
        raise UserError(f"no timestep lies between min_ and max_timestep_boundary ({low} and {high} of {count})")
    timestep = scheduler.timesteps[torch.randint(low, high, (1,))].to(dtype=pipe.torch_dtype, device=pipe.device)
    noise = torch.randn_like(clean) * inputs.get("noise_scale", 1.0)
    noisy = scheduler.add_noise(clean, noise, timestep)
    target = scheduler.training_target(clean, noise, timestep)
    first = inputs.get("first_frame_latents")
    if first is not None:
        noisy = torch.cat([first.to(noisy), noisy[:, :, 1:]], dim=2)
    models = {name: getattr(pipe, name) for name in pipe.in_iteration_models}
    predicted = pipe.model_fn(**models, **{**inputs, "latents": noisy}, timestep=timestep)
    if first is not None:
        predicted = predicted[:, :, 1:]
        target = target[:, :, 1:]
    error = functional.mse_loss(predicted.float(), target.float())
    weighted: Tensor = error * scheduler.training_weight(timestep)
    return weighted


def _require_pipe(pipe: Any, inputs: dict[str, Any]) -> None:
    missing = [name for name in _PIPE if not hasattr(pipe, name)]
    missing += [f"scheduler.{name}" for name in _SCHEDULER if not hasattr(getattr(pipe, "scheduler", None), name)]
    if missing:
        raise UserError(
            f"FlowMatchSFTLoss(pipe, **inputs): the pipe is a {type(pipe).__name__} without {missing[0]!r}; give a "
            "pipeline with DiffSynth's interface, or the loss's own settings by name"
        )
    if not isinstance(inputs.get("input_latents"), Tensor):
        raise UserError("FlowMatchSFTLoss(pipe, **inputs): the inputs have no tensor 'input_latents'; encode the image")
    if "lora" in inputs:
        raise UserError("FlowMatchSFTLoss(pipe, **inputs): a LoRA as input is not supported; use DiffSynth's own loss")
