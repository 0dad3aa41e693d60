"""`adamw_8bit.advance` as one Triton kernel: every element is read and written once."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from sd3_light.optim.adamw_8bit import BLOCK, Rates, WeightSlice

_ROWS = 4  # blocks of a program


@triton.jit
def _advance(values, gradients, firsts, first_scales, seconds, second_scales, draws, rounding, corrections, skip,
             count, lr, kept, first_share, second_share, eps,
             IS_ROUNDED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Advance some blocks. The square roots and powers are those of `compress` and `expand`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < count
    is_taken = tl.load(skip) == 0
    written = inside & is_taken
    is_row = row * BLOCK < count
    gradient = tl.load(gradients + at, mask=inside, other=0).to(tl.float32)

    code = tl.load(firsts + at, mask=inside, other=0).to(tl.float32) / 127.0
    power = (code * code) * (code * code) * tl.load(first_scales + row, mask=is_row, other=0)[:, None]
    first = tl.where(code < 0, -power, power)
    first += first_share * (gradient - first)
    scale = tl.max(tl.abs(first), axis=1)
    tl.store(first_scales + row, scale, mask=is_row & is_taken)
    code = tl.sqrt(tl.sqrt(tl.abs(first) / tl.maximum(scale, 1.1754944e-38)[:, None])) * 127.0
    code = tl.floor(code + 0.5)
    tl.store(firsts + at, tl.where(first < 0, -code, code).to(firsts.dtype.element_ty), mask=written)

    code = tl.load(seconds + at, mask=inside, other=0).to(tl.float32) / 255.0
    power = (code * code) * (code * code)
    second = power * power * tl.load(second_scales + row, mask=is_row, other=0)[:, None]
    second += second_share * (gradient * gradient - second)
    scale = tl.max(second, axis=1)
    tl.store(second_scales + row, scale, mask=is_row & is_taken)
    code = tl.sqrt(tl.sqrt(tl.sqrt(second / tl.maximum(scale, 1.1754944e-38)[:, None]))) * 255.0
    code = tl.floor(code + tl.load(draws + at, mask=inside, other=0))
    code = tl.where(second == 0, 0.0, tl.maximum(tl.minimum(code, 255.0), 1.0))
    tl.store(seconds + at, code.to(seconds.dtype.element_ty), mask=written)

    size = tl.sqrt(second / tl.load(corrections + 1)) + eps
    value = tl.load(values + at, mask=inside, other=0).to(tl.float32)
    value = value * kept - lr * (first / tl.load(corrections) / size)
    if IS_ROUNDED:
        bits = tl.cast(value, tl.int32, bitcast=True) + tl.load(rounding + at, mask=inside, other=0)
        value = tl.cast((bits >> 16).to(tl.int16), values.dtype.element_ty, bitcast=True)
    tl.store(values + at, value, mask=written)


def advance(piece: WeightSlice, rates: Rates) -> None:
    """Do what `adamw_8bit.advance` does."""
    is_rounded = piece.rounding is not None
    grid = (triton.cdiv(len(piece.values), BLOCK * _ROWS),)
    _advance[grid](
        piece.values, piece.gradient, piece.first, piece.first_scale, piece.second, piece.second_scale,
        piece.draws, piece.rounding if is_rounded else piece.draws, rates.corrections, rates.skip,
        len(piece.values), rates.lr, 1 - rates.lr * rates.weight_decay,
        1 - rates.betas[0], 1 - rates.betas[1], rates.eps,
        IS_ROUNDED=is_rounded, BLOCK=BLOCK, ROWS=_ROWS,
    )  # fmt: skip
