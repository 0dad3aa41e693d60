"""A frozen LoRA that a denoiser has in training only: `model.training_adapter`.

It is added to the outputs of layers, so the weights stay what they are: exports, averages and checkpoints do not know
it, and quantized, sharded and swapped weights keep their form.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sd3_light.config.faults import UserError
from sd3_light.model.lora_layers import LoraModule


class TrainingAdapter:
    """Adds a LoRA's updates to the outputs of a denoiser's layers, except inside of `off`."""

    def __init__(
        self, denoiser: nn.Module, modules: Mapping[str, LoraModule], dtype: torch.dtype, device: torch.device
    ) -> None:
        require_fitting(denoiser, modules)
        self._is_on = True
        for name, module in modules.items():
            down = module.down.to(device, dtype)
            up = module.with_unit_scale().up.to(device, dtype)
            denoiser.get_submodule(name).register_forward_hook(partial(self._add, down, up))

    def _add(self, down: Tensor, up: Tensor, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
        if not self._is_on:
            return None
        rows = inputs[0].to(down.dtype)
        return output + functional.linear(functional.linear(rows, down), up).to(output.dtype)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Run the denoiser as it is exported inside the block."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True


def require_fitting(denoiser: nn.Module, modules: Mapping[str, Any]) -> None:
    """Raise a UserError unless ``modules`` is a plain LoRA of linear layers of the denoiser."""
    layers: dict[str, Any] = dict(denoiser.named_modules())
    for name, module in modules.items():
        if not isinstance(module, LoraModule) or module.magnitude is not None or module.down.dim() != 2:
            hint = "merge it into the model, and extract a LoRA with `sd3-light lora extract`"
            raise UserError(f"{name} is not a plain LoRA of a linear layer; {hint}")
        if not hasattr(layers.get(name), "in_features"):
            raise UserError(f"{name} is not a linear layer of the model; give an adapter that was made for it")
        shape = (layers[name].out_features, layers[name].in_features)
        if shape != module.shape:
            raise UserError(f"{name} has shape {list(module.shape)}, and the model's layer {list(shape)}")
