"""Draw latents with any denoiser: the loop of diffusers' stock pipelines, with the same bits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sd3_light.core.batch import Batch

Denoise = Callable[[Batch], Tensor]
"""A batch of noisy, t and the family's texts -> velocity: `Engine.denoise`."""


def starting_noise(seeds: Sequence[int], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the noise of one image per seed, each from its own CPU generator, as stock pipelines draw it."""
    noise = [torch.randn((1, *shape), generator=torch.Generator("cpu").manual_seed(seed)) for seed in seeds]
    return torch.cat(noise).to(device)


@torch.no_grad()
def draw_latents(
    denoise: Denoise,
    scheduler: Any,
    noise: Tensor,
    texts: Batch | Sequence[Batch],
    guide: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the latents after all timesteps of the scheduler, in the dtype of the noise.

    With ``guide``, ``texts`` are all negative texts, then all prompts, as one batch or as two that are computed one
    after the other, and ``guide`` gets the velocities of both.
    """
    latents = noise
    passes = [texts] if isinstance(texts, Batch) else texts
    copies = passes[0].size // len(noise)
    for timestep in scheduler.timesteps:
        # in float64: 1000 t is the scheduler's number, and t rounds to its quotient
        t = timestep.to(noise.device).double() / scheduler.config.num_train_timesteps
        noisy = torch.cat([latents] * copies) if copies > 1 else latents
        # the scheduler's result gets the dtype of the velocity
        velocity = torch.cat([denoise(_with_noise(part, noisy, t)) for part in passes]).to(latents.dtype)
        if guide is not None:
            velocity = guide(*velocity.chunk(2))
        latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
    return latents


def _with_noise(texts: Batch, noisy: Tensor, t: Tensor) -> Batch:
    return Batch(len(noisy), {"noisy": noisy, "t": t.expand(len(noisy)), **texts.values}, texts.host)
