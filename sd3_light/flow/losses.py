"""Losses with one signature: ``loss(denoise, inputs, reference) -> loss per sample [B]``.

``denoise(noisy, t, inputs)`` predicts the velocity. ``inputs`` are a batch's values by name, including the random
``quantile`` [B] in (0, 1) and ``noise``, shaped like the value that the loss's ``latents`` names. ``reference`` is the
denoiser before training, for losses that compare with it. ``reads`` lists the values that a loss needs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from sd3_light.config.faults import UserError
from sd3_light.flow.diffsynth_loss import pipe_flow_loss
from sd3_light.flow.objective import flow_loss, interpolate, velocity
from sd3_light.flow.timesteps import times_from_quantiles
from sd3_light.model.device_copy import to_device

METHODS = ("logit_normal", "uniform")
Inputs = Mapping[str, Any]
Denoise = Callable[[Tensor, Tensor, Inputs], Tensor]


@dataclass(frozen=True)
class FlowMatchSFTLoss:
    """Supervised flow matching: the squared (or pseudo-Huber) error of the velocity at a random time per sample.

    An optional ``mask`` [B, H, W] limits the loss to a region. An optional ``loss_weight`` [B], as in prior
    preservation, multiplies each sample's loss. ``flux_shift`` and ``sqrt_shift`` count tokens of ``patch_size``
    latent pixels: one number for height and width, or one per axis, the last for the width.
    ``FlowMatchSFTLoss(pipe, **inputs)`` is the loss of a DiffSynth pipeline itself, for a custom forward: see
    `pipe_flow_loss`.
    """

    latents: str = "latents"
    timestep_sample_method: Literal["logit_normal", "uniform"] = "logit_normal"
    sigmoid_scale: float = 1.0
    shift: float | None = None
    flux_shift: bool = False
    pseudo_huber_c: float | None = None
    patch_size: int | tuple[int, ...] = 2
    logit_mean: float = 0.0
    uniform_share: float = 0.0
    sqrt_shift: bool = False

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Return the settings, or the loss of a pipeline: a first argument that is not a name, or ``pipe``."""
        if cls is FlowMatchSFTLoss and ("pipe" in settings or (args and not isinstance(args[0], str))):
            pipe = args[0] if args else settings.pop("pipe")
            return pipe_flow_loss(pipe, settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.timestep_sample_method not in METHODS:
            raise UserError(
                f"timestep_sample_method is {self.timestep_sample_method!r}; give one of {', '.join(METHODS)}"
            )
        for name in ("sigmoid_scale", "shift", "pseudo_huber_c", "beta"):
            value = getattr(self, name, None)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise UserError(f"{name} is {value!r}; give a number above 0")
        for name, low, high in (("logit_mean", -10, 10), ("uniform_share", 0, 0.999)):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and low <= value <= high):
                raise UserError(f"{name} is {value!r}; give a number from {low} to {high}")
        shifts = {"shift": self.shift is not None, "flux_shift": self.flux_shift, "sqrt_shift": self.sqrt_shift}
        if len(both := [name for name, is_set in shifts.items() if is_set]) > 1:
            raise UserError(f"{' and '.join(both)} are both given; keep one")
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
        clean, noise = clean.float(), inputs["noise"].float()
        t = self.times(inputs["quantile"], clean)
        predicted: Any = denoise(interpolate(clean, noise, t), t, inputs)
        if not isinstance(predicted, Tensor) or predicted.shape != clean.shape:
            result = tuple(predicted.shape) if isinstance(predicted, Tensor) else f"a {type(predicted).__name__}"
            raise UserError(
                f"denoise returned {result} for latents of {tuple(clean.shape)}; return a velocity of their shape"
            )
        return flow_loss(predicted, velocity(clean, noise), inputs.get("mask"), self.pseudo_huber_c)

    def at_fixed_times(self) -> "FlowMatchSFTLoss":
        """Return the loss whose quantiles are the times themselves, without distribution and shift."""
        plain = FlowMatchSFTLoss(timestep_sample_method="uniform")
        names = ("timestep_sample_method", "shift", "flux_shift", "logit_mean", "uniform_share", "sqrt_shift")
        return replace(self, **{name: getattr(plain, name) for name in names})

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

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that the loss needs."""
        return (*super().reads, self.rejected)

    def __call__(self, denoise: Denoise, inputs: Inputs, reference: Denoise | None = None) -> Tensor:
        """Return the loss per pair."""
        assert reference is not None, (
            "DPO compares with the model before training: train an adapter, or give a reference"
        )
        chosen, rejected = inputs[self.latents], inputs[self.rejected]
        with torch.no_grad():
            reference_gap = self.error(reference, inputs, chosen) - self.error(reference, inputs, rejected)
        gap = self.error(denoise, inputs, chosen) - self.error(denoise, inputs, rejected)
        each: Tensor = -functional.logsigmoid(-self.beta / 2 * (gap - reference_gap))
        return each
