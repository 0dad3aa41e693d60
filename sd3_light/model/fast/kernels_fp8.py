"""Kernels that round whole rows to 8 bits (`fp8.py`), and what other kernels need to do it as they write."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sd3_light.model.fast.fp8 import E4M3, Eight, EightWeight, Form, Operand
from sd3_light.model.fast.tuning import TUNING

TILE = 8192
"""Numbers that a program holds at once where it needs whole rows."""


class Room:
    """Where a kernel writes rows in a form, and what its caller gets."""

    def __init__(self, count: int, width: int, like: Tensor, form: Form) -> None:
        self.flags = {"PLAIN": form != "eight", "EIGHT": form != "plain"}
        self._plain = like.new_empty(count, width) if form != "eight" else None
        self._eight: Eight | None = None
        self.pointers: tuple[Tensor, ...] = (like if self._plain is None else self._plain, like, like)
        if form != "plain":
            values, scale = like.new_empty(count, width, dtype=E4M3), like.new_empty(count, 1, dtype=torch.float32)
            self._eight = Eight(values, scale, self._plain)
            self.pointers = (self.pointers[0], values, scale)

    def operand(self) -> Any:
        """The rows: a tensor, or an `Eight`."""
        return self._plain if self._eight is None else self._eight


@triton.jit
def by_row(values, peak):
    """Values scaled by their rows' peaks, to be stored, and the scale that undoes it."""
    peak = tl.maximum(peak, 1e-30)  # FLOOR and LARGEST: kernels see no numbers from outside
    return values * (448.0 / peak), peak / 448.0


@triton.jit
def store_rows(values, plain, eight, scales, rows, at, is_row, mask, PLAIN: tl.constexpr, EIGHT: tl.constexpr):
    """[R, BLOCK] float32 values, zeros where there is no column, into a `Room`; ``rows`` and ``is_row`` are [R, 1]."""
    if PLAIN:
        tl.store(plain + at, values.to(plain.dtype.element_ty), mask=mask)
    if EIGHT:
        scaled, scale = by_row(values, tl.max(tl.abs(values), axis=1)[:, None])
        tl.store(eight + at, scaled.to(eight.dtype.element_ty), mask=mask)
        tl.store(scales + rows, scale, mask=is_row)


def _rows_in_tile(block: int) -> int:
    """As many as the registers of a program hold beside each other."""
    return max(1, TILE // block)


# --- rows that exist already -------------------------------------------------------------------


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
    eight = Eight(rows.new_empty(count, width, dtype=E4M3), rows.new_empty(count, 1, dtype=torch.float32), rows)
    _into(rows, eight)
    return eight


def _into(rows: Tensor, eight: Eight) -> None:
    """Rows rounded into ``eight``."""
    assert rows.is_contiguous()
    (count, width), block = rows.shape, triton.next_power_of_2(rows.shape[1])
    high = _rows_in_tile(block)
    _round_rows[(triton.cdiv(count, high),)](
        rows, eight.values, eight.scale, count, D=width, BLOCK=block, R=high, **TUNING["round_rows"]
    )


# --- GELU --------------------------------------------------------------------------------------


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


def gelu(u: Tensor, form: Form) -> Any:
    """See `reference.gelu`."""
    assert u.is_contiguous()
    count, width = u.shape
    room, block = Room(count, width, u, form), triton.next_power_of_2(width)
    _gelu[(count,)](u, *room.pointers, F=width, BLOCK=block, **room.flags, **TUNING["gelu_fp8"])
    return room.operand()


# --- weights -----------------------------------------------------------------------------------


@triton.jit
def _weight_peaks(weight, peaks, count, D: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The largest number of each column; few programs meet in one, as each has many rows."""
    rows = tl.program_id(0) * N + tl.arange(0, N)
    cols = tl.program_id(1) * K + tl.arange(0, K)
    is_col = cols < D
    at = rows.to(tl.int64)[:, None] * D + cols[None, :]
    values = tl.load(weight + at, mask=(rows < count)[:, None] & is_col[None, :], other=0.0).to(tl.float32)
    tl.atomic_max(peaks + cols, tl.max(tl.abs(values), axis=0), mask=is_col)


@triton.jit
def _weight_columns(weight, peaks, eight, scales, count, stride, D: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A tile of the weight, turned."""
    rows = tl.program_id(0) * N + tl.arange(0, N)
    cols = tl.program_id(1) * K + tl.arange(0, K)
    is_row, is_col = rows < count, cols < D
    at = rows.to(tl.int64)[:, None] * D + cols[None, :]
    values = tl.load(weight + at, mask=is_row[:, None] & is_col[None, :], other=0.0).to(tl.float32)
    scaled, scale = by_row(values, tl.load(peaks + cols, mask=is_col, other=0.0)[None, :])
    turned = tl.trans(scaled).to(eight.dtype.element_ty)
    to = cols.to(tl.int64)[:, None] * stride + rows[None, :]
    tl.store(eight + to, turned, mask=is_col[:, None] & is_row[None, :])
    if tl.program_id(0) == 0:
        tl.store(scales + cols[None, :], scale, mask=is_col[None, :])


def round_weight(weights: list[Tensor], into: EightWeight) -> None:
    """See `reference.round_weight`."""
    forward, backward = into.forward, into.backward
    outputs, width = forward.values.shape
    peaks = torch.zeros(width, device=forward.values.device)
    sizes = [len(weight) for weight in weights]
    rows, scales = forward.values.split(sizes), forward.scale.split(sizes)
    tuning, places = TUNING["weight"], backward.values.split(sizes, dim=1)
    tiles = [(triton.cdiv(size, tuning["N"]), triton.cdiv(width, tuning["K"])) for size in sizes]
    for weight, values, scale, grid in zip(weights, rows, scales, tiles, strict=True):
        _into(weight, Eight(values, scale))
        _weight_peaks[grid](weight, peaks, len(weight), D=width, **tuning)
    for weight, values, grid in zip(weights, places, tiles, strict=True):
        _weight_columns[grid](weight, peaks, values, backward.scale, len(weight), outputs, D=width, **tuning)
