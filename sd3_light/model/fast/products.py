"""The products of a block with its weights, in the type that computes or, where the weights were rounded, in 8 bits."""

import torch
from torch import Tensor

from sd3_light.model.fast.fp8 import Eight, Operand, multiply, plain
from sd3_light.model.fast.weights import Linear


def forward(linear: Linear, rows: Operand, biased: bool, fast_sums: bool) -> Tensor:
    """rows weight^T (+ bias)."""
    bias = linear.bias if biased else None
    if isinstance(rows, Eight):
        assert linear.eight is not None
        return multiply(rows, linear.eight.forward, bias, linear.bias.dtype, fast_sums)
    assert linear.weight is not None
    return torch.mm(rows, linear.weight.t()) if bias is None else torch.addmm(bias, rows, linear.weight.t())


def of_input(linear: Linear, grad: Operand, fast_sums: bool) -> Tensor:
    """grad weight: what the rows of a product learn."""
    if isinstance(grad, Eight):
        assert linear.eight is not None
        return multiply(grad, linear.eight.backward, None, linear.bias.dtype, fast_sums)
    assert linear.weight is not None
    return torch.mm(grad, linear.weight)


def of_weight(grad: Operand, rows: Operand, float32: bool) -> Tensor:
    """grad^T rows: what a weight learns; never in 8 bits. ``float32``: not rounded to the type that computes."""
    grad, rows = plain(grad), plain(rows)
    if float32 and grad.is_cuda and grad.dtype != torch.float32:
        return torch.mm(grad.t(), rows, out_dtype=torch.float32)
    return torch.mm(grad.t(), rows)
