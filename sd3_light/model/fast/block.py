"""One joint block, forward and backward by hand.

What a block adds to a stream at its end stays pending (`reference.Pending`): whoever reads the stream next adds it and
norms the sum in one pass. Shapes: M rows of a stream, D width, B samples; see `rows.py`.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sd3_light.model.fast import reference
from sd3_light.model.fast.attention import attend
from sd3_light.model.fast.reference import Pending
from sd3_light.model.fast.rows import Plan, Rows
from sd3_light.model.fast.weights import Linear, Stream, Weights


@dataclass(frozen=True)
class How:
    """Choices that change speed and memory but not what is computed (rounding apart)."""

    attention: str | None = None
    keep_gelu: bool = True
    float32_gradients: bool = True
    """Gradients of weights leave their product in float32, not rounded to the type that computes."""


def operations(device: torch.device) -> ModuleType:
    """The kernels where Triton can run, else their reference."""
    if device.type == "cuda":
        from sd3_light.model.fast import kernels

        return kernels
    return reference


@dataclass
class _Saved:
    """What one stream of a block keeps for the backward pass."""

    x1: Tensor
    h1: Tensor
    qkv: Tensor
    attended: Tensor | None = None
    a: Tensor | None = None
    x2: Tensor | None = None
    h2: Tensor | None = None
    u: Tensor | None = None
    g: Tensor | None = None


class Block(torch.autograd.Function):
    """See `run_block`."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        streams: tuple[Stream, Stream],
        heads: int,
        how: How,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        """``tensors``: for each stream x, y, bias, gate, modulation, out bias; then its parameters, for autograd."""
        ops = operations(tensors[0].device)
        given = (tensors[:6], tensors[6:12])
        rows = (plan.image, plan.text)
        saved = [_read(ops, stream, values, row) for stream, values, row in zip(streams, given, rows, strict=True)]
        norms = (streams[0].norms, streams[1].norms)
        qkv = ops.join((saved[0].qkv, saved[1].qkv), norms, heads, plan)
        with torch.enable_grad():
            leaves = tuple(part.detach().requires_grad_() for part in qkv)
            query, key, value = leaves
            joined = attend(query, key, value, plan, how.attention)
        outputs: list[Tensor] = []
        for stream, values, row, kept in zip(streams, given, rows, saved, strict=True):
            if stream.out is not None:
                outputs += _add(ops, stream, values, row, kept, joined.detach(), how)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.streams, ctx.heads, ctx.how = plan, streams, heads, how
        ctx.given, ctx.saved, ctx.attention = given, saved, (leaves, joined)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients in the order of the inputs."""
        ops = operations(grads[0].device)
        rows = (ctx.plan.image, ctx.plan.text)
        late = [
            _add_backward(ops, stream, values, row, kept, grads[2 * at : 2 * at + 2], ctx.how)
            if stream.out is not None
            else _Late(None, torch.zeros_like(kept.x1), [], [])
            for at, (stream, values, row, kept) in enumerate(zip(ctx.streams, ctx.given, rows, ctx.saved, strict=True))
        ]
        leaves, joined = ctx.attention
        grad_joined = ops.give(late[0].attended, late[1].attended, ctx.plan).view_as(joined)
        grad_qkv = tuple(part.contiguous() for part in torch.autograd.grad(joined, leaves, grad_joined))
        ctx.attention = leaves = joined = grad_joined = None
        inputs: list[Any] = []
        weights: list[Tensor] = []
        for stream, values, row, kept, end in zip(ctx.streams, ctx.given, rows, ctx.saved, late, strict=True):
            more, learned = _read_backward(ops, stream, values, row, kept, end, grad_qkv, ctx.heads, ctx.how)
            inputs += more
            weights += learned
        ctx.saved = ctx.given = None
        return (None, None, None, None, *inputs, *weights)


def _pending(values: Any) -> Pending | None:
    _, y, bias, gate, *_ = values
    return None if y is None else (y, bias, gate)


def _read(ops: ModuleType, stream: Stream, values: Any, rows: Rows) -> _Saved:
    """The first half of a stream: norm, and the products of attention."""
    modulation = values[4]
    if stream.out is None:  # the last text: its norm has scale before shift
        scale, shift = modulation.chunk(2, dim=1)
    else:
        shift, scale = modulation.chunk(5, dim=1)[:2]
    x1, h1 = ops.residual_norm(values[0], _pending(values), scale, shift, rows)
    return _Saved(x1, h1, torch.addmm(stream.qkv.bias, h1, stream.qkv.weight.t()))


def _add(
    ops: ModuleType, stream: Stream, values: Any, rows: Rows, kept: _Saved, joined: Tensor, how: How
) -> tuple[Tensor, Tensor]:
    """The second half: attention's output into the stream, and the feed-forward, which stays pending."""
    assert stream.out is not None and stream.up is not None and stream.down is not None
    gate, shift, scale = values[4].chunk(5, dim=1)[2:]
    kept.attended = ops.take(joined, rows).flatten(1)
    kept.a = torch.mm(kept.attended, stream.out.weight.t())
    x2, kept.h2 = ops.residual_norm(kept.x1, (kept.a, values[5], gate), scale, shift, rows)
    kept.x2 = x2.detach()  # an output that its own node held would be a circle
    kept.u = torch.addmm(stream.up.bias, kept.h2, stream.up.weight.t())
    g = ops.gelu(kept.u)
    kept.g = g if how.keep_gelu else None
    return x2, torch.mm(g, stream.down.weight.t())


@dataclass
class _Late:
    """Gradients that the second half of a stream hands to its first: along the stream, and of attention's output."""

    x: Tensor | None
    attended: Tensor
    modulation: list[Tensor]
    weights: list[Any]
    out_bias: Tensor | None = None


def _add_backward(ops: ModuleType, stream: Stream, values: Any, rows: Rows, kept: Any, grads: Any, how: How) -> _Late:
    gx, df = grads
    gate, _, scale = values[4].chunk(5, dim=1)[2:]
    dg = torch.mm(df, stream.down.weight)  # type: ignore[union-attr]
    du, again, up_bias = ops.gelu_backward(dg, kept.u, kept.g is None)
    del dg
    down = _of_weight(df, kept.g if again is None else again, how)
    kept.g = kept.u = again = None
    dh2 = torch.mm(du, stream.up.weight)  # type: ignore[union-attr]
    up = _of_weight(du, kept.h2, how)
    del du
    pending = (kept.a, values[5], gate)
    dx, da, dscale, dshift, dgate, out_bias = ops.residual_norm_backward(dh2, gx, kept.x2, pending, scale, rows)
    out = _of_weight(da, kept.attended, how)
    kept.x2 = kept.h2 = kept.a = kept.attended = None
    return _Late(
        dx, torch.mm(da, stream.out.weight), [dgate, dshift, dscale], [out, up, up_bias, down], out_bias  # type: ignore[union-attr]
    )  # fmt: skip


def _read_backward(
    ops: ModuleType,
    stream: Stream,
    values: Any,
    rows: Rows,
    kept: Any,
    late: _Late,
    grad_qkv: tuple[Tensor, ...],
    heads: int,
    how: How,
) -> tuple[list[Any], list[Any]]:
    """(gradients of the stream's six inputs, gradients of its parameters)"""
    dqkv, bias, norms = ops.join_backward(grad_qkv, kept.qkv, stream.norms, heads, rows)
    weight = _of_weight(dqkv, kept.h1, how)
    dh1 = torch.mm(dqkv, stream.qkv.weight)
    is_last = stream.out is None
    scale = values[4].chunk(2, dim=1)[0] if is_last else values[4].chunk(5, dim=1)[1]
    dx, dy, dscale, dshift, dgate, dbias = ops.residual_norm_backward(
        dh1, late.x, kept.x1, _pending(values), scale, rows
    )
    first = [dscale, dshift] if is_last else [dshift, dscale]
    modulation = torch.cat([*first, *late.modulation], dim=1).to(values[4].dtype)
    gate = None if dgate is None else dgate.to(values[3].dtype)
    learned = [*stream.qkv.split(weight), *stream.qkv.split(bias), *late.weights, *(norms or ())]
    return [dx, dy, dbias, gate, modulation, late.out_bias], learned


def _of_weight(grad: Tensor, rows: Tensor, how: How) -> Tensor:
    """grad^T rows: what a weight learns."""
    if how.float32_gradients and grad.is_cuda and grad.dtype != torch.float32:
        return torch.mm(grad.t(), rows, out_dtype=torch.float32)
    return torch.mm(grad.t(), rows)


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
        dx, dy, dscale, dshift, dgate, dbias = operations(x.device).residual_norm_backward(
            dh.contiguous(), None, x, (y, bias, gate), modulation.chunk(2, dim=1)[0], ctx.rows
        )
        of_modulation = torch.cat([dscale, dshift], dim=1).to(modulation.dtype)
        return None, dx, dy, dbias, dgate.to(gate.dtype), of_modulation


class Modulation(torch.autograd.Function):
    """One product for the modulation of all blocks and of the last norm: [B, D] -> [B, all of it]."""

    @staticmethod
    def forward(ctx: Any, linear: Linear, how: How, time: Tensor, *parameters: Tensor) -> Tensor:
        """``parameters`` are the weights, then the biases, for autograd."""
        ctx.linear, ctx.how = linear, how
        ctx.save_for_backward(time)
        return torch.addmm(linear.bias, time, linear.weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients in the order of the inputs."""
        (time,) = ctx.saved_tensors
        linear = ctx.linear
        weight, bias = _of_weight(grad, time, ctx.how), grad.float().sum(0)
        return None, None, torch.mm(grad, linear.weight), *linear.split(weight), *linear.split(bias)


def modulate(weights: Weights, time_BD: Tensor, how: How) -> Tensor:
    """The modulation of everything, from the time (already through its activation)."""
    linear = weights.modulation
    parameters = [*(module.weight for module in linear.modules), *(module.bias for module in linear.modules)]
    found: Tensor = Modulation.apply(linear, how, time_BD, *parameters)  # type: ignore[no-untyped-call]
    return found
