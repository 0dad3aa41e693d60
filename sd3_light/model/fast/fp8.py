"""Matrix products of 8-bit numbers: rows rounded to e4m3 with a scale each, and the product of two such matrices.

A row times 448 / (its largest value) fills the range of e4m3, so no row is too large or too small, and nothing can
overflow. What is not finite stays so: NaN is an e4m3 number, and an infinite row makes NaN.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest e4m3 number."""
FLOOR = 1e-30
"""A row whose largest value is below this is scaled as if it were this: rows of zeros stay zeros."""

Form = Literal["plain", "both", "eight"]
"""What an operation makes of rows: them in the type that computes, also rounded, or rounded alone."""


@dataclass(frozen=True)
class Eight:
    """Rows in 8 bits: ``values`` [M, K] times ``scale`` [M, 1] (float32); ``plain`` are the rows before, if kept."""

    values: Tensor
    scale: Tensor
    plain: Tensor | None = None

    def wide(self) -> Tensor:
        """The rounded rows in float32."""
        return self.values.float() * self.scale


@dataclass(frozen=True)
class EightWeight:
    """A weight [N, K] in 8 bits: its rows for the ``forward`` product, its columns for that of input gradients."""

    forward: Eight
    backward: Eight


Operand = Tensor | Eight


def plain(rows: Operand) -> Tensor:
    """Rows before rounding."""
    found = rows.plain if isinstance(rows, Eight) else rows
    assert found is not None, "only the rounded rows were kept"
    return found


def formed(rows: Tensor, form: Form, dtype: torch.dtype) -> Operand:
    """Float32 rows in a form; what the kernels do as they write."""
    if form == "plain":
        return rows.to(dtype)
    peak = rows.float().abs().amax(1, keepdim=True).clamp(min=FLOOR)
    values = (rows.float() * (LARGEST / peak)).to(E4M3)
    return Eight(values, peak / LARGEST, rows.to(dtype) if form == "both" else None)


def multiply(one: Eight, other: Eight, bias: Tensor | None, dtype: torch.dtype, fast_sums: bool) -> Tensor:
    """one other^T + bias. ``fast_sums``: the tensor cores add up in their own, less than float32, precision."""
    if one.values.is_cuda:
        return torch._scaled_mm(
            one.values,
            other.values.t(),
            one.scale,
            other.scale.t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast_sums,
        )
    found = one.wide() @ other.wide().t()
    return (found if bias is None else found + bias.float()).to(dtype)
