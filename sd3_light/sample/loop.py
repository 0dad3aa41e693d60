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
    texts: Batch,
    guide: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the latents after all timesteps of the scheduler.

    With ``guide``, ``texts`` has all negative texts, then all prompts, and ``guide`` gets the velocities of both.
    """
    latents = noise
    for number, timestep in enumerate(scheduler.timesteps):
        noisy = latents if guide is None else torch.cat([latents, latents])
        # not timestep / 1000, which has other bits
        t = scheduler.sigmas[number].to(noisy.device).expand(len(noisy))
        batch = Batch(len(noisy), {"noisy": noisy, "t": t, **texts.values}, texts.host)
        velocity = denoise(batch).float()  # the scheduler's result gets this dtype
        if guide is not None:
            velocity = guide(*velocity.chunk(2))
        latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
    return latents
