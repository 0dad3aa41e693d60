"""The operations between the products of a block on a CPU, in float32 and few passes over memory.

What each computes is said in `reference.py`; here every sample has the same number of rows, so that its numbers
(scale, shift, gate: [B, D]) spread by broadcasting, and each operation keeps for its backward pass what that can use.
Shapes: B samples, N rows a sample of one stream, M = B N, D width, H heads, E width of a head, K rows a sample of both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sd3_light.model.fast.reference import EPS, HeadNorms, Pending

_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_SLOPE_1 = torch.tensor(_SLOPE)

FEW = 256
"""Up to so many rows a sample, all products of queries and keys at once are quicker than torch's attention."""


@dataclass
class Normed:
    """A normed stream: ``x`` with what was pending added, ``h`` normed, scaled and shifted, both [M, D]."""

    x: Tensor
    h: Tensor
    normed: Tensor
    mean: Tensor
    rstd: Tensor
    scale_1: Tensor
    pending: Pending | None


def residual_norm(x: Tensor, pending: Pending | None, scale: Tensor, shift: Tensor) -> Normed:
    """The stream with what was pending added, and its norm scaled and shifted."""
    count, (samples, width) = len(x), scale.shape
    if pending is not None:
        y, bias, gate = pending
        x = torch.addcmul(_spread(x, samples), gate[:, None], _spread(y + bias, samples)).view(count, width)
    normed, mean, rstd = torch.native_layer_norm(x, (width,), None, None, EPS)
    scale_1 = (1 + scale)[:, None]
    h = torch.addcmul(shift[:, None], _spread(normed, samples), scale_1).view(count, width)
    return Normed(x, h, normed, mean, rstd, scale_1, pending)


@dataclass
class NormedGrads:
    """Gradients of what `residual_norm` took; those of what was pending are None where nothing was."""

    x: Tensor
    scale: Tensor
    shift: Tensor
    y: Tensor | None = None
    bias: Tensor | None = None
    gate: Tensor | None = None


def residual_norm_backward(kept: Normed, dh: Tensor, gx: Tensor | None) -> NormedGrads:
    """From the gradient of ``h`` and, along the stream, ``gx``."""
    samples, (count, width) = len(kept.scale_1), dh.shape
    dh_BND = _spread(dh, samples)
    dnormed = (dh_BND * kept.scale_1).view(count, width)
    dx = torch.ops.aten.native_layer_norm_backward(
        dnormed, kept.x, [width], kept.mean, kept.rstd, None, None, [True, False, False]
    )[0]
    if gx is not None:
        dx += gx
    dscale = torch.mul(dh, kept.normed, out=dnormed).view(samples, -1, width).sum(1)
    found = NormedGrads(dx, dscale, dh_BND.sum(1))
    if kept.pending is not None:
        y, bias, gate = kept.pending
        dx_BND = _spread(dx, samples)
        total_BD = dx_BND.sum(1)
        found.y = (dx_BND * gate[:, None]).view(count, width)
        found.gate = torch.addcmul(torch.mul(dx, y, out=dnormed).view(samples, -1, width).sum(1), total_BD, bias)
        found.bias = (total_BD * gate).sum(0)
    return found


def gelu(u: Tensor) -> tuple[Tensor, Tensor]:
    """(GELU in its tanh form, the share of ``u`` that it lets through).

    0.5 (1 + tanh(z)) = sigmoid(2 z), which is quicker to compute.
    """
    share = torch.addcmul(_SLOPE_1, u, u, value=_SLOPE * _CUBIC).mul_(u).sigmoid_()
    return u * share, share


def gelu_backward(dg: Tensor, u: Tensor, share: Tensor) -> Tensor:
    """The gradient of ``u``; ``dg`` and ``u`` are used up."""
    inner = torch.addcmul(_SLOPE_1, u, u, value=3 * _SLOPE * _CUBIC).mul_(u)
    slope = torch.addcmul(share, share, share, value=-1, out=u).mul_(inner).add_(share)
    return slope.mul_(dg)


@dataclass
class Heads:
    """Queries, keys and values [3, B, H, K, E] of image and text, and how the first two were normed."""

    qkv: Tensor
    normed: Tensor | None = None
    rstd: Tensor | None = None
    weight: Tensor | None = None


def join(qkv: Sequence[Tensor], norms: Sequence[HeadNorms], num_heads: int, lengths: Sequence[int]) -> Heads:
    """Rows [M, 3 D] of both streams, with so many a sample, joined; queries and keys are normed."""
    samples, width = len(qkv[0]) // lengths[0], qkv[0].shape[1] // (3 * num_heads)
    joined = qkv[0].new_empty(3, samples, num_heads, sum(lengths), width)
    for rows, place in zip(qkv, joined.split(list(lengths), dim=3), strict=True):
        place.copy_(rows.view(samples, -1, 3, num_heads, width).permute(2, 0, 3, 1, 4))
    given = [pair for pair in norms if pair is not None]
    if not given:
        return Heads(joined)
    pair = joined[:2]
    rstd = torch.mul(pair, pair).mean(-1, keepdim=True).add_(EPS).rsqrt_()
    weights = [torch.stack(mine)[:, None].expand(-1, rows, -1) for mine, rows in zip(given, lengths, strict=True)]
    weight = torch.cat(weights, dim=1)[:, None, None]
    normed = pair * rstd
    torch.mul(normed, weight, out=pair)
    return Heads(joined, normed, rstd, weight)


def join_backward(grad: Tensor, kept: Heads, lengths: Sequence[int]) -> tuple[list[Tensor], list[Any]]:
    """(gradient of each stream's rows [M, 3 D], of its norms' weights) from that of ``kept.qkv``, which is used up."""
    weights: list[Any] = [None, None]
    if kept.normed is not None and kept.rstd is not None and kept.weight is not None:
        pair = grad[:2]
        product = pair * kept.normed
        by_row = product.flatten(1, 2).sum(1)
        weights = [part.sum(1).unbind() for part in by_row.split(list(lengths), dim=1)]
        mean = product.mul_(kept.weight).mean(-1, keepdim=True)
        pair.mul_(kept.weight).addcmul_(kept.normed, mean, value=-1).mul_(kept.rstd)
    samples = grad.shape[1]
    parts = [part.permute(1, 3, 0, 2, 4) for part in grad.split(list(lengths), dim=3)]
    return [part.reshape(samples * part.shape[1], -1) for part in parts], weights


@dataclass
class Attended:
    """Attention over [3, B, H, K, E]: what it gave the first Q rows [B, H, Q, E], and what the backward pass needs."""

    output: Tensor
    qkv: Tensor
    shares: Tensor | None = None
    leaves: tuple[Tensor, ...] = ()


def attend(qkv: Tensor, queries: int) -> Attended:
    """Each of the first ``queries`` rows of a sample looks at all of its rows."""
    _, samples, heads, rows, width = qkv.shape
    if rows > FEW:
        with torch.enable_grad():
            parts = (qkv[0, :, :, :queries], qkv[1], qkv[2])
            query, key, value = leaves = tuple(part.detach().requires_grad_() for part in parts)
            return Attended(F.scaled_dot_product_attention(query, key, value), qkv, leaves=leaves)
    query, key, value = qkv.view(3, samples * heads, rows, width)
    scores = torch.bmm(query[:, :queries], key.transpose(1, 2)).mul_(width**-0.5)
    shares = torch.softmax(scores, -1)
    return Attended(torch.bmm(shares, value).view(samples, heads, queries, width), qkv, shares)


def attend_backward(kept: Attended, grad: Tensor) -> Tensor:
    """The gradient [3, B, H, K, E] from that of the output; rows that asked nothing have none of their queries."""
    _, samples, heads, rows, width = kept.qkv.shape
    queries, found = grad.shape[2], torch.empty_like(kept.qkv)
    found[0, :, :, queries:] = 0
    if kept.shares is None:
        dquery, found[1], found[2] = torch.autograd.grad(kept.output, kept.leaves, grad)
    else:
        query, key, value = kept.qkv.view(3, samples * heads, rows, width)
        shares, grad = kept.shares, grad.reshape(samples * heads, queries, width)
        _, dkey, dvalue = found.view(3, samples * heads, rows, width)
        torch.bmm(shares.transpose(1, 2), grad, out=dvalue)
        dshares = torch.bmm(grad, value.transpose(1, 2))
        dscores = torch._softmax_backward_data(dshares, shares, -1, torch.float32).mul_(width**-0.5)
        torch.bmm(dscores.transpose(1, 2), query[:, :queries], out=dkey)
        dquery = torch.bmm(dscores, key).view(samples, heads, queries, width)
    found[0, :, :, :queries] = dquery
    return found


def merge_heads(output: Tensor) -> Tensor:
    """[B, H, N, E] -> [M, D]."""
    return output.transpose(1, 2).reshape(-1, output.shape[1] * output.shape[3])


def _spread(rows: Tensor, samples: int) -> Tensor:
    """[M, D] as [B, N, D]."""
    return rows.view(samples, -1, rows.shape[1])
