"""Kernels that round whole rows to fp8 (`fp8.py`), and the helpers with which other kernels round as they write."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sd3_light.families.sd3.fast.fp8 import E4M3, Fp8Rows, Fp8Weight, Operand, RowForm

TUNING: dict[str, dict[str, int]] = {
    "norm": {"R": 4, "num_warps": 4},
    "norm_backward": {"R": 1, "STAGES": 3, "num_warps": 4},
    "gelu_backward": {"R": 4, "BLOCK": 1024, "STAGES": 2, "num_warps": 4},
    "join": {"num_warps": 8},
    "join_backward": {"STAGES": 3, "num_warps": 8},
    "copy": {"R": 4, "num_warps": 8},
    # kernels that also round to fp8
    "norm_fp8": {"R": 2, "num_warps": 4},
    "norm_backward_fp8": {"R": 1, "STAGES": 3, "num_warps": 4},
    "gelu_fp8": {"num_warps": 4},
    "join_backward_fp8": {"STAGES": 3, "num_warps": 8},
    "copy_fp8": {"R": 4, "num_warps": 8},
    "round_rows": {"num_warps": 4},
    "weight": {"N": 128, "K": 64, "num_warps": 4},
}
"""Launch parameters: kernel -> rows per tile (R), pipeline depth of loads (STAGES), warps. `step.py --tune` of
the benchmarks measured these as the fastest on an H200 at width 1536."""
TILE = 8192
"""Numbers that a program holds at once when it needs whole rows."""


class RowOutput:
    """Output buffers of a kernel that writes rows in a form."""

    def __init__(self, count: int, width: int, like: Tensor, form: RowForm) -> None:
        self.flags = {"PLAIN": form != "fp8", "EIGHT": form != "plain"}
        self._plain = like.new_empty(count, width) if form != "fp8" else None
        self._fp8: Fp8Rows | None = None
        self.pointers: tuple[Tensor, ...] = (like if self._plain is None else self._plain, like, like)
        if form != "plain":
            values = like.new_empty(count, width, dtype=E4M3)
            scale = like.new_empty(count, 1, dtype=torch.float32)
            self._fp8 = Fp8Rows(values, scale, self._plain)
            self.pointers = (self.pointers[0], values, scale)

    def operand(self) -> Any:
        """Return the rows: a tensor, or `Fp8Rows`."""
        return self._plain if self._fp8 is None else self._fp8


@triton.jit
def by_row(values, peak):
    """Return (values scaled by their rows' peaks, the scale that undoes it)."""
    peak = tl.maximum(peak, 1e-30)  # FLOOR and LARGEST of fp8.py: kernels cannot read globals
    return values * (448.0 / peak), peak / 448.0


@triton.jit
def store_rows(values, plain, eight, scales, rows, at, is_row, mask, PLAIN: tl.constexpr, EIGHT: tl.constexpr):
    """Store float32 values [R, BLOCK], zero outside of the columns, to a `RowOutput`; ``rows``, ``is_row``: [R, 1]."""
    if PLAIN:
        tl.store(plain + at, values.to(plain.dtype.element_ty), mask=mask)
    if EIGHT:
        scaled, scale = by_row(values, tl.max(tl.abs(values), axis=1)[:, None])
        tl.store(eight + at, scaled.to(eight.dtype.element_ty), mask=mask)
        tl.store(scales + rows, scale, mask=is_row)


@triton.jit
def _round_rows(source, eight, scales, count, D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    rows = (tl.program_id(0) * R + tl.arange(0, R))[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    is_row = rows < count
    mask = is_row & (cols < D)
    at = rows.to(tl.int64) * D + cols
    values = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    store_rows(values, source, eight, scales, rows, at, is_row, mask, False, True)


def round_rows(rows: Tensor) -> Operand:
    """See `reference.round_rows`."""
    count, width = rows.shape
    rounded = Fp8Rows(rows.new_empty(count, width, dtype=E4M3), rows.new_empty(count, 1, dtype=torch.float32), rows)
    _round_into(rows, rounded)
    return rounded


def _round_into(rows: Tensor, target: Fp8Rows) -> None:
    """Round rows into ``target``."""
    assert rows.is_contiguous()
    count, width = rows.shape
    block = triton.next_power_of_2(width)
    tile = max(1, TILE // block)  # rows that fit in the registers of a program
    _round_rows[(triton.cdiv(count, tile),)](
        rows, target.values, target.scale, count, D=width, BLOCK=block, R=tile, **TUNING["round_rows"]
    )


@triton.jit
def _gelu(u, plain, eight, scales, F: tl.constexpr, BLOCK: tl.constexpr, PLAIN: tl.constexpr, EIGHT: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * F + cols
    value = tl.load(u + at, mask=cols < F, other=0.0).to(tl.float32)
    made = value * tl.sigmoid(1.5957691216057308 * value * (1.0 + 0.044715 * value * value))
    if PLAIN:
        tl.store(plain + at, made.to(plain.dtype.element_ty), mask=cols < F)
    if EIGHT:
        scaled, scale = by_row(made, tl.max(tl.abs(made), axis=0))
        tl.store(eight + at, scaled.to(eight.dtype.element_ty), mask=cols < F)
        tl.store(scales + row, scale)


def gelu(u: Tensor, form: RowForm) -> Any:
    """See `reference.gelu`."""
    assert u.is_contiguous()
    count, width = u.shape
    output = RowOutput(count, width, u, form)
    block = triton.next_power_of_2(width)
    _gelu[(count,)](u, *output.pointers, F=width, BLOCK=block, **output.flags, **TUNING["gelu_fp8"])
    return output.operand()


@triton.jit
def _weight_peaks(weight, peaks, count, D: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Write the largest absolute value of each column; few programs share one, because each covers many rows."""
    rows = tl.program_id(0) * N + tl.arange(0, N)
    cols = tl.program_id(1) * K + tl.arange(0, K)
    is_col = cols < D
    at = rows.to(tl.int64)[:, None] * D + cols[None, :]
    values = tl.load(weight + at, mask=(rows < count)[:, None] & is_col[None, :], other=0.0).to(tl.float32)
    tl.atomic_max(peaks + cols, tl.max(tl.abs(values), axis=0), mask=is_col)


@triton.jit
def _weight_columns(weight, peaks, eight, scales, count, stride, D: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Write a tile of the weight, transposed and rounded."""
    rows = tl.program_id(0) * N + tl.arange(0, N)
    cols = tl.program_id(1) * K + tl.arange(0, K)
    is_row = rows < count
    is_col = cols < D
    at = rows.to(tl.int64)[:, None] * D + cols[None, :]
    values = tl.load(weight + at, mask=is_row[:, None] & is_col[None, :], other=0.0).to(tl.float32)
    scaled, scale = by_row(values, tl.load(peaks + cols, mask=is_col, other=0.0)[None, :])
    turned = tl.trans(scaled).to(eight.dtype.element_ty)
    to = cols.to(tl.int64)[:, None] * stride + rows[None, :]
    tl.store(eight + to, turned, mask=is_col[:, None] & is_row[None, :])
    if tl.program_id(0) == 0:
        tl.store(scales + cols[None, :], scale, mask=is_col[None, :])


def round_weight(weights: list[Tensor], target: Fp8Weight) -> None:
    """See `reference.round_weight`."""
    forward = target.forward
    backward = target.backward
    outputs, width = forward.values.shape
    peaks = torch.zeros(width, device=forward.values.device)
    sizes = [len(weight) for weight in weights]
    rows = forward.values.split(sizes)
    scales = forward.scale.split(sizes)
    tuning = TUNING["weight"]
    columns = backward.values.split(sizes, dim=1)
    tiles = [(triton.cdiv(size, tuning["N"]), triton.cdiv(width, tuning["K"])) for size in sizes]
    for weight, values, scale, grid in zip(weights, rows, scales, tiles, strict=True):
        _round_into(weight, Fp8Rows(values, scale))
        _weight_peaks[grid](weight, peaks, len(weight), D=width, **tuning)
    for weight, values, grid in zip(weights, columns, tiles, strict=True):
        _weight_columns[grid](weight, peaks, values, backward.scale, len(weight), outputs, D=width, **tuning)
