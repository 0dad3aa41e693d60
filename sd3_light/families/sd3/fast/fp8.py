"""Matrix products in fp8: rows rounded to e4m3 with one scale per row, and the product of two such matrices.

Each row is scaled by 448 / (its largest absolute value), which uses the whole range of e4m3, so no row underflows or
overflows. Non-finite values stay visible: NaN is an e4m3 number, and an infinite row becomes NaN.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest e4m3 number."""
FLOOR = 1e-30
"""Lower bound of a row's peak when its scale is computed: rows of zeros stay zeros."""

RowForm = Literal["plain", "both", "fp8"]
"""What an operation outputs: rows in the compute dtype, rows in both dtypes, or fp8 rows only."""


@dataclass(frozen=True)
class Fp8Rows:
    """Rows in fp8: ``values`` [M, K] times ``scale`` [M, 1] (float32). ``plain``: the rows before rounding, if kept."""

    values: Tensor
    scale: Tensor
    plain: Tensor | None = None

    def dequantized(self) -> Tensor:
        """Return the rounded rows in float32."""
        return self.values.float() * self.scale


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [N, K] in fp8: its rows for the ``forward`` product, its columns for the input gradients."""

    forward: Fp8Rows
    backward: Fp8Rows


Operand = Tensor | Fp8Rows


def plain_rows(rows: Operand) -> Tensor:
    """Return the rows before rounding."""
    plain = rows.plain if isinstance(rows, Fp8Rows) else rows
    assert plain is not None, "only the rounded rows were kept"
    return plain


def to_form(rows: Tensor, form: RowForm, dtype: torch.dtype) -> Operand:
    """Convert float32 rows to a form, as the kernels do when they write."""
    if form == "plain":
        return rows.to(dtype)
    peak = rows.float().abs().amax(1, keepdim=True).clamp(min=FLOOR)
    values = (rows.float() * (LARGEST / peak)).to(E4M3)
    return Fp8Rows(values, peak / LARGEST, rows.to(dtype) if form == "both" else None)


def multiply(left: Fp8Rows, right: Fp8Rows, bias: Tensor | None, dtype: torch.dtype, fast_sums: bool) -> Tensor:
    """Return left right^T + bias. ``fast_sums``: tensor cores accumulate with less than float32 precision."""
    if left.values.is_cuda:
        return torch._scaled_mm(
            left.values,
            right.values.t(),
            left.scale,
            right.scale.t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast_sums,
        )
    product = left.dequantized() @ right.dequantized().t()
    return (product if bias is None else product + bias.float()).to(dtype)
