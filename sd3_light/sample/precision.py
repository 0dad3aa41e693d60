"""Sampling in half precision: the large networks compute in it, everything else stays in float32."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sd3_light.config.faults import UserError

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

SAMPLE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_TENSORS = ("hidden_states", "encoder_hidden_states", "pooled_projections")  # timesteps stay exact


def check_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name; a UserError lists the choices."""
    if name not in SAMPLE_DTYPES:
        raise UserError(f"--dtype {name}: unknown dtype; choose one of {', '.join(SAMPLE_DTYPES)}")
    return SAMPLE_DTYPES[name]


def compute_in(pipe: "DiffusionPipeline", dtype: torch.dtype) -> None:
    """Permanently cast the denoiser and text encoders of a pipeline to ``dtype``, if they are not in it.

    Noise, sampler steps and the VAE stay in float32, so an image starts from the same noise as in float32. (A stock
    pipeline loaded in half precision draws other noise and rounds the latents after each step.)
    """
    if dtype == torch.float32:
        return
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and name != "vae" and part.dtype != dtype:
            part.to(dtype)
    if pipe.transformer is not None:
        pipe.transformer.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
        pipe.transformer.register_forward_hook(_cast_outputs)


def _cast_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    dtype: Any = module.dtype
    cast = {name: kwargs[name].to(dtype) for name in _TENSORS if name in kwargs}
    return tuple(_cast(value, dtype) for value in args), kwargs | cast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast latents and texts that are positional arguments, or lists of them; times have one dimension."""
    if isinstance(value, list):
        return [_cast(item, dtype) for item in value]
    is_cast = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
    return value.to(dtype) if is_cast else value


def _cast_outputs(module: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([tensor.float() for tensor in part] if isinstance(part, list) else part.float() for part in output)
