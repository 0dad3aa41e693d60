"""Quantize the frozen linear layers of the blocks to 8 or 4 bits below an adapter, with bitsandbytes.

8 bits is LLM.int8 (one scale per row), 4 bits is NF4 with 8-bit scales (QLoRA). Quantized weights are never saved: an
adapter's file applies to the original weights.
"""

import importlib
import importlib.util
import logging
from functools import cache
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.config.optimizers import INSTALL_BITSANDBYTES
from sd3_light.model.adapter_layers import ReadWeight


def quantize_base(
    transformer: nn.Module,
    bits: int,
    device: torch.device | None = None,
    read: ReadWeight | None = None,
    hosted: tuple[str, ...] = (),
) -> int:
    """Quantize the linear layers of the model's blocks to ``bits`` bits on ``device``; return their number.

    Blocks are modules in a list. Embeddings and the output layer, which are small and affect the image most, keep
    their dtype. Call this before adding the adapter, and train only the adapter afterwards. ``read`` returns the
    weights of a model that has none yet. Weights whose names begin with one of ``hosted`` are then in host memory.
    """
    if bits == 16:
        return 0
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"adapter.base_bits = {bits} needs bitsandbytes; run `{INSTALL_BITSANDBYTES}`, or write 16")
    if any(isinstance(module, BaseTunerLayer) for module in transformer.modules()):
        raise UserError(
            f"adapter.base_bits = {bits}: the denoiser already has an adapter; load it without one, or write 16"
        )
    linears = [name for name, module in transformer.named_modules() if type(module) is nn.Linear]
    names = [name for name in linears if any(part.isdecimal() for part in name.split("."))]
    if not names:
        raise UserError(f"adapter.base_bits = {bits}: the denoiser has no block with a linear layer; write 16")
    for name in names:
        parent, _, last = name.rpartition(".")
        layer = transformer.get_submodule(name)
        if read is not None:
            for own, _ in list(layer.named_parameters()):
                setattr(layer, own, nn.Parameter(read(f"{name}.{own}")))
        quantized: Any = _quantized(layer, bits, device)
        if name.startswith(hosted):
            quantized.weight.data = quantized.weight.data.cpu()
        setattr(transformer.get_submodule(parent), last, quantized)
    model: Any = transformer
    setattr(model, f"is_loaded_in_{bits}bit", True)  # peft chooses its layers by this attribute
    return len(names)


def _quantized(layer: Any, bits: int, device: torch.device | None) -> nn.Module:
    """Return the quantized layer. bitsandbytes quantizes when a layer is moved, even from CPU to CPU."""
    quantized: Any = _layer_classes()[bits](
        layer.in_features, layer.out_features, layer.bias is not None, device="meta"
    )
    options = {"quant_type": "nf4", "compress_statistics": True, "module": quantized} if bits == 4 else {}
    quantized.weight = type(quantized.weight)(layer.weight.data.cpu(), requires_grad=False, **options)
    quantized.bias = layer.bias
    quantized.requires_grad_(False)
    moved: nn.Module = quantized.to(device or layer.weight.device).ready()
    return moved


@cache
def _layer_classes() -> dict[int, Any]:
    """Return bits -> subclass of bitsandbytes' layer, with three differences.

    In evaluation mode its layers compute differently from training, and on some CPUs rearrange their weights so that a
    backward pass cannot read them: these stay in training mode. Autocast does not cover its products: these cast their
    inputs as stock layers do. Its 8-bit layers lose their scales when moved after a forward pass: here the scales are a
    buffer.
    """
    library: Any = importlib.import_module("bitsandbytes.nn")
    # it would warn at every product that inputs are rounded
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)

    class Linear8(library.Linear8bitLt):
        def __init__(self, inputs: int, outputs: int, bias: bool, device: Any) -> None:
            super().__init__(inputs, outputs, bias, has_fp16_weights=False, threshold=6.0, device=device)

        def ready(self) -> "Linear8":
            self.register_buffer("scale", self.weight.SCB, persistent=False)
            self._attach_scale()
            return self

        def _attach_scale(self) -> None:
            self.state.CB, self.state.SCB, self.weight.CB = self.weight.data, self.scale, None

        def forward(self, x: Tensor) -> Any:
            self._attach_scale()
            return super().forward(_autocast(x))

        def train(self, mode: bool = True) -> "Linear8":
            super().train(True)
            return self

    class Linear4(library.Linear4bit):
        def __init__(self, inputs: int, outputs: int, bias: bool, device: Any) -> None:
            super().__init__(inputs, outputs, bias, compute_dtype=torch.float32, quant_type="nf4", device=device)

        def ready(self) -> "Linear4":
            return self

        def forward(self, x: Tensor) -> Any:
            x = _autocast(x)
            self.compute_dtype = x.dtype
            return super().forward(x)

        def train(self, mode: bool = True) -> "Linear4":
            super().train(True)
            return self

    return {8: Linear8, 4: Linear4}


def _autocast(x: Tensor) -> Tensor:
    """Cast to autocast's dtype if autocast is enabled."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
