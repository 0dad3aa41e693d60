"""Quantize the frozen linear layers of the blocks to 8 or 4 bits below an adapter.

8 bits is int8 or fp8 with one scale per row (`linear8.py`), 4 bits is NF4 with 8-bit scales (QLoRA) by bitsandbytes.
Quantized weights are never saved: an adapter's file applies to the original weights.
"""

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from sd3_light.config.faults import UserError
from sd3_light.config.optimizers import INSTALL_BITSANDBYTES
from sd3_light.model.adapter_layers import ReadWeight
from sd3_light.model.linear8 import Linear8, autocast_input


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
    weights of a model that has none yet, in any dtype. Weights whose names begin with one of ``hosted`` are then in
    host memory.
    """
    if bits == 16:
        return 0
    if bits == 4 and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"adapter.base_bits = 4 needs bitsandbytes; run `{INSTALL_BITSANDBYTES}`, or write 8")
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
        layer: Any = transformer.get_submodule(name)
        if read is not None:
            for own, _ in list(layer.named_parameters()):
                values = read(f"{name}.{own}")
                values = values if bits == 8 and own == "weight" else values.float()
                setattr(layer, own, nn.Parameter(values, requires_grad=False))
        place = device or layer.weight.device
        quantized: Any = Linear8(layer, place) if bits == 8 else _nf4(layer, place)
        if name.startswith(hosted):
            quantized.weight.data = quantized.weight.data.cpu()
        setattr(transformer.get_submodule(parent), last, quantized)
    if bits == 4:
        model: Any = transformer
        model.is_loaded_in_4bit = True  # peft chooses its layers by this attribute
    return len(names)


def _nf4(layer: Any, device: torch.device) -> nn.Module:
    """Return the quantized layer. bitsandbytes quantizes when a layer is moved, even from CPU to CPU."""
    quantized: Any = _nf4_class()(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    options = {"quant_type": "nf4", "compress_statistics": True, "module": quantized}
    quantized.weight = type(quantized.weight)(layer.weight.data.cpu(), requires_grad=False, **options)
    quantized.bias = layer.bias
    quantized.requires_grad_(False)
    moved: nn.Module = quantized.to(device)
    return moved


@cache
def _nf4_class() -> Any:
    """Return a subclass of bitsandbytes' layer, with two differences.

    In evaluation mode its layers compute differently from training, and on some CPUs rearrange their weights so that a
    backward pass cannot read them: these stay in training mode. Autocast does not cover its products: these cast their
    inputs as stock layers do.
    """
    library: Any = importlib.import_module("bitsandbytes.nn")

    class Linear4(library.Linear4bit):
        def __init__(self, inputs: int, outputs: int, bias: bool, device: Any) -> None:
            super().__init__(inputs, outputs, bias, compute_dtype=torch.float32, quant_type="nf4", device=device)

        def forward(self, x: Tensor) -> Any:
            x = autocast_input(x)
            self.compute_dtype = x.dtype
            return super().forward(x)

        def train(self, mode: bool = True) -> "Linear4":
            super().train(True)
            return self

    return Linear4
