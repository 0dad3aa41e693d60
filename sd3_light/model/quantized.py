"""Frozen weights in 8 or 4 bits under an adapter, by bitsandbytes: the linear layers of the blocks, in place.

8 bits is LLM.int8 (a scale for each row), 4 bits is NF4 with its scales in 8 bits (QLoRA). Nothing of it is ever saved:
an adapter's file goes on the weights as they are in their folder.
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

INSTALL_COMMAND = "pip install 'sd3-light[bnb]'"


def require_bitsandbytes(bits: int) -> None:
    """A fault where the library that keeps weights in few bits is not there."""
    if bits < 16 and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"adapter.base_bits = {bits} needs bitsandbytes, which is not installed; run `{INSTALL_COMMAND}`, or write 16"
        )


def quantize_base(transformer: nn.Module, bits: int, device: torch.device | None = None) -> int:
    """Keep the linear layers of the model's blocks in ``bits`` bits, on ``device``; the number of such layers.

    Blocks are what lies in a list: embeddings and the output layer, which the picture depends on most and which weigh
    little, keep their type. Call it before the adapter is put on, and train nothing but the adapter afterwards.
    """
    if bits == 16:
        return 0
    require_bitsandbytes(bits)
    if any(isinstance(module, BaseTunerLayer) for module in transformer.modules()):
        raise UserError(f"adapter.base_bits = {bits}: the denoiser has an adapter already; remove it, or write 16")
    names = [name for name, module in transformer.named_modules() if type(module) is nn.Linear and _in_list(name)]
    if not names:
        raise UserError(f"adapter.base_bits = {bits}: the denoiser has no block with a linear layer; write 16")
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(transformer.get_submodule(parent), last, _quantized(transformer.get_submodule(name), bits, device))
    told: Any = transformer
    setattr(told, f"is_loaded_in_{bits}bit", True)  # by this peft knows which of its layers to take
    return len(names)


def _in_list(name: str) -> bool:
    return any(part.isdecimal() for part in name.split("."))


def _quantized(layer: Any, bits: int, device: torch.device | None) -> nn.Module:
    """The layer in few bits. bitsandbytes quantizes what is moved, from the CPU to the CPU too."""
    made: Any = _kinds()[bits](layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    made.weight = type(made.weight)(layer.weight.data.cpu(), requires_grad=False, **_how(bits, made))
    made.bias = layer.bias
    made.requires_grad_(False)
    found: nn.Module = made.to(device or layer.weight.device).ready()
    return found


def _how(bits: int, made: nn.Module) -> dict[str, Any]:
    return {"quant_type": "nf4", "compress_statistics": True, "module": made} if bits == 4 else {}


@cache
def _kinds() -> dict[int, Any]:
    """Bits -> class, each bitsandbytes' own with some habits changed.

    Told to evaluate, its layers compute otherwise than in training, and on some CPUs lay out their weights so that no
    backward pass can read them: these go on as in training. Autocast does not reach its products: these narrow what
    they are given as stock layers do. Layers of 8 bits lose their scales when they are moved after a forward pass: here
    the scales are a buffer.
    """
    library: Any = importlib.import_module("bitsandbytes.nn")
    # it would say with every product that inputs are rounded
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)

    class Linear8(library.Linear8bitLt):
        def __init__(self, inputs: int, outputs: int, bias: bool, device: Any) -> None:
            super().__init__(inputs, outputs, bias, has_fp16_weights=False, threshold=6.0, device=device)

        def ready(self) -> "Linear8":
            self.register_buffer("scale", self.weight.SCB, persistent=False)
            self._take_scale()
            return self

        def _take_scale(self) -> None:
            self.state.CB, self.state.SCB, self.weight.CB = self.weight.data, self.scale, None

        def forward(self, x: Tensor) -> Any:
            self._take_scale()
            return super().forward(_narrowed(x))

        def train(self, mode: bool = True) -> "Linear8":
            super().train(True)
            return self

    class Linear4(library.Linear4bit):
        def __init__(self, inputs: int, outputs: int, bias: bool, device: Any) -> None:
            super().__init__(inputs, outputs, bias, compute_dtype=torch.float32, quant_type="nf4", device=device)

        def ready(self) -> "Linear4":
            return self

        def forward(self, x: Tensor) -> Any:
            x = _narrowed(x)
            self.compute_dtype = x.dtype
            return super().forward(x)

        def train(self, mode: bool = True) -> "Linear4":
            super().train(True)
            return self

    return {8: Linear8, 4: Linear4}


def _narrowed(x: Tensor) -> Tensor:
    """In autocast's type, where that is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
