"""Losses with one signature: ``loss(denoise, inputs, reference) -> loss per sample [B]``.

``denoise(noisy, t, inputs)`` predicts the velocity. ``inputs`` are a batch's values by name, including the random
``quantile`` [B] in (0, 1) and ``noise``, shaped like the value that the loss's ``latents`` names. ``reference`` is the
denoiser before training, for losses that compare with it. ``reads`` lists the values that a loss needs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sd3_light.config import ModelConfig, TrainConfig, UserError
from sd3_light.config.base import require_value
from sd3_light.config.cross_checks import TIME_KEYS, timestep_faults
from sd3_light.flow.diffsynth_loss import pipe_flow_loss
from sd3_light.flow.objective import flow_loss, inside_and_outside, interpolate, velocity
from sd3_light.flow.timesteps import times_from_quantiles
from sd3_light.model.device_copy import to_device

Inputs = Mapping[str, Any]
Denoise = Callable[[Tensor, Tensor, Inputs], Tensor]


def _default(key: str) -> Any:
    """Return the default of a key of [model]."""
    return ModelConfig.model_fields[key].default


@dataclass(frozen=True)
class FlowMatchSFTLoss:
    """Supervised flow matching: the squared (or pseudo-Huber) error of the velocity at a random time per sample.

    An optional ``mask`` [B, H, W] limits the loss to a region; what it excludes counts ``outside_mask_weight`` as much.
    An optional ``loss_weight`` [B], as in prior
    preservation, multiplies each sample's loss. ``flux_shift`` and ``sqrt_shift`` count tokens of ``patch_size``
    latent pixels: one number for height and width, or one per axis, the last for the width.
    ``FlowMatchSFTLoss(pipe, **inputs)`` is the loss of a DiffSynth pipeline itself, for a custom forward: see
    `pipe_flow_loss`. The settings of times are the keys of [model], with their defaults.
    """

    latents: str = "latents"
    timestep_sample_method: str = _default("timestep_sample_method")
    sigmoid_scale: float = _default("sigmoid_scale")
    shift: float | None = _default("shift")
    flux_shift: bool = _default("flux_shift")
    pseudo_huber_c: float | None = None
    patch_size: int | tuple[int, ...] = 2
    logit_mean: float = _default("logit_mean")
    uniform_share: float = _default("uniform_share")
    sqrt_shift: bool = _default("sqrt_shift")
    outside_mask_weight: float = _default("outside_mask_weight")

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Return the settings, or the loss of a pipeline: a first argument that is not a name, or ``pipe``."""
        if cls is FlowMatchSFTLoss and ("pipe" in settings or (args and not isinstance(args[0], str))):
            pipe = args[0] if args else settings.pop("pipe")
            return pipe_flow_loss(pipe, settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in (*TIME_KEYS, "outside_mask_weight"):
            require_value(ModelConfig, name, getattr(self, name))
        require_value(TrainConfig, "pseudo_huber_c", self.pseudo_huber_c)
        for fault in timestep_faults(self):
            raise UserError(str(replace(fault, file=type(self).__name__, key=fault.key.removeprefix("model."))))
        if not self._patch or not all(type(size) is int and size > 0 for size in self._patch):
            raise UserError(
                f"patch_size is {self.patch_size!r}; give a number of latent pixels, or one per axis such as (1, 2, 2)"
            )

    @property
    def _patch(self) -> tuple[int, ...]:
        return tuple(self.patch_size) if isinstance(self.patch_size, tuple | list) else (self.patch_size,) * 2

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that the loss needs; optional ones end with ``?``."""
        return (self.latents, "mask?", "loss_weight?")

    def __call__(self, denoise: Denoise, inputs: Inputs, reference: Denoise | None = None) -> Tensor:
        """Return the loss per sample."""
        each = self.error(denoise, inputs, inputs[self.latents])
        weight = inputs.get("loss_weight")
        return each if weight is None else each * to_device(weight, each.device).to(each.dtype)

    def error(self, denoise: Denoise, inputs: Inputs, clean: Tensor) -> Tensor:
        """Return the velocity error per sample between ``clean`` and the batch's noise."""
        clean = clean.float()
        noise = inputs["noise"].float()
        t = self.times(inputs["quantile"], clean)
        predicted: Any = denoise(interpolate(clean, noise, t), t, inputs)
        if not isinstance(predicted, Tensor) or predicted.shape != clean.shape:
            result = tuple(predicted.shape) if isinstance(predicted, Tensor) else f"a {type(predicted).__name__}"
            raise UserError(
                f"denoise returned {result} for latents of {tuple(clean.shape)}; return a velocity of their shape"
            )
        return flow_loss(predicted, velocity(clean, noise), self._mask(inputs, clean), self.pseudo_huber_c)

    def _mask(self, inputs: Inputs, clean: Tensor) -> Tensor | None:
        mask: Tensor | None = inputs.get("mask")
        if mask is None:
            return None
        if mask.shape[-2:] != clean.shape[-2:]:
            raise UserError(
                f"a mask of {tuple(mask.shape[-2:])} does not fit latents of {tuple(clean.shape[-2:])}; give one value "
                "per latent pixel (ImageFolder: vae_factor = the pixels of a latent pixel's side)"
            )
        return inside_and_outside(mask, self.outside_mask_weight) if self.outside_mask_weight else mask

    def at_fixed_times(self) -> "FlowMatchSFTLoss":
        """Return the loss whose quantiles are the times themselves, without distribution and shift."""
        plain = {name: _default(name) for name in TIME_KEYS}
        return replace(self, **{**plain, "timestep_sample_method": "uniform"})

    def times(self, quantile: Tensor, clean: Tensor) -> Tensor:
        """Return t in (0, 1) per sample."""
        patch = (1,) * (clean.dim() - 2 - len(self._patch)) + self._patch
        tokens = math.prod(size // side for size, side in zip(clean.shape[2:], patch, strict=False))
        drawn = times_from_quantiles(quantile.double().tolist(), tokens, self)
        return to_device(torch.tensor(drawn, dtype=torch.float32), clean.device)


@dataclass(frozen=True)
class FlowMatchDPOLoss(FlowMatchSFTLoss):
    """Diffusion-DPO on preference pairs (Wallace et al. 2023, equation 14, with the flow's velocity error).

    A sample has the preferred image under ``latents`` and the other under ``rejected``; both share noise and time. The
    loss is ``-log sigmoid(-beta / 2 * ((e_w - r_w) - (e_l - r_l)))`` with the errors e of the model and r of the
    reference. It decreases as the model improves on the reference for the preferred image, or gets worse for the other.
    """

    rejected: str = "rejected"
    beta: float = 500.0

    def __post_init__(self) -> None:
        super().__post_init__()
        number: Any = self.beta
        if not isinstance(number, int | float) or not 0 < number < math.inf:
            raise UserError(f"beta is {number!r}; give a number > 0")

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that the loss needs."""
        return (*super().reads, self.rejected)

    def __call__(self, denoise: Denoise, inputs: Inputs, reference: Denoise | None = None) -> Tensor:
        """Return the loss per pair."""
        assert reference is not None, (
            "DPO compares with the model before training: train an adapter, or give a reference"
        )
        chosen = inputs[self.latents]
        rejected = inputs[self.rejected]
        with torch.no_grad():
            reference_gap = self.error(reference, inputs, chosen) - self.error(reference, inputs, rejected)
        gap = self.error(denoise, inputs, chosen) - self.error(denoise, inputs, rejected)
        each: Tensor = -functional.logsigmoid(-self.beta / 2 * (gap - reference_gap))
        return each
