"""One joint block, forward and backward by hand.

What a block adds to a stream at its end stays pending (`reference.Pending`): whoever reads the stream next adds it and
norms the sum in one pass. Shapes: M rows of a stream, D width, B samples; see `rows.py`.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sd3_light.model.fast import products
from sd3_light.model.fast.fp8 import Eight, Form, Operand
from sd3_light.model.fast.operations import operations
from sd3_light.model.fast.reference import Pending
from sd3_light.model.fast.row_plan import Plan, Rows
from sd3_light.model.fast.sample_attention import attend
from sd3_light.model.fast.weights import Linear, Stream, Weights

Keep = Literal["all", "products", "inputs"]
"""What a block keeps for its backward pass. All of it; what products and attention made, the rest (norms, GELU, normed
heads, copies) being made again in passing; or its inputs alone, so that the whole block runs again."""
Products = Literal["plain", "fp8"]
"""In what a block multiplies rows with weights, forward and for gradients of rows: the type that computes, or 8 bits.
Gradients of weights, attention and modulation have the type that computes always."""


@dataclass(frozen=True)
class BlockOptions:
    """Choices that change speed and memory but not what is computed (rounding apart)."""

    attention: str | None = None
    keep: Keep = "all"
    float32_gradients: bool = True
    """Gradients of weights leave their product in float32, not rounded to the type that computes."""
    products: Products = "plain"
    fast_sums: bool = True
    """Products in 8 bits add up as fast as the tensor cores can, in less than float32."""

    def form(self, is_kept: bool) -> Form:
        """Of rows that a product reads; ``is_kept``: the gradient of its weight will read them too."""
        if self.products == "plain":
            return "plain"
        return "both" if is_kept else "eight"


@dataclass
class _Saved:
    """What one stream of a block keeps for the backward pass."""

    x1: Tensor
    h1: Tensor | None
    qkv: Tensor
    attended: Tensor | None = None
    a: Tensor | None = None
    x2: Tensor | None = None
    h2: Tensor | None = None
    u: Tensor | None = None
    g: Tensor | None = None

    def forget(self) -> None:
        """Let go what can be made again without a product."""
        self.h1 = self.h2 = self.g = self.attended = None


@dataclass
class _Attention:
    """Queries, keys and values as leaves of a small graph of their own, and what attention made of them."""

    leaves: tuple[Tensor, Tensor, Tensor]
    joined: Tensor

    def forget(self) -> None:
        """Free the leaves' memory; the graph still holds them."""
        for leaf in self.leaves:
            leaf.untyped_storage().resize_(0)

    def remember(self, ops: ModuleType, streams: Any, saved: list[_Saved], heads: int, plan: Plan) -> None:
        """Fill the leaves anew."""
        for leaf in self.leaves:
            leaf.untyped_storage().resize_(leaf.numel() * leaf.itemsize)
        norms = (streams[0].norms, streams[1].norms)
        # by `data`: autograd must not take it for a change
        ops.join((saved[0].qkv, saved[1].qkv), norms, heads, plan, tuple(leaf.data for leaf in self.leaves))


class Block(torch.autograd.Function):
    """One joint block over both streams: what it adds to them at its end is handed on as pending."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        streams: tuple[Stream, Stream],
        heads: int,
        how: BlockOptions,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        """``tensors``: for each stream x, y, bias, gate, modulation, out bias; then its parameters, for autograd."""
        given = (tensors[:6], tensors[6:12])
        outputs, saved, attention = _compute(plan, streams, heads, how, given)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.streams, ctx.heads, ctx.how, ctx.given = plan, streams, heads, how, given
        if how.keep == "products":
            attention.forget()
            for kept in saved:
                kept.forget()
        ctx.kept = None if how.keep == "inputs" else (saved, attention)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients in the order of the inputs."""
        plan, streams, how, given = ctx.plan, ctx.streams, ctx.how, ctx.given
        ops, rows = operations(grads[0].device), (plan.image, plan.text)
        if ctx.kept is None:
            ctx.kept = _compute(plan, streams, ctx.heads, how, given, again=True)[1:]
        saved, attention = ctx.kept
        ctx.kept = ctx.given = None
        if how.keep == "products":
            attention.remember(ops, streams, saved, ctx.heads, plan)
            for stream, kept, row in zip(streams, saved, rows, strict=True):
                kept.attended = None if stream.out is None else ops.take(attention.joined.detach(), row)
        late = [
            _add_backward(ops, stream, values, row, kept, grads[2 * at : 2 * at + 2], how)
            if stream.out is not None
            else _Late(None, torch.zeros_like(kept.x1), [], [])
            for at, (stream, values, row, kept) in enumerate(zip(streams, given, rows, saved, strict=True))
        ]
        grad_joined = ops.give(late[0].attended, late[1].attended, plan).view_as(attention.joined)
        found = torch.autograd.grad(attention.joined, attention.leaves, grad_joined)
        grad_qkv = tuple(part.contiguous() for part in found)
        del attention, grad_joined, found
        inputs: list[Any] = []
        weights: list[Tensor] = []
        for stream, values, row, kept, end in zip(streams, given, rows, saved, late, strict=True):
            more, learned = _read_backward(ops, stream, values, row, kept, end, grad_qkv, ctx.heads, how)
            inputs += more
            weights += learned
        return (None, None, None, None, *inputs, *weights)


def _compute(
    plan: Plan, streams: tuple[Stream, Stream], heads: int, how: BlockOptions, given: Any, again: bool = False
) -> tuple[tuple[Tensor, ...], list[_Saved], _Attention]:
    """(what the block hands on, what the backward pass needs); ``again`` without the products that only hand on."""
    ops, rows = operations(given[0][0].device), (plan.image, plan.text)
    form = how.form(is_kept=again or how.keep == "all")
    saved = [
        _read(ops, stream, values, row, how, form) for stream, values, row in zip(streams, given, rows, strict=True)
    ]
    qkv = ops.join((saved[0].qkv, saved[1].qkv), (streams[0].norms, streams[1].norms), heads, plan)
    with torch.enable_grad():
        query, key, value = (part.detach().requires_grad_() for part in qkv)
        joined = attend(query, key, value, plan, how.attention)
    outputs: list[Tensor] = []
    for stream, values, row, kept in zip(streams, given, rows, saved, strict=True):
        if stream.out is not None:
            outputs += _add(ops, stream, values, row, kept, joined.detach(), again, how, form)
    return tuple(outputs), saved, _Attention((query, key, value), joined)


def _pending(values: Any) -> Pending | None:
    _, y, bias, gate, *_ = values
    return None if y is None else (y, bias, gate)


def _kept(rows: Operand) -> Tensor | None:
    return rows.plain if isinstance(rows, Eight) else rows


def _read(ops: ModuleType, stream: Stream, values: Any, rows: Rows, how: BlockOptions, form: Form) -> _Saved:
    """The first half of a stream: norm, and the products of attention."""
    modulation = values[4]
    if stream.out is None:  # the last text: its norm has scale before shift
        scale, shift = modulation.chunk(2, dim=1)
    else:
        shift, scale = modulation.chunk(5, dim=1)[:2]
    x1, h1 = ops.residual_norm(values[0], _pending(values), scale, shift, rows, form)
    return _Saved(x1, _kept(h1), products.forward(stream.qkv, h1, True, how.fast_sums))


def _add(
    ops: ModuleType,
    stream: Stream,
    values: Any,
    rows: Rows,
    kept: _Saved,
    joined: Tensor,
    again: bool,
    how: BlockOptions,
    form: Form,
) -> tuple[Tensor, ...]:
    """The second half: attention's output into the stream, and the feed-forward, which stays pending."""
    assert stream.out is not None and stream.up is not None and stream.down is not None
    gate, shift, scale = values[4].chunk(5, dim=1)[2:]
    attended = ops.take(joined, rows, form)
    kept.attended, kept.a = _kept(attended), products.forward(stream.out, attended, False, how.fast_sums)
    x2, h2 = ops.residual_norm(kept.x1, (kept.a, values[5], gate), scale, shift, rows, form)
    kept.x2, kept.h2 = x2.detach(), _kept(h2)  # an output that its own node held would be a circle
    kept.u = products.forward(stream.up, h2, True, how.fast_sums)
    if again:  # the backward pass of GELU makes it
        return ()
    g = ops.gelu(kept.u, form)
    kept.g = _kept(g)
    return x2, products.forward(stream.down, g, False, how.fast_sums)


@dataclass
class _Late:
    """Gradients that the second half of a stream hands to its first: along the stream, and of attention's output."""

    x: Tensor | None
    attended: Tensor
    modulation: list[Tensor]
    weights: list[Any]
    out_bias: Tensor | None = None


def _add_backward(
    ops: ModuleType, stream: Stream, values: Any, rows: Rows, kept: Any, grads: Any, how: BlockOptions
) -> _Late:
    assert stream.out is not None and stream.up is not None and stream.down is not None
    form, fast, wide = how.form(is_kept=True), how.fast_sums, how.float32_gradients
    gx, df = grads[0], grads[1] if form == "plain" else ops.round_rows(grads[1])
    gate, shift, scale = values[4].chunk(5, dim=1)[2:]
    dg = products.of_input(stream.down, df, fast)
    du, again, up_bias = ops.gelu_backward(dg, kept.u, kept.g is None, form)
    del dg
    down = products.of_weight(df, kept.g if again is None else again, wide)
    kept.g = kept.u = again = None
    dh2 = products.of_input(stream.up, du, fast)
    pending, wanted = (kept.a, values[5], gate), shift if kept.h2 is None else None
    dx, da, dscale, dshift, dgate, out_bias, h2 = ops.residual_norm_backward(
        dh2, gx, kept.x2, pending, scale, rows, wanted, form
    )
    up = products.of_weight(du, kept.h2 if h2 is None else h2, wide)
    del du, dh2
    out = products.of_weight(da, kept.attended, wide)
    kept.x2 = kept.h2 = kept.a = kept.attended = None
    attended = products.of_input(stream.out, da, fast)
    return _Late(dx, attended, [dgate, dshift, dscale], [out, up, up_bias, down], out_bias)


def _read_backward(
    ops: ModuleType,
    stream: Stream,
    values: Any,
    rows: Rows,
    kept: Any,
    late: _Late,
    grad_qkv: tuple[Tensor, ...],
    heads: int,
    how: BlockOptions,
) -> tuple[list[Any], list[Any]]:
    """(gradients of the stream's six inputs, gradients of its parameters)"""
    dqkv, bias, norms = ops.join_backward(grad_qkv, kept.qkv, stream.norms, heads, rows, how.form(is_kept=True))
    dh1 = products.of_input(stream.qkv, dqkv, how.fast_sums)
    is_last = stream.out is None
    scale, shift = values[4].chunk(2, dim=1) if is_last else values[4].chunk(5, dim=1)[1::-1]
    dx, dy, dscale, dshift, dgate, dbias, h1 = ops.residual_norm_backward(
        dh1, late.x, kept.x1, _pending(values), scale, rows, shift if kept.h1 is None else None
    )
    weight = products.of_weight(dqkv, kept.h1 if h1 is None else h1, how.float32_gradients)
    first = [dscale, dshift] if is_last else [dshift, dscale]
    modulation = torch.cat([*first, *late.modulation], dim=1).to(values[4].dtype)
    gate = None if dgate is None else dgate.to(values[3].dtype)
    learned = [*stream.qkv.split(weight), *stream.qkv.split(bias), *late.weights, *(norms or ())]
    return [dx, dy, dbias, gate, modulation, late.out_bias], learned


# --- what is around the blocks -----------------------------------------------------------------


class Norm(torch.autograd.Function):
    """The stream with what is pending added, normed, scaled and shifted: the denoiser's last norm."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, x: Tensor, y: Tensor, bias: Tensor, gate: Tensor, modulation: Tensor) -> Tensor:
        """``modulation``: scale, then shift."""
        ops = operations(x.device)
        scale, shift = modulation.chunk(2, dim=1)
        x, h = ops.residual_norm(x, (y, bias, gate), scale, shift, rows)
        ctx.rows = rows
        ctx.save_for_backward(x, y, bias, gate, modulation)
        return h  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Any, ...]:
        """Gradients in the order of the inputs."""
        x, y, bias, gate, modulation = ctx.saved_tensors
        dx, dy, dscale, dshift, dgate, dbias, _ = operations(x.device).residual_norm_backward(
            dh.contiguous(), None, x, (y, bias, gate), modulation.chunk(2, dim=1)[0], ctx.rows
        )
        of_modulation = torch.cat([dscale, dshift], dim=1).to(modulation.dtype)
        return None, dx, dy, dbias, dgate.to(gate.dtype), of_modulation


class Modulation(torch.autograd.Function):
    """One product for the modulation of all blocks and of the last norm: [B, D] -> [B, all of it]."""

    @staticmethod
    def forward(ctx: Any, linear: Linear, how: BlockOptions, time: Tensor, *parameters: Tensor) -> Tensor:
        """``parameters`` are the weights, then the biases, for autograd."""
        ctx.linear, ctx.how = linear, how
        ctx.save_for_backward(time)
        return products.forward(linear, time, True, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients in the order of the inputs."""
        (time,) = ctx.saved_tensors
        linear = ctx.linear
        weight, bias = products.of_weight(grad, time, ctx.how.float32_gradients), grad.float().sum(0)
        return None, None, products.of_input(linear, grad, False), *linear.split(weight), *linear.split(bias)


def modulate(weights: Weights, time_BD: Tensor, how: BlockOptions) -> Tensor:
    """The modulation of everything, from the time (already through its activation)."""
    linear = weights.modulation
    parameters = [*(module.weight for module in linear.modules), *(module.bias for module in linear.modules)]
    found: Tensor = Modulation.apply(linear, how, time_BD, *parameters)  # type: ignore[no-untyped-call]
    return found
