"""The operations between the products of a block, in plain torch: what the kernels of `kernels.py` must compute.

They are what runs where there is no Triton, and the forward ones can be differentiated by autograd. All take and give
rows [M, D]; numbers of a sample (scale, shift, gate: [B, D]) belong to all of its rows. Sums are in float32. Rows that
go into a product come in a ``form``: a tensor of the type that computes, or an `Eight`, rounded from float32.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sd3_light.model.fast.fp8 import Eight, EightWeight, Form, Operand, formed
from sd3_light.model.fast.row_plan import Plan, Rows

EPS = 1e-6
Pending = tuple[Tensor, Tensor, Tensor]
"""(product [M, D], its bias [D], gate [B, D]): gate x (product + bias) is still to be added to the stream."""
HeadNorms = tuple[Tensor, Tensor] | None
"""Weights [E] of the norms of queries and keys."""


def spread(values_BD: Tensor, rows: Rows) -> Tensor:
    """A sample's numbers for each of its rows."""
    if rows.length is not None:
        return values_BD[:, None].expand(-1, rows.length, -1).reshape(rows.count, -1)
    return values_BD[rows.owner.long()]


def add_up(values_MD: Tensor, rows: Rows) -> Tensor:
    """Sums over the rows of each sample, [B, D]."""
    total = values_MD.new_zeros(rows.samples, values_MD.shape[1])
    return total.index_add(0, rows.owner.long(), values_MD)


def add(x: Tensor, pending: Pending, rows: Rows) -> Tensor:
    """The stream with what was pending added."""
    y, bias, gate = pending
    return (x.float() + spread(gate, rows).float() * (y.float() + bias.float())).to(x.dtype)


def residual_norm(
    x: Tensor, pending: Pending | None, scale: Tensor, shift: Tensor, rows: Rows, form: Form = "plain"
) -> tuple[Tensor, Any]:
    """(the stream with what was pending added, its norm scaled and shifted)."""
    x = x if pending is None else add(x, pending, rows)
    normed = F.layer_norm(x.float(), (x.shape[1],), eps=EPS)
    return x, formed(normed * (1 + spread(scale, rows).float()) + spread(shift, rows).float(), form, x.dtype)


def residual_norm_backward(
    dh: Tensor,
    gx: Tensor | None,
    x: Tensor,
    pending: Pending | None,
    scale: Tensor,
    rows: Rows,
    shift: Tensor | None = None,
    form: Form = "plain",
) -> tuple[Tensor, Operand | None, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients (stream, product, scale, shift, gate, bias) from the normed rows' and, along the stream, ``gx``; then
    the normed rows themselves, where ``shift`` is given to make them again. ``form`` is that of the product's gradient.

    ``x`` is the stream after what was pending; gradients of what was are None where nothing was.
    """
    dh, value = dh.float(), x.float()
    centred = value - value.mean(1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(1, keepdim=True) + EPS)
    normed = centred * rstd
    dnormed = dh * (1 + spread(scale, rows).float())
    dx = rstd * (dnormed - dnormed.mean(1, keepdim=True) - normed * (dnormed * normed).mean(1, keepdim=True))
    if gx is not None:
        dx = dx + gx.float()
    dscale, dshift = add_up(dh * normed, rows), add_up(dh, rows)
    again = None
    if shift is not None:
        again = (normed * (1 + spread(scale, rows).float()) + spread(shift, rows).float()).to(x.dtype)
    if pending is None:
        return dx.to(x.dtype), None, dscale, dshift, None, None, again
    y, bias, gate = pending
    dy = dx * spread(gate, rows).float()
    dgate = add_up(dx * (y.float() + bias.float()), rows)
    return dx.to(x.dtype), formed(dy, form, x.dtype), dscale, dshift, dgate, dy.sum(0), again


def gelu(u: Tensor, form: Form = "plain") -> Any:
    """The tanh form that SD3 has."""
    if form == "plain":
        return F.gelu(u, approximate="tanh")
    return formed(F.gelu(u.float(), approximate="tanh"), form, u.dtype)


def gelu_backward(dg: Tensor, u: Tensor, again: bool, form: Form = "plain") -> tuple[Operand, Tensor | None, Tensor]:
    """(gradient of ``u``, GELU of ``u`` where it is wanted ``again``, sum of the gradient over rows in float32)."""
    value = u.float()
    slope = 2 * math.sqrt(2 / math.pi)
    share = torch.sigmoid(slope * (value + 0.044715 * value**3))
    inner = value * share * (1 - share) * slope * (1 + 3 * 0.044715 * value.square())
    du = dg.float() * (share + inner)
    # to 8 bits from the type that computes, in a pass of its own: rows are too long to be held whole beside the sums
    return formed(du.to(u.dtype), form, u.dtype), (value * share).to(u.dtype) if again else None, du.sum(0)


def _rms(values_MHE: Tensor, weight_E: Tensor | None) -> Tensor:
    if weight_E is None:
        return values_MHE
    values = values_MHE.float()
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + EPS)
    return (normed * weight_E.float()).to(values_MHE.dtype)


def join(
    qkv: tuple[Tensor, Tensor],
    norms: tuple[HeadNorms, HeadNorms],
    heads: int,
    plan: Plan,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Queries, keys and values of image and text, [rows of both, H, E] each; queries and keys are normed.

    They are written into ``out`` where it is given.
    """
    parts: list[list[Tensor]] = []
    for stream, pair in zip(qkv, norms, strict=True):
        query, key, value = stream.unflatten(1, (3, heads, -1)).unbind(1)
        weights = pair or (None, None)
        parts.append([_rms(query, weights[0]), _rms(key, weights[1]), value])
    made = tuple(give(image, text, plan) for image, text in zip(*parts, strict=True))
    if out is None:
        return made
    for target, source in zip(out, made, strict=True):
        target.copy_(source)
    return out


def join_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, norms: HeadNorms, heads: int, rows: Rows, form: Form = "plain"
) -> tuple[Operand, Tensor, tuple[Tensor, Tensor] | None]:
    """Of one stream: gradients of its products [M, 3 D], of their bias, and of the norms' weights (float32)."""
    place = rows.place.long()
    pieces = [grad[place].float() for grad in grads]
    weights = []
    if norms is not None:
        before = qkv.unflatten(1, (3, heads, -1))
        for at, weight in enumerate(norms):
            value = before[:, at].float()
            rstd = torch.rsqrt(value.square().mean(-1, keepdim=True) + EPS)
            normed, dnormed = value * rstd, pieces[at] * weight.float()
            weights.append((pieces[at] * normed).sum((0, 1)))
            pieces[at] = rstd * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    dqkv = torch.stack(pieces, dim=1).flatten(1)
    return formed(dqkv, form, qkv.dtype), dqkv.sum(0), (weights[0], weights[1]) if weights else None


def take(joined: Tensor, rows: Rows, form: Form = "plain") -> Any:
    """The rows of one stream, [M, D]."""
    return formed(joined[rows.place.long()].flatten(1), form, joined.dtype)


def give(image: Tensor, text: Tensor, plan: Plan) -> Tensor:
    """Rows of both streams joined; the other way round from `take`."""
    if plan.text_index is None:
        shaped = [part.unflatten(0, (plan.samples, -1)) for part in (image, text)]
        return torch.cat(shaped, dim=1).flatten(0, 1)
    joined = image.new_zeros(plan.room, *image.shape[1:])
    joined = joined.index_copy(0, plan.image.place.long(), image)
    return joined.index_copy(0, plan.text.place.long(), text)


def round_rows(rows: Tensor) -> Operand:
    """Rows that exist already, with them in 8 bits."""
    return formed(rows, "both", rows.dtype)


def round_weight(weights: list[Tensor], into: EightWeight) -> None:
    """Weights that stand one below another, in 8 bits: their rows, and their columns."""
    whole = torch.cat(weights).float()
    for target, source in ((into.forward, whole), (into.backward, whole.t().contiguous())):
        made = formed(source, "eight", source.dtype)
        assert isinstance(made, Eight)
        target.values.copy_(made.values)
        target.scale.copy_(made.scale)
