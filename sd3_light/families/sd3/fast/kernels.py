"""The operations of `reference.py` as Triton kernels: each reads its inputs once and writes its outputs once.

Sums over the rows of a sample are computed where the rows are read: a program walks some rows of one sample, keeps the
sums in registers and writes one partial row; torch adds the partial rows afterwards. No result depends on the order in
which programs run, so results repeat bit for bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sd3_light.families.sd3.fast import kernels_fp8, reference
from sd3_light.families.sd3.fast.fp8 import Operand, RowForm
from sd3_light.families.sd3.fast.kernels_fp8 import TUNING, RowOutput, by_row, round_rows, store_rows
from sd3_light.families.sd3.fast.kernels_fp8 import round_weight as round_weight
from sd3_light.families.sd3.fast.reference import EPS, HeadNorms, PendingUpdate
from sd3_light.families.sd3.fast.row_layout import RowLayout, Rows

ROWS_PER_PROGRAM = 32
"""Rows that one program walks when it sums over rows."""


def _tuning_key(kernel: str, form: RowForm) -> str:
    return kernel if form == "plain" else f"{kernel}_fp8"


# --- norm, scale, shift; gate and residual -----------------------------------------------------


@triton.jit
def _norm(x, y, bias, gate, scale, shift, owner, x_out, h, h8, scales, gate_stride, mod_stride, count,
          EPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, PENDING: tl.constexpr,
          PLAIN: tl.constexpr, EIGHT: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.arange(0, BLOCK)[None, :]
    is_row = (rows < count)[:, None]
    mask = is_row & (cols < D)
    sample = tl.load(owner + rows, mask=rows < count, other=0).to(tl.int64)[:, None]
    at = rows.to(tl.int64)[:, None] * D + cols
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if PENDING:
        added = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        added += tl.load(bias + cols, mask=cols < D, other=0.0).to(tl.float32)
        value += added * tl.load(gate + sample * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(x_out.dtype.element_ty)
        tl.store(x_out + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
    mean = tl.sum(value, axis=1)[:, None] / D
    centred = tl.where(mask, value - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1)[:, None] / D + EPS)
    by = tl.load(scale + sample * mod_stride + cols, mask=mask, other=0.0).to(tl.float32)
    plus = tl.load(shift + sample * mod_stride + cols, mask=mask, other=0.0).to(tl.float32)
    made = centred * rstd * (1.0 + by) + plus
    store_rows(made, h, h8, scales, rows[:, None], at, is_row, mask, PLAIN, EIGHT)


def residual_norm(
    x: Tensor, pending: PendingUpdate | None, scale: Tensor, shift: Tensor, rows: Rows, form: RowForm = "plain"
) -> tuple[Tensor, Any]:
    """See `reference.residual_norm`."""
    count, width = x.shape
    assert x.is_contiguous() and scale.stride(0) == shift.stride(0)
    y, bias, gate = pending if pending is not None else (x, x, x)
    assert y.is_contiguous()
    output = RowOutput(count, width, x, form)
    x_out = torch.empty_like(x) if pending is not None else x
    tuning = TUNING[_tuning_key("norm", form)]
    _norm[(triton.cdiv(count, tuning["R"]),)](
        x, y, bias, gate, scale, shift, rows.sample_index, x_out, *output.pointers, gate.stride(0), scale.stride(0),
        count, EPS=EPS, D=width, BLOCK=triton.next_power_of_2(width), PENDING=pending is not None, **output.flags,
        **tuning,
    )  # fmt: skip
    return x_out, output.operand()


@triton.jit
def _norm_backward(dh, gx, x, y, bias, gate, scale, shift, starts, dx, dy, dy8, scales, h, partial, gate_stride,
                   mod_stride,
                   EPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
                   SUMS: tl.constexpr, STREAM: tl.constexpr, PENDING: tl.constexpr, AGAIN: tl.constexpr,
                   PLAIN: tl.constexpr, EIGHT: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + sample) + tl.program_id(1) * CHUNK
    last = tl.minimum(first + CHUNK, tl.load(starts + sample + 1))
    flat = tl.arange(0, BLOCK)
    cols = flat[None, :]
    by = 1.0 + tl.load(scale + sample * mod_stride + cols, mask=cols < D, other=0.0).to(tl.float32)
    if AGAIN:
        plus = tl.load(shift + sample * mod_stride + cols, mask=cols < D, other=0.0).to(tl.float32)
    sum_dh = tl.zeros([BLOCK], dtype=tl.float32)
    sum_dh_normed = tl.zeros([BLOCK], dtype=tl.float32)
    if PENDING:
        gates = tl.load(gate + sample * gate_stride + cols, mask=cols < D, other=0.0).to(tl.float32)
        biases = tl.load(bias + cols, mask=cols < D, other=0.0).to(tl.float32)
        sum_dx = tl.zeros([BLOCK], dtype=tl.float32)
        sum_dx_y = tl.zeros([BLOCK], dtype=tl.float32)
    for row in tl.range(first, last, R, num_stages=STAGES):
        rows = row + tl.arange(0, R)[:, None]
        mask = (rows < last) & (cols < D)
        at = rows.to(tl.int64) * D + cols
        grad = tl.load(dh + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(value, axis=1)[:, None] / D
        centred = tl.where(mask, value - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1)[:, None] / D + EPS)
        normed = centred * rstd
        if AGAIN:
            tl.store(h + at, (normed * by + plus).to(h.dtype.element_ty), mask=mask)
        dnormed = grad * by
        along = tl.sum(dnormed * normed, axis=1)[:, None] / D
        result = rstd * (dnormed - tl.sum(dnormed, axis=1)[:, None] / D - normed * along)
        if STREAM:
            result += tl.load(gx + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)
        sum_dh += tl.sum(grad, axis=0)
        sum_dh_normed += tl.sum(grad * normed, axis=0)
        if PENDING:
            result = tl.where(mask, result, 0.0)
            store_rows(result * gates, dy, dy8, scales, rows, at, rows < last, mask, PLAIN, EIGHT)
            added = tl.load(y + at, mask=mask, other=0.0).to(tl.float32) + biases
            sum_dx += tl.sum(result, axis=0)
            sum_dx_y += tl.sum(result * added, axis=0)
    out = partial + (sample * tl.num_programs(1) + tl.program_id(1)) * SUMS * D + flat
    tl.store(out, sum_dh, mask=flat < D)
    tl.store(out + D, sum_dh_normed, mask=flat < D)
    if PENDING:
        tl.store(out + 2 * D, sum_dx_y, mask=flat < D)
        tl.store(out + 3 * D, sum_dx, mask=flat < D)


def residual_norm_backward(
    dh: Tensor,
    gx: Tensor | None,
    x: Tensor,
    pending: PendingUpdate | None,
    scale: Tensor,
    rows: Rows,
    shift: Tensor | None = None,
    form: RowForm = "plain",
) -> tuple[Tensor, Operand | None, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """See `reference.residual_norm_backward`."""
    assert dh.is_contiguous() and x.is_contiguous() and (gx is None or gx.is_contiguous())
    width = x.shape[1]
    sums = 2 if pending is None else 4
    y, bias, gate = pending if pending is not None else (x, x, x)
    dx = torch.empty_like(x)
    output = RowOutput(0 if pending is None else len(x), width, x, form)
    h = torch.empty_like(x) if shift is not None else None
    assert shift is None or shift.stride(0) == scale.stride(0)
    grid = (rows.samples, triton.cdiv(rows.longest, ROWS_PER_PROGRAM))
    partial = x.new_empty(*grid, sums, width, dtype=torch.float32)
    _norm_backward[grid](
        dh, x if gx is None else gx, x, y, bias, gate, scale, scale if shift is None else shift, rows.starts,
        dx, *output.pointers, dx if h is None else h, partial, gate.stride(0), scale.stride(0),
        EPS=EPS, D=width, BLOCK=triton.next_power_of_2(width), CHUNK=ROWS_PER_PROGRAM, SUMS=sums,
        STREAM=gx is not None, PENDING=pending is not None, AGAIN=shift is not None, **output.flags,
        **TUNING[_tuning_key("norm_backward", form)],
    )  # fmt: skip
    total = partial.sum(1)
    if pending is None:
        return dx, None, total[:, 1], total[:, 0], None, None, h
    dbias = (gate.float() * total[:, 3]).sum(0)
    return dx, output.operand(), total[:, 1], total[:, 0], total[:, 2], dbias, h


# --- GELU --------------------------------------------------------------------------------------


@triton.jit
def _gelu_backward(dg, u, du, g, partial, count, F: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
                   CHUNK: tl.constexpr, AGAIN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    first = tl.program_id(0) * CHUNK
    last = tl.minimum(first + CHUNK, count)
    flat = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cols = flat[None, :]
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in tl.range(first, last, R, num_stages=STAGES):
        rows = row + tl.arange(0, R)[:, None]
        mask = (rows < last) & (cols < F)
        at = rows.to(tl.int64) * F + cols
        value = tl.load(u + at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dg + at, mask=mask, other=0.0).to(tl.float32)
        square = value * value
        share = tl.sigmoid(1.5957691216057308 * value * (1.0 + 0.044715 * square))
        inner = value * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * square)
        result = grad * (share + inner)
        tl.store(du + at, result.to(du.dtype.element_ty), mask=mask)
        if AGAIN:
            tl.store(g + at, (value * share).to(g.dtype.element_ty), mask=mask)
        total += tl.sum(result, axis=0)
    tl.store(partial + tl.program_id(0).to(tl.int64) * F + flat, total, mask=flat < F)


def gelu(u: Tensor, form: RowForm = "plain") -> Any:
    """See `reference.gelu`."""
    return reference.gelu(u) if form == "plain" else kernels_fp8.gelu(u, form)


def gelu_backward(
    dg: Tensor, u: Tensor, recompute: bool, form: RowForm = "plain"
) -> tuple[Operand, Tensor | None, Tensor]:
    """See `reference.gelu_backward`."""
    assert dg.is_contiguous() and u.is_contiguous()
    count, width = u.shape
    tuning = TUNING["gelu_backward"]
    chunk = 2 * ROWS_PER_PROGRAM
    grid = (triton.cdiv(count, chunk), triton.cdiv(width, tuning["BLOCK"]))
    du = torch.empty_like(u)
    g = torch.empty_like(u) if recompute else u
    partial = u.new_empty(grid[0], width, dtype=torch.float32)
    _gelu_backward[grid](dg, u, du, g, partial, count, F=width, CHUNK=chunk, AGAIN=recompute, **tuning)
    # rows are too wide to hold whole while summing: a second pass that rounds them takes half the time
    return du if form == "plain" else round_rows(du), g if recompute else None, partial.sum(0)


# --- queries, keys and values ------------------------------------------------------------------


@triton.jit
def _join(qkv, wq, wk, place, query, key, value, EPS: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
          HEADS: tl.constexpr, NORMED: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    to = tl.load(place + row).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    units = tl.arange(0, E)[None, :]
    at = heads * E + units
    mask = (heads < H) & (units < E)
    source = qkv + row * 3 * H * E + at
    target = to * H * E + at
    q = tl.load(source, mask=mask, other=0.0)
    k = tl.load(source + H * E, mask=mask, other=0.0)
    tl.store(value + target, tl.load(source + 2 * H * E, mask=mask, other=0.0), mask=mask)
    if NORMED:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, axis=1)[:, None] / E + EPS) * tl.load(wq + units).to(tl.float32)
        k = k * tl.rsqrt(tl.sum(k * k, axis=1)[:, None] / E + EPS) * tl.load(wk + units).to(tl.float32)
    tl.store(query + target, q.to(query.dtype.element_ty), mask=mask)
    tl.store(key + target, k.to(key.dtype.element_ty), mask=mask)


def join(
    qkv: tuple[Tensor, Tensor],
    norms: tuple[HeadNorms, HeadNorms],
    heads: int,
    layout: RowLayout,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """See `reference.join`."""
    width = qkv[0].shape[1] // 3
    units = width // heads
    assert units == triton.next_power_of_2(units), "the width of a head must be a power of two"
    query, key, value = out or (qkv[0].new_empty(layout.capacity, heads, units) for _ in range(3))
    for stream, pair, rows in zip(qkv, norms, (layout.image, layout.text), strict=True):
        assert stream.is_contiguous()
        wq, wk = pair if pair is not None else (stream, stream)
        _join[(len(stream),)](
            stream, wq, wk, rows.joined_index, query, key, value, EPS=EPS, H=heads, E=units,
            HEADS=triton.next_power_of_2(heads), NORMED=pair is not None, **TUNING["join"],
        )  # fmt: skip
    return query, key, value


@triton.jit
def _norm_of_heads_backward(grad, value, weight, EPS: tl.constexpr, E: tl.constexpr):
    """Return (gradient before the norm, contribution to the weight's gradient)."""
    rstd = tl.rsqrt(tl.sum(value * value, axis=1)[:, None] / E + EPS)
    normed = value * rstd
    dnormed = grad * weight
    along = tl.sum(dnormed * normed, axis=1)[:, None] / E
    return rstd * (dnormed - normed * along), grad * normed


@triton.jit
def _join_backward(dq, dk, dv, qkv, wq, wk, place, dqkv, dqkv8, scales, partial, partial_norm, count,
                   EPS: tl.constexpr, H: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
                   NORMED: tl.constexpr, EIGHT: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    first = tl.program_id(0) * CHUNK
    last = tl.minimum(first + CHUNK, count)
    heads = tl.arange(0, HEADS)[:, None]
    units = tl.arange(0, E)[None, :]
    at = heads * E + units
    mask = (heads < H) & (units < E)
    sum_q = tl.zeros([HEADS, E], dtype=tl.float32)
    sum_k = tl.zeros([HEADS, E], dtype=tl.float32)
    sum_v = tl.zeros([HEADS, E], dtype=tl.float32)
    if NORMED:
        weight_q = tl.load(wq + units).to(tl.float32)
        weight_k = tl.load(wk + units).to(tl.float32)
        sum_wq = tl.zeros([HEADS, E], dtype=tl.float32)
        sum_wk = tl.zeros([HEADS, E], dtype=tl.float32)
    for row in tl.range(first, last, num_stages=STAGES):
        source = tl.load(place + row).to(tl.int64) * H * E + at
        target = row.to(tl.int64) * 3 * H * E + at
        grad_q = tl.load(dq + source, mask=mask, other=0.0).to(tl.float32)
        grad_k = tl.load(dk + source, mask=mask, other=0.0).to(tl.float32)
        grad_v = tl.load(dv + source, mask=mask, other=0.0).to(tl.float32)
        if NORMED:
            q = tl.load(qkv + target, mask=mask, other=0.0).to(tl.float32)
            k = tl.load(qkv + target + H * E, mask=mask, other=0.0).to(tl.float32)
            grad_q, of_wq = _norm_of_heads_backward(grad_q, q, weight_q, EPS, E)
            grad_k, of_wk = _norm_of_heads_backward(grad_k, k, weight_k, EPS, E)
            sum_wq += of_wq
            sum_wk += of_wk
        sum_q += grad_q
        sum_k += grad_k
        sum_v += grad_v
        tl.store(dqkv + target, grad_q.to(dqkv.dtype.element_ty), mask=mask)
        tl.store(dqkv + target + H * E, grad_k.to(dqkv.dtype.element_ty), mask=mask)
        tl.store(dqkv + target + 2 * H * E, grad_v.to(dqkv.dtype.element_ty), mask=mask)
        if EIGHT:
            highest = tl.maximum(tl.maximum(tl.abs(grad_q), tl.abs(grad_k)), tl.abs(grad_v))
            peak = tl.max(tl.max(highest, axis=1), axis=0)
            grad_q, scale = by_row(grad_q, peak)
            grad_k, scale = by_row(grad_k, peak)
            grad_v, scale = by_row(grad_v, peak)
            tl.store(scales + row, scale)
            tl.store(dqkv8 + target, grad_q.to(dqkv8.dtype.element_ty), mask=mask)
            tl.store(dqkv8 + target + H * E, grad_k.to(dqkv8.dtype.element_ty), mask=mask)
            tl.store(dqkv8 + target + 2 * H * E, grad_v.to(dqkv8.dtype.element_ty), mask=mask)
    out = partial + tl.program_id(0).to(tl.int64) * 3 * H * E + at
    tl.store(out, sum_q, mask=mask)
    tl.store(out + H * E, sum_k, mask=mask)
    tl.store(out + 2 * H * E, sum_v, mask=mask)
    if NORMED:
        flat = tl.program_id(0) * 2 * E + tl.arange(0, E)
        tl.store(partial_norm + flat, tl.sum(sum_wq, axis=0))
        tl.store(partial_norm + flat + E, tl.sum(sum_wk, axis=0))


def join_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, norms: HeadNorms, heads: int, rows: Rows, form: RowForm = "plain"
) -> tuple[Operand, Tensor, tuple[Tensor, Tensor] | None]:
    """See `reference.join_backward`."""
    assert form != "fp8", "weight gradients read the plain rows"
    assert qkv.is_contiguous() and all(grad.is_contiguous() for grad in grads)
    count = len(qkv)
    units = qkv.shape[1] // (3 * heads)
    grid = (triton.cdiv(count, ROWS_PER_PROGRAM),)
    output = RowOutput(count, qkv.shape[1], qkv, form)
    partial = qkv.new_empty(*grid, qkv.shape[1], dtype=torch.float32)
    partial_norm = qkv.new_empty(*grid, 2, units, dtype=torch.float32)
    wq, wk = norms if norms is not None else (qkv, qkv)
    _join_backward[grid](
        *grads, qkv, wq, wk, rows.joined_index, *output.pointers, partial, partial_norm, count, EPS=EPS, H=heads,
        E=units, HEADS=triton.next_power_of_2(heads), CHUNK=ROWS_PER_PROGRAM, NORMED=norms is not None,
        EIGHT=form != "plain", **TUNING[_tuning_key("join_backward", form)],
    )  # fmt: skip
    if norms is None:
        return output.operand(), partial.sum(0), None
    weights = partial_norm.sum(0)
    return output.operand(), partial.sum(0), (weights[0], weights[1])


# --- copying rows to and from the joined rows --------------------------------------------------


@triton.jit
def _gather(source, place, plain, eight, scales, count, D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
          PLAIN: tl.constexpr, EIGHT: tl.constexpr):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.arange(0, BLOCK)[None, :]
    is_row = (rows < count)[:, None]
    mask = is_row & (cols < D)
    there = tl.load(place + rows, mask=rows < count, other=0).to(tl.int64)[:, None] * D + cols
    here = rows.to(tl.int64)[:, None] * D + cols
    values = tl.load(source + there, mask=mask, other=0.0).to(tl.float32)
    store_rows(values, plain, eight, scales, rows[:, None], here, is_row, mask, PLAIN, EIGHT)


def gather_rows(joined: Tensor, rows: Rows, form: RowForm = "plain") -> Any:
    """See `reference.gather_rows`."""
    assert joined.is_contiguous()
    width = joined[0].numel()
    tuning = TUNING[_tuning_key("copy", form)]
    output = RowOutput(rows.count, width, joined, form)
    block = triton.next_power_of_2(width)
    _gather[(triton.cdiv(rows.count, tuning["R"]),)](
        joined, rows.joined_index, *output.pointers, rows.count, D=width, BLOCK=block, **output.flags, **tuning
    )
    return output.operand()


@triton.jit
def _scatter(source, place, target, count, D: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < count)[:, None] & (cols < D)
    there = tl.load(place + rows, mask=rows < count, other=0).to(tl.int64)[:, None] * D + cols
    here = rows.to(tl.int64)[:, None] * D + cols
    tl.store(target + there, tl.load(source + here, mask=mask, other=0.0), mask=mask)


def scatter_rows(image: Tensor, text: Tensor, layout: RowLayout) -> Tensor:
    """See `reference.scatter_rows`."""
    assert image.is_contiguous() and text.is_contiguous()
    joined = image.new_empty(layout.capacity, *image.shape[1:])
    width = image[0].numel()
    tuning = TUNING["copy"]
    for source, rows in ((image, layout.image), (text, layout.text)):
        grid: Any = (triton.cdiv(rows.count, tuning["R"]),)
        block = triton.next_power_of_2(width)
        _scatter[grid](source, rows.joined_index, joined, rows.count, D=width, BLOCK=block, **tuning)
    return joined
