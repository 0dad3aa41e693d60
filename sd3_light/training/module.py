"""A batch in, a loss out: the denoiser run through its layers, compared with the flow's velocity."""

from collections.abc import Iterator

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from sd3_light.config import TrainConfig
from sd3_light.flow.objective import flow_loss, text_reconstruction_loss
from sd3_light.model.layers import build_layers, run_layers, unpatchify

Losses = dict[str, Tensor]


class DiffusionTrainingModule(nn.Module):
    """``module(features, label)`` gives the loss of a micro-batch and its parts, each a mean over its samples."""

    def __init__(self, transformer: SD3Transformer2DModel, config: TrainConfig) -> None:
        super().__init__()
        self.transformer = transformer
        self.gamma = config.model.text_recon_gamma
        self.pseudo_huber_c = config.pseudo_huber_c
        self.checkpointing = config.activation_checkpointing
        self.compute_dtype = getattr(torch, config.model.transformer_dtype)
        target_layer = config.model.text_recon_target_layer if self.gamma > 0 else None
        # a plain list: the layers share the transformer's modules and must not name its parameters twice
        self._layers = [*build_layers(transformer, target_layer)]

    def trainable_modules(self) -> Iterator[nn.Parameter]:
        """The parameters that train."""
        return (parameter for parameter in self.parameters() if parameter.requires_grad)

    def forward(self, features: tuple[Tensor, ...], label: tuple[Tensor, Tensor | None]) -> Losses:
        """The loss and its parts."""
        target, mask = label
        predicted, text, *kept = self._run(features)
        predicted = unpatchify(predicted, *target.shape[-2:])
        flow = flow_loss(predicted, target, mask, self.pseudo_huber_c).mean()
        if not kept:
            return {"loss": flow, "flow": flow.detach()}
        recon = text_reconstruction_loss(text, kept[0]).mean()
        return {"loss": flow + self.gamma * recon, "flow": flow.detach(), "text_recon": recon.detach()}

    def _run(self, features: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        device = features[0].device
        autocast = device.type == "cuda" and self.compute_dtype != torch.float32
        with torch.autocast(device.type, self.compute_dtype, enabled=autocast):
            return run_layers(self._layers, [feature.float() for feature in features], self.checkpointing)
