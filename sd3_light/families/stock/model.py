"""A stock diffusers denoiser in training, for families without custom blocks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sd3_light.config import TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.core.model import TrainedModel
from sd3_light.core.objective import Objective, Prediction
from sd3_light.core.taps import tapped

Denoise = Callable[[nn.Module, Batch], Tensor]
"""(denoiser, batch) -> velocity, with t from data (0) to noise (1)."""


class StockModel(TrainedModel):
    """Runs the denoiser as it is, under autocast on GPUs; ``denoise`` says how it is called."""

    def __init__(self, denoiser: nn.Module, config: TrainConfig, denoise: Denoise, objective: Objective) -> None:
        super().__init__(denoiser, objective)
        self.compute_dtype: torch.dtype = getattr(torch, config.model.transformer_dtype)
        self._call = denoise
        stock: Any = denoiser
        if config.activation_checkpointing:
            stock.enable_gradient_checkpointing()
        stock.train()  # without it diffusers keeps all activations

    def predict(self, batch: Batch, taps: Sequence[int] = ()) -> Prediction:
        """See `TrainedModel.predict`."""
        device = batch["noisy"].device
        if self.dropout is not None:
            self.dropout.forward(device)
        autocast = device.type == "cuda" and self.compute_dtype != torch.float32
        with (
            torch.autocast(device.type, self.compute_dtype, enabled=autocast),
            tapped(self.blocks(), taps, image_tokens) as features,
        ):
            velocity = self._call(self.denoiser, batch)
        return Prediction(velocity, features)


def image_tokens(output: Any) -> Tensor:
    """Return the image tokens of a stock block's output: the last tensor of several, after the text."""
    tokens: Tensor = output[-1] if isinstance(output, tuple) else output
    return tokens
