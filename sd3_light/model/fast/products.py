"""The products of a block with its weights: in the compute dtype, or in fp8 if the weights were rounded."""

import torch
from torch import Tensor

from sd3_light.model.fast.fp8 import Fp8Rows, Operand, multiply, plain_rows
from sd3_light.model.fast.weights import LinearCopy


def forward(linear: LinearCopy, rows: Operand, biased: bool, fast_sums: bool) -> Tensor:
    """Return rows weight^T (+ bias)."""
    bias = linear.bias if biased else None
    if isinstance(rows, Fp8Rows):
        assert linear.fp8 is not None
        return multiply(rows, linear.fp8.forward, bias, linear.bias.dtype, fast_sums)
    assert linear.weight is not None
    return torch.mm(rows, linear.weight.t()) if bias is None else torch.addmm(bias, rows, linear.weight.t())


def input_grad(linear: LinearCopy, grad: Operand, fast_sums: bool) -> Tensor:
    """Return grad weight, the gradient of the product's input rows."""
    if isinstance(grad, Fp8Rows):
        assert linear.fp8 is not None
        return multiply(grad, linear.fp8.backward, None, linear.bias.dtype, fast_sums)
    assert linear.weight is not None
    return torch.mm(grad, linear.weight)


def weight_grad(grad: Operand, rows: Operand, float32: bool) -> Tensor:
    """Return grad^T rows, the gradient of the weight; never in fp8. ``float32``: do not round to the compute dtype."""
    grad, rows = plain_rows(grad), plain_rows(rows)
    if float32 and grad.is_cuda and grad.dtype != torch.float32:
        return torch.mm(grad.t(), rows, out_dtype=torch.float32)
    return torch.mm(grad.t(), rows)
