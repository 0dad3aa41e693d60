"""Triton kernels of the half-precision VAE encoder: GroupNorm with SiLU, and the sum of a residual block.

Images are channels last: rows of pixels, C channels each. A program walks some rows of one image and writes one partial
sum per channel; torch adds the partial sums. No result depends on the order of programs or on the rest of the batch, so
results repeat bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_PER_PROGRAM = 256
"""Pixels that one program walks."""
TILE = 4096
"""Elements that a program holds at a time."""


@triton.jit
def _sums(x, partial, count, chunks, C: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, WALK: tl.constexpr):
    chunk = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([R, BLOCK], dtype=tl.float32)
    squares = tl.zeros([R, BLOCK], dtype=tl.float32)
    for start in tl.range(0, WALK, R):
        rows = (chunk * WALK + start + tl.arange(0, R))[:, None]
        mask = (rows < count) & (cols < C)
        value = tl.load(x + (image * count + rows) * C + cols, mask=mask, other=0.0).to(tl.float32)
        total += value
        squares += value * value
    at = (image * chunks + chunk) * 2 * C + tl.arange(0, BLOCK)
    tl.store(partial + at, tl.sum(total, axis=0), mask=tl.arange(0, BLOCK) < C)
    tl.store(partial + at + C, tl.sum(squares, axis=0), mask=tl.arange(0, BLOCK) < C)


@triton.jit
def _scale_silu(x, scale, shift, out, count, C: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    rows = (tl.program_id(0) * R + tl.arange(0, R))[:, None]
    image = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < count) & (cols < C)
    at = (image * count + rows) * C + cols
    by = tl.load(scale + image * C + cols, mask=cols < C, other=0.0)
    plus = tl.load(shift + image * C + cols, mask=cols < C, other=0.0)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * by + plus
    tl.store(out + at, (value * tl.sigmoid(value)).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add(x, y, bias, out, count, C: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    rows = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < count) & (cols < C)
    at = rows * C + cols
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + tl.load(bias + cols, mask=cols < C, other=0.0)
    value += tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


def _blocks(channels: int) -> dict[str, int]:
    block = triton.next_power_of_2(channels)
    return {"C": channels, "BLOCK": block, "R": min(ROWS_PER_PROGRAM, max(1, TILE // block))}


def norm_silu(x_BCHW: Tensor, bias: Tensor, groups: int, weight: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return silu(group_norm(x + bias)); ``bias``, ``weight`` and ``shift`` are float32 [C]."""
    x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
    batch, channels, height, width = x_BCHW.shape
    count = height * width
    chunks = triton.cdiv(height * width, ROWS_PER_PROGRAM)
    partial = torch.empty(batch, chunks, 2, channels, device=x_BCHW.device, dtype=torch.float32)
    blocks = _blocks(channels)
    with torch.cuda.device_of(x_BCHW):  # kernels run on the current device
        _sums[(chunks, batch)](x_BCHW, partial, count, chunks, WALK=ROWS_PER_PROGRAM, **blocks)
    mean, squares = (partial.sum(1) / count).unbind(1)
    # those of x + bias
    squares = squares + (2 * mean + bias) * bias
    mean = mean + bias
    mean_BG, squares_BG = (part.view(batch, groups, -1).mean(2, keepdim=True) for part in (mean, squares))
    rstd_BG = ((squares_BG - mean_BG.square()).clamp(min=0) + eps).rsqrt()
    by = (rstd_BG * weight.view(groups, -1)).view(batch, channels)
    plus = shift + (bias - mean_BG.expand(-1, -1, channels // groups).reshape(batch, channels)) * by
    out = torch.empty_like(x_BCHW)
    with torch.cuda.device_of(x_BCHW):
        _scale_silu[(triton.cdiv(count, blocks["R"]), batch)](x_BCHW, by, plus, out, count, **blocks)
    return out


def add(x_BCHW: Tensor, y_BCHW: Tensor, bias: Tensor) -> Tensor:
    """Return x + y + bias; ``bias`` is float32 [C]."""
    x_BCHW, y_BCHW = (part.contiguous(memory_format=torch.channels_last) for part in (x_BCHW, y_BCHW))
    count = x_BCHW.numel() // x_BCHW.shape[1]
    blocks = _blocks(x_BCHW.shape[1])
    out = torch.empty_like(x_BCHW)
    with torch.cuda.device_of(x_BCHW):
        _add[(triton.cdiv(count, blocks["R"]),)](x_BCHW, y_BCHW, bias, out, count, **blocks)
    return out
