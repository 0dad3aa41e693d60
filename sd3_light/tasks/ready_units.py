"""Ready-made units: any function as a unit, and encoding an image with a diffusers VAE."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.encoders.vae import LatentScale
from sd3_light.tasks.units import Draw, PipelineUnit, Values

Function = Callable[..., Any]


def unit(*writes: str, uses: str | Sequence[str] = ()) -> Callable[[Function], PipelineUnit]:
    """Turn a function into a unit: ``@unit("text", "pooled", uses="encoders")``.

    The function's first argument is the module; the others are the values that it reads, optional if they have a
    default. An argument ``draw`` makes the unit random. The function returns the value that the unit writes, or a tuple
    for several ``writes``.
    """
    parts = (uses,) if isinstance(uses, str) else tuple(uses)
    if not writes or not all(isinstance(name, str) for name in (*writes, *parts)):
        raise UserError('unit(...) needs the names of the values that it writes: @unit("latents", uses="vae")')
    return lambda function: _FunctionUnit(function, writes, parts)


class _FunctionUnit(PipelineUnit):
    """A unit from a function and its signature."""

    def __init__(self, function: Function, writes: tuple[str, ...], uses: tuple[str, ...]) -> None:
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or any(item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD) for item in parameters):
            raise UserError("a unit's function names its arguments: the module first, then each value that it reads")
        values = parameters[1:]
        self.reads = tuple(
            item.name if item.default is item.empty else f"{item.name}?" for item in values if item.name != "draw"
        )
        self.draws = any(item.name == "draw" for item in values)
        self.writes, self.uses, self.function, self.name = writes, uses, function, function.__name__

    @property
    def label(self) -> str:
        """The function's name."""
        return self.name

    def run(self, module: Any, **values: Any) -> Values:
        """Call the function."""
        written = self.function(module, **values)
        if len(self.writes) == 1:
            return {self.writes[0]: written}
        if not isinstance(written, tuple) or len(written) != len(self.writes):
            raise UserError(f"unit {self.name} writes {list(self.writes)}: return a tuple of {len(self.writes)} values")
        return dict(zip(self.writes, written, strict=True))


class EncodeImage(PipelineUnit):
    """Encodes an image (PIL, or an array [H, W, 3] of bytes) with the module's VAE into moments [2C, h, w]."""

    reads, writes, uses = ("image",), ("moments",), ("vae",)

    def run(self, module: Any, image: Any) -> Values:  # type: ignore[override]
        """Return mean and log-variance of the latent."""
        pixels = torch.from_numpy(np.array(image))
        if pixels.ndim != 3 or pixels.shape[-1] != 3:
            raise UserError(f"EncodeImage: an image has shape {tuple(pixels.shape)}, not [H, W, 3]; convert it to RGB")
        posterior = module.vae.encode(pixels.permute(2, 0, 1)[None].to(module.vae.device, module.vae.dtype) / 127.5 - 1)
        return {"moments": posterior.latent_dist.parameters[0].float()}


class DrawLatent(PipelineUnit):
    """Draws a latent from the moments, again in every epoch, and normalises it with the VAE's scale and shift."""

    reads, writes, draws = ("moments",), ("latents",), True

    def run(self, module: Any, moments: Tensor, draw: Draw) -> Values:  # type: ignore[override]
        """Return the normalised latent [C, h, w]."""
        mean, log_variance = moments.chunk(2)
        latent = mean + torch.exp(0.5 * log_variance) * draw("posterior", tuple(mean.shape))
        config = module.vae.config
        return {"latents": LatentScale(config.scaling_factor, config.shift_factor or 0.0).normalise(latent)}
