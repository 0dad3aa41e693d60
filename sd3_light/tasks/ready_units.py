"""Units that are written often: any function as one, and a picture's way through a diffusers VAE."""

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
    """Make a unit of a function: ``@unit("text", "pooled", uses="encoders")``.

    Its first argument is the module; the others name the values that it reads, those with a default may be missing, and
    ``draw`` makes it random. It returns the value that it writes, or a tuple where ``writes`` names several.
    """
    parts = (uses,) if isinstance(uses, str) else tuple(uses)
    if not writes or not all(isinstance(name, str) for name in (*writes, *parts)):
        raise UserError('unit(...) takes the names of the values that it writes: @unit("latents", uses="vae")')
    return lambda function: _FunctionUnit(function, writes, parts)


class _FunctionUnit(PipelineUnit):
    """A unit by a function and its signature."""

    def __init__(self, function: Function, writes: tuple[str, ...], uses: tuple[str, ...]) -> None:
        given = list(inspect.signature(function).parameters.values())
        if not given or any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in given):
            raise UserError("a unit's function names its arguments: the module first, then each value that it reads")
        arguments = given[1:]
        self.reads = tuple(
            one.name if one.default is one.empty else f"{one.name}?" for one in arguments if one.name != "draw"
        )
        self.draws = any(one.name == "draw" for one in arguments)
        self.writes, self.uses, self.function, self.name = writes, uses, function, function.__name__

    @property
    def label(self) -> str:
        """The function's name."""
        return self.name

    def run(self, module: Any, **values: Any) -> Values:
        """Call the function."""
        found = self.function(module, **values)
        if len(self.writes) == 1:
            return {self.writes[0]: found}
        if not isinstance(found, tuple) or len(found) != len(self.writes):
            raise UserError(f"unit {self.name} writes {list(self.writes)}: return a tuple of {len(self.writes)} values")
        return dict(zip(self.writes, found, strict=True))


class EncodeImage(PipelineUnit):
    """A picture (PIL, or an array [H, W, 3] of bytes) through the module's VAE: its moments [2C, h, w], never drawn."""

    reads, writes, uses = ("image",), ("moments",), ("vae",)

    def run(self, module: Any, image: Any) -> Values:  # type: ignore[override]
        """Mean and log-variance of the latent."""
        pixels = torch.from_numpy(np.array(image))
        if pixels.ndim != 3 or pixels.shape[-1] != 3:
            raise UserError(f"EncodeImage: a picture has {tuple(pixels.shape)}, not [H, W, 3]; convert it to RGB")
        posterior = module.vae.encode(pixels.permute(2, 0, 1)[None].to(module.vae.device, module.vae.dtype) / 127.5 - 1)
        return {"moments": posterior.latent_dist.parameters[0].float()}


class DrawLatent(PipelineUnit):
    """A latent of the moments, drawn anew in every epoch and normalised by the VAE's scale and shift."""

    reads, writes, draws = ("moments",), ("latents",), True

    def run(self, module: Any, moments: Tensor, draw: Draw) -> Values:  # type: ignore[override]
        """The normalised latent [C, h, w]."""
        mean, log_variance = moments.chunk(2)
        latent = mean + torch.exp(0.5 * log_variance) * draw("posterior", tuple(mean.shape))
        config = module.vae.config
        return {"latents": LatentScale(config.scaling_factor, config.shift_factor or 0.0).normalise(latent)}
