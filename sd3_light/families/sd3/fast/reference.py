"""Torch reference of the operations between a block's products: what the kernels in `kernels.py` must compute.

It runs on devices other than CUDA, and autograd can differentiate the forward operations. All operations take and
return rows [M, D]; per-sample values (scale, shift, gate: [B, D]) apply to all rows of the sample. Sums are float32.
Rows that enter a product come in a ``form``: a tensor in the compute dtype, or `Fp8Rows` rounded from float32.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sd3_light.families.sd3.fast.fp8 import Fp8Rows, Fp8Weight, Operand, RowForm, to_form
from sd3_light.families.sd3.fast.row_layout import RowLayout, Rows

EPS = 1e-6
PendingUpdate = tuple[Tensor, Tensor, Tensor]
"""(product [M, D], its bias [D], gate [B, D]): gate x (product + bias) has yet to be added to the stream."""
HeadNorms = tuple[Tensor, Tensor] | None
"""Weights [E] of the query and key norms."""


def expand_to_rows(values_BD: Tensor, rows: Rows) -> Tensor:
    """Repeat each sample's values for each of its rows."""
    if rows.length is not None:
        return values_BD[:, None].expand(-1, rows.length, -1).reshape(rows.count, -1)
    return values_BD[rows.sample_index.long()]


def sum_by_sample(values_MD: Tensor, rows: Rows) -> Tensor:
    """Sum over the rows of each sample, [B, D]."""
    total = values_MD.new_zeros(rows.samples, values_MD.shape[1])
    return total.index_add(0, rows.sample_index.long(), values_MD)


def add_pending(x: Tensor, pending: PendingUpdate, rows: Rows) -> Tensor:
    """Return the stream with the pending update added."""
    y, bias, gate = pending
    return (x.float() + expand_to_rows(gate, rows).float() * (y.float() + bias.float())).to(x.dtype)


def residual_norm(
    x: Tensor, pending: PendingUpdate | None, scale: Tensor, shift: Tensor, rows: Rows, form: RowForm = "plain"
) -> tuple[Tensor, Any]:
    """Return (the stream with the pending update added, its layer norm scaled and shifted)."""
    x = x if pending is None else add_pending(x, pending, rows)
    normed = F.layer_norm(x.float(), (x.shape[1],), eps=EPS)
    return x, to_form(_modulated(normed, scale, shift, rows), form, x.dtype)


def _modulated(normed: Tensor, scale: Tensor, shift: Tensor, rows: Rows) -> Tensor:
    return normed * (1 + expand_to_rows(scale, rows).float()) + expand_to_rows(shift, rows).float()


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
    """Return the gradients of (stream, product, scale, shift, gate, bias), and the recomputed normed rows.

    The normed rows are None without ``shift``. ``dh`` is the gradient of the normed rows, ``gx`` the gradient along the
    stream, ``x`` the stream after the pending update. ``form`` applies to the product's gradient. Without a pending
    update its gradients are None.
    """
    dh = dh.float()
    value = x.float()
    centred = value - value.mean(1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(1, keepdim=True) + EPS)
    normed = centred * rstd
    dnormed = dh * (1 + expand_to_rows(scale, rows).float())
    dx = rstd * (dnormed - dnormed.mean(1, keepdim=True) - normed * (dnormed * normed).mean(1, keepdim=True))
    if gx is not None:
        dx = dx + gx.float()
    dscale = sum_by_sample(dh * normed, rows)
    dshift = sum_by_sample(dh, rows)
    h = None if shift is None else _modulated(normed, scale, shift, rows).to(x.dtype)
    if pending is None:
        return dx.to(x.dtype), None, dscale, dshift, None, None, h
    y, bias, gate = pending
    dy = dx * expand_to_rows(gate, rows).float()
    dgate = sum_by_sample(dx * (y.float() + bias.float()), rows)
    return dx.to(x.dtype), to_form(dy, form, x.dtype), dscale, dshift, dgate, dy.sum(0), h


def gelu(u: Tensor, form: RowForm = "plain") -> Any:
    """Return GELU in the tanh approximation, as SD3 uses it."""
    if form == "plain":
        return F.gelu(u, approximate="tanh")
    return to_form(F.gelu(u.float(), approximate="tanh"), form, u.dtype)


def gelu_backward(
    dg: Tensor, u: Tensor, recompute: bool, form: RowForm = "plain"
) -> tuple[Operand, Tensor | None, Tensor]:
    """Return (gradient of ``u``, GELU of ``u`` if ``recompute``, float32 sum of the gradient over rows)."""
    value = u.float()
    slope = 2 * math.sqrt(2 / math.pi)
    share = torch.sigmoid(slope * (value + 0.044715 * value**3))
    inner = value * share * (1 - share) * slope * (1 + 3 * 0.044715 * value.square())
    du = dg.float() * (share + inner)
    # fp8 is rounded from the compute dtype, in a separate pass: the kernel cannot hold whole rows beside the sums
    return to_form(du.to(u.dtype), form, u.dtype), (value * share).to(u.dtype) if recompute else None, du.sum(0)


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
    layout: RowLayout,
    out: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Return normed queries and keys, and values, of both streams joined: [rows, H, E] each, in ``out`` if given."""
    parts: list[list[Tensor]] = []
    for stream, pair in zip(qkv, norms, strict=True):
        query, key, value = stream.unflatten(1, (3, heads, -1)).unbind(1)
        weights = pair or (None, None)
        parts.append([_rms(query, weights[0]), _rms(key, weights[1]), value])
    joined = tuple(scatter_rows(image, text, layout) for image, text in zip(*parts, strict=True))
    if out is None:
        return joined
    for target, source in zip(out, joined, strict=True):
        target.copy_(source)
    return out


def join_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, norms: HeadNorms, heads: int, rows: Rows, form: RowForm = "plain"
) -> tuple[Operand, Tensor, tuple[Tensor, Tensor] | None]:
    """Return the gradients of one stream: of its products [M, 3 D], their bias and the norms' weights (float32)."""
    index = rows.joined_index.long()
    parts = [grad[index].float() for grad in grads]
    weights = []
    if norms is not None:
        before = qkv.unflatten(1, (3, heads, -1))
        for number, weight in enumerate(norms):
            value = before[:, number].float()
            rstd = torch.rsqrt(value.square().mean(-1, keepdim=True) + EPS)
            normed = value * rstd
            dnormed = parts[number] * weight.float()
            weights.append((parts[number] * normed).sum((0, 1)))
            parts[number] = rstd * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    dqkv = torch.stack(parts, dim=1).flatten(1)
    return to_form(dqkv, form, qkv.dtype), dqkv.sum(0), (weights[0], weights[1]) if weights else None


def gather_rows(joined: Tensor, rows: Rows, form: RowForm = "plain") -> Any:
    """Return the rows of one stream, [M, D]."""
    return to_form(joined[rows.joined_index.long()].flatten(1), form, joined.dtype)


def scatter_rows(image: Tensor, text: Tensor, layout: RowLayout) -> Tensor:
    """Join the rows of both streams; the inverse of `gather_rows`."""
    if layout.text_index is None:
        batched = [part.unflatten(0, (layout.samples, -1)) for part in (image, text)]
        return torch.cat(batched, dim=1).flatten(0, 1)
    joined = image.new_zeros(layout.capacity, *image.shape[1:])
    joined = joined.index_copy(0, layout.image.joined_index.long(), image)
    return joined.index_copy(0, layout.text.joined_index.long(), text)


def round_rows(rows: Tensor) -> Operand:
    """Return existing rows together with their fp8 form."""
    return to_form(rows, "both", rows.dtype)


def round_weight(weights: list[Tensor], target: Fp8Weight) -> None:
    """Round stacked weights to fp8 into ``target``, by row and by column."""
    stacked = torch.cat(weights).float()
    for rows, source in ((target.forward, stacked), (target.backward, stacked.t().contiguous())):
        rounded = to_form(source, "fp8", source.dtype)
        assert isinstance(rounded, Fp8Rows)
        rows.values.copy_(rounded.values)
        rows.scale.copy_(rounded.scale)
