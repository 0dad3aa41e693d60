"""Linear layers with frozen weights in 8 bits and one scale per row, which GPUs multiply in 8 bits (W8A8).

Weights are int8, or e4m3 (fp8) on GPUs with units for it. In a product the rows of the input are rounded to the same
format, each with its own scale. Gradients of inputs are products of the compute dtype with the rounded weight.
Non-finite values stay visible: they make the scale of their row non-finite.
"""

from typing import Any

import torch
from torch import Tensor, nn

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_FLOOR = 1e-30  # of a row's peak: rows of zeros stay zeros
_FEWEST_ROWS = 17  # int8 products take no fewer; products of few rows read the weight and compute little
_STEP = 16  # sides of a matrix that is multiplied in 8 bits are multiples of it


def has_fp8(device: torch.device) -> bool:
    """Return whether a device multiplies e4m3 (Ada, Hopper or newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


class Linear8(nn.Linear):
    """A linear layer with the rounded weight of another one, on ``device``; its bias is that of the other one.

    ``weight`` is int8, or the bits of e4m3 as uint8: libraries recognize quantized weights by integers.
    """

    scale: Tensor

    def __init__(self, layer: nn.Linear, device: torch.device, fp8: bool | None = None) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        is_fp8 = has_fp8(device) if fp8 is None else fp8
        values, scale = round_rows(layer.weight.detach().to(device), torch.float8_e4m3fn if is_fp8 else torch.int8)
        self.weight = nn.Parameter(values.view(torch.uint8) if is_fp8 else values, requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("scale", scale.flatten(), persistent=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply in autocast's dtype if it is enabled, else in that of the input."""
        product: Tensor = _Product.apply(autocast_input(x), self.weight, self.scale)  # type: ignore[no-untyped-call]
        bias: Tensor | None = self.bias
        return product if bias is None else product + bias.to(product.dtype)

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        """The rounded weight, by the name with which peft finds out that there is a `dequantize` (for DoRA)."""
        return self.weight

    def dequantize(self) -> Tensor:
        """Return the weight in float32."""
        return _values(self.weight).float() * self.scale[:, None]


def autocast_input(x: Tensor) -> Tensor:
    """Cast to autocast's dtype if autocast is enabled."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def round_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows [M, K] in an 8-bit dtype, and their scales [M, 1] in float32."""
    peak = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True, dtype=torch.float32).clamp(min=_FLOOR)
    scaled = rows * (_LARGEST[dtype] / peak)  # in float32
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), peak / _LARGEST[dtype]


class _Product(torch.autograd.Function):
    """x weight^T, with the scale of each row of the weight; the gradient is that of the rounded weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        rows = x.reshape(-1, x.shape[-1])
        out = _multiply(rows, weight, scale) if _fits(rows, weight) else _multiply_plainly(rows, weight, scale)
        return out.to(x.dtype).reshape(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        weight, scale = ctx.saved_tensors
        scaled = torch.mul(gradient, scale, out=torch.empty_like(gradient))  # in float32, rounded once
        # integers up to 127 and e4m3 are exact in bf16
        return scaled @ _values(weight).to(gradient.dtype), None, None


def _fits(rows: Tensor, weight: Tensor) -> bool:
    """Return whether this product is computed in 8 bits."""
    sides = weight.shape[0] % _STEP == 0 and weight.shape[1] % _STEP == 0
    return rows.is_cuda and rows.dtype == torch.bfloat16 and sides and rows.shape[0] >= _FEWEST_ROWS


def _multiply(rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    values = _values(weight)
    rounded, row_scale = round_rows(rows, values.dtype)
    if values.dtype == torch.int8:
        return torch._int_mm(rounded, values.t()) * row_scale * scale
    return torch._scaled_mm(rounded, values.t(), row_scale, scale[None], out_dtype=torch.bfloat16, use_fast_accum=True)


def _multiply_plainly(rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return (rows @ _values(weight).to(rows.dtype).t()) * scale


def _values(weight: Tensor) -> Tensor:
    return weight.view(torch.float8_e4m3fn) if weight.dtype == torch.uint8 else weight
