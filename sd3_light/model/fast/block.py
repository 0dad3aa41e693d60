"""One joint block with a hand-written forward and backward pass.

A block does not add its last product to the stream. It stays pending (`reference.PendingUpdate`): the next reader adds
it and norms the sum in one pass. Shapes: M rows of a stream, D width, B samples; see `row_plan.py`.

Activations of one stream, in order:
    x1         stream after the pending update of the previous block
    h1         norm of x1, modulated: input of the qkv product
    qkv        queries, keys and values before their norms
    attended   attention output, this stream's rows
    a          product of attended with the out projection, without bias
    x2         x1 + gate x (a + bias)
    h2         norm of x2, modulated: input of the feed-forward
    u          first product of the feed-forward
    g          GELU of u: input of the second product, which becomes pending
Gradients have a d in front (dh2, dqkv); gx is the gradient that arrives along the stream.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sd3_light.model.fast import products
from sd3_light.model.fast.fp8 import Fp8Rows, Operand, RowForm
from sd3_light.model.fast.operations import operations
from sd3_light.model.fast.reference import PendingUpdate
from sd3_light.model.fast.row_plan import RowPlan, Rows
from sd3_light.model.fast.sample_attention import attend
from sd3_light.model.fast.weights import LinearCopy, StreamWeights, WeightCopies

Keep = Literal["all", "products", "inputs"]
"""What a block keeps for its backward pass: everything; the results of products and attention, while norms, GELU and
copies are recomputed; or its inputs only, so that the whole block runs again."""
Products = Literal["plain", "fp8"]
"""Number format of products of rows and weights, forward and for input gradients: the compute dtype, or fp8. Weight
gradients, attention and modulation always use the compute dtype."""


@dataclass(frozen=True)
class BlockOptions:
    """Options that change speed and memory; results differ only by rounding."""

    attention: str | None = None
    keep: Keep = "all"
    float32_gradients: bool = True
    """Keep weight gradients in float32 instead of rounding them to the compute dtype."""
    products: Products = "plain"
    fast_sums: bool = True
    """fp8 products accumulate at the tensor cores' full speed, with less than float32 precision."""

    def form(self, is_kept: bool) -> RowForm:
        """Return the form of rows that a product reads; ``is_kept``: the weight gradient will read them too."""
        if self.products == "plain":
            return "plain"
        return "both" if is_kept else "fp8"


@dataclass
class _Activations:
    """What one stream of a block keeps for the backward pass; the module's docstring names the fields."""

    x1: Tensor
    h1: Tensor | None
    qkv: Tensor
    attended: Tensor | None = None
    a: Tensor | None = None
    x2: Tensor | None = None
    h2: Tensor | None = None
    u: Tensor | None = None
    g: Tensor | None = None

    def free(self) -> None:
        """Drop what can be recomputed without a product."""
        self.h1 = self.h2 = self.g = self.attended = None


@dataclass
class _Attention:
    """Queries, keys and values as leaves of a small separate graph, and the attention output."""

    leaves: tuple[Tensor, Tensor, Tensor]
    joined: Tensor

    def free(self) -> None:
        """Free the leaves' memory; the graph keeps the tensors."""
        for leaf in self.leaves:
            leaf.untyped_storage().resize_(0)

    def restore(self, ops: ModuleType, streams: Any, saved: list[_Activations], heads: int, plan: RowPlan) -> None:
        """Recompute the leaves."""
        for leaf in self.leaves:
            leaf.untyped_storage().resize_(leaf.numel() * leaf.itemsize)
        norms = (streams[0].norms, streams[1].norms)
        # through `data`, so that autograd does not count it as an in-place change
        ops.join((saved[0].qkv, saved[1].qkv), norms, heads, plan, tuple(leaf.data for leaf in self.leaves))


class FastBlock(torch.autograd.Function):
    """One joint block over both streams; returns each stream and its pending product."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: RowPlan,
        streams: tuple[StreamWeights, StreamWeights],
        heads: int,
        options: BlockOptions,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        """``tensors``: x, y, bias, gate, modulation and out bias of each stream; then all parameters, for autograd."""
        inputs = (tensors[:6], tensors[6:12])
        outputs, saved, attention = _compute(plan, streams, heads, options, inputs)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.streams, ctx.heads, ctx.options, ctx.inputs = plan, streams, heads, options, inputs
        if options.keep == "products":
            attention.free()
            for activations in saved:
                activations.free()
        ctx.saved = None if options.keep == "inputs" else (saved, attention)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return gradients in the order of the inputs."""
        plan, streams, options, inputs = ctx.plan, ctx.streams, ctx.options, ctx.inputs
        ops, rows = operations(grads[0].device), (plan.image, plan.text)
        if ctx.saved is None:
            ctx.saved = _compute(plan, streams, ctx.heads, options, inputs, recompute=True)[1:]
        saved, attention = ctx.saved
        ctx.saved = ctx.inputs = None
        if options.keep == "products":
            attention.restore(ops, streams, saved, ctx.heads, plan)
            for stream, acts, row in zip(streams, saved, rows, strict=True):
                acts.attended = None if stream.out is None else ops.gather_rows(attention.joined.detach(), row)
        tails = [
            _tail_backward(ops, stream, values, row, acts, grads[2 * number : 2 * number + 2], options)
            if stream.out is not None
            else _TailGrads(None, torch.zeros_like(acts.x1), [], [])
            for number, (stream, values, row, acts) in enumerate(zip(streams, inputs, rows, saved, strict=True))
        ]
        grad_joined = ops.scatter_rows(tails[0].attended, tails[1].attended, plan).view_as(attention.joined)
        leaf_grads = torch.autograd.grad(attention.joined, attention.leaves, grad_joined)
        grad_qkv = tuple(part.contiguous() for part in leaf_grads)
        del attention, grad_joined, leaf_grads
        input_grads: list[Any] = []
        weight_grads: list[Tensor] = []
        for stream, values, row, acts, tail in zip(streams, inputs, rows, saved, tails, strict=True):
            of_inputs, of_weights = _head_backward(ops, stream, values, row, acts, tail, grad_qkv, ctx.heads, options)
            input_grads += of_inputs
            weight_grads += of_weights
        return (None, None, None, None, *input_grads, *weight_grads)


def _compute(
    plan: RowPlan,
    streams: tuple[StreamWeights, StreamWeights],
    heads: int,
    options: BlockOptions,
    inputs: Any,
    recompute: bool = False,
) -> tuple[tuple[Tensor, ...], list[_Activations], _Attention]:
    """Return (outputs, activations for the backward pass, attention); ``recompute`` skips products that only the
    outputs need."""
    ops, rows = operations(inputs[0][0].device), (plan.image, plan.text)
    form = options.form(is_kept=recompute or options.keep == "all")
    saved = [
        _head(ops, stream, values, row, options, form)
        for stream, values, row in zip(streams, inputs, rows, strict=True)
    ]
    qkv = ops.join((saved[0].qkv, saved[1].qkv), (streams[0].norms, streams[1].norms), heads, plan)
    with torch.enable_grad():
        query, key, value = (part.detach().requires_grad_() for part in qkv)
        joined = attend(query, key, value, plan, options.attention)
    outputs: list[Tensor] = []
    for stream, values, row, acts in zip(streams, inputs, rows, saved, strict=True):
        if stream.out is not None:
            outputs += _tail(ops, stream, values, row, acts, joined.detach(), recompute, options, form)
    return tuple(outputs), saved, _Attention((query, key, value), joined)


def _pending(values: Any) -> PendingUpdate | None:
    _, y, bias, gate, *_ = values
    return None if y is None else (y, bias, gate)


def _plain_or_none(rows: Operand) -> Tensor | None:
    return rows.plain if isinstance(rows, Fp8Rows) else rows


def _head(
    ops: ModuleType, stream: StreamWeights, values: Any, rows: Rows, options: BlockOptions, form: RowForm
) -> _Activations:
    """Run the first half of a stream: the norm and the qkv product."""
    modulation = values[4]
    if stream.out is None:  # the last text's norm has scale before shift
        scale, shift = modulation.chunk(2, dim=1)
    else:
        shift, scale = modulation.chunk(5, dim=1)[:2]
    x1, h1 = ops.residual_norm(values[0], _pending(values), scale, shift, rows, form)
    return _Activations(x1, _plain_or_none(h1), products.forward(stream.qkv, h1, True, options.fast_sums))


def _tail(
    ops: ModuleType,
    stream: StreamWeights,
    values: Any,
    rows: Rows,
    acts: _Activations,
    joined: Tensor,
    recompute: bool,
    options: BlockOptions,
    form: RowForm,
) -> tuple[Tensor, ...]:
    """Run the second half of a stream: add the attention output, then the feed-forward, which stays pending."""
    assert stream.out is not None and stream.up is not None and stream.down is not None
    gate, shift, scale = values[4].chunk(5, dim=1)[2:]
    attended = ops.gather_rows(joined, rows, form)
    acts.attended = _plain_or_none(attended)
    acts.a = products.forward(stream.out, attended, False, options.fast_sums)
    x2, h2 = ops.residual_norm(acts.x1, (acts.a, values[5], gate), scale, shift, rows, form)
    acts.x2, acts.h2 = x2.detach(), _plain_or_none(h2)  # detached: a node that holds its own output is a cycle
    acts.u = products.forward(stream.up, h2, True, options.fast_sums)
    if recompute:  # GELU's backward pass recomputes g
        return ()
    g = ops.gelu(acts.u, form)
    acts.g = _plain_or_none(g)
    return x2, products.forward(stream.down, g, False, options.fast_sums)


@dataclass
class _TailGrads:
    """Gradients from the second half of a stream to its first: along the stream, and of the attention output."""

    x: Tensor | None
    attended: Tensor
    modulation: list[Tensor]
    weights: list[Any]
    out_bias: Tensor | None = None


def _tail_backward(
    ops: ModuleType, stream: StreamWeights, values: Any, rows: Rows, acts: Any, grads: Any, options: BlockOptions
) -> _TailGrads:
    assert stream.out is not None and stream.up is not None and stream.down is not None
    form, fast, float32 = options.form(is_kept=True), options.fast_sums, options.float32_gradients
    gx, df = grads[0], grads[1] if form == "plain" else ops.round_rows(grads[1])
    gate, shift, scale = values[4].chunk(5, dim=1)[2:]
    dg = products.input_grad(stream.down, df, fast)
    du, g, up_bias = ops.gelu_backward(dg, acts.u, acts.g is None, form)
    del dg
    down = products.weight_grad(df, acts.g if g is None else g, float32)
    acts.g = acts.u = g = None
    dh2 = products.input_grad(stream.up, du, fast)
    pending, shift_or_none = (acts.a, values[5], gate), shift if acts.h2 is None else None
    dx, da, dscale, dshift, dgate, out_bias, h2 = ops.residual_norm_backward(
        dh2, gx, acts.x2, pending, scale, rows, shift_or_none, form
    )
    up = products.weight_grad(du, acts.h2 if h2 is None else h2, float32)
    del du, dh2
    out = products.weight_grad(da, acts.attended, float32)
    acts.x2 = acts.h2 = acts.a = acts.attended = None
    attended = products.input_grad(stream.out, da, fast)
    return _TailGrads(dx, attended, [dgate, dshift, dscale], [out, up, up_bias, down], out_bias)


def _head_backward(
    ops: ModuleType,
    stream: StreamWeights,
    values: Any,
    rows: Rows,
    acts: Any,
    tail: _TailGrads,
    grad_qkv: tuple[Tensor, ...],
    heads: int,
    options: BlockOptions,
) -> tuple[list[Any], list[Any]]:
    """Return (gradients of the stream's six inputs, gradients of its parameters)."""
    dqkv, bias, norms = ops.join_backward(grad_qkv, acts.qkv, stream.norms, heads, rows, options.form(is_kept=True))
    dh1 = products.input_grad(stream.qkv, dqkv, options.fast_sums)
    is_last = stream.out is None
    scale, shift = values[4].chunk(2, dim=1) if is_last else values[4].chunk(5, dim=1)[1::-1]
    dx, dy, dscale, dshift, dgate, dbias, h1 = ops.residual_norm_backward(
        dh1, tail.x, acts.x1, _pending(values), scale, rows, shift if acts.h1 is None else None
    )
    weight = products.weight_grad(dqkv, acts.h1 if h1 is None else h1, options.float32_gradients)
    first = [dscale, dshift] if is_last else [dshift, dscale]
    modulation = torch.cat([*first, *tail.modulation], dim=1).to(values[4].dtype)
    gate = None if dgate is None else dgate.to(values[3].dtype)
    of_weights = [*stream.qkv.split(weight), *stream.qkv.split(bias), *tail.weights, *(norms or ())]
    return [dx, dy, dbias, gate, modulation, tail.out_bias], of_weights


# --- around the blocks -------------------------------------------------------------------------


class FinalNorm(torch.autograd.Function):
    """The denoiser's last norm: adds the pending update to the stream, then norms, scales and shifts it."""

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
        """Return gradients in the order of the inputs."""
        x, y, bias, gate, modulation = ctx.saved_tensors
        dx, dy, dscale, dshift, dgate, dbias, _ = operations(x.device).residual_norm_backward(
            dh.contiguous(), None, x, (y, bias, gate), modulation.chunk(2, dim=1)[0], ctx.rows
        )
        dmodulation = torch.cat([dscale, dshift], dim=1).to(modulation.dtype)
        return None, dx, dy, dbias, dgate.to(gate.dtype), dmodulation


class Modulation(torch.autograd.Function):
    """One product for the modulation of all blocks and of the last norm: [B, D] -> [B, total width]."""

    @staticmethod
    def forward(ctx: Any, linear: LinearCopy, options: BlockOptions, time: Tensor, *parameters: Tensor) -> Tensor:
        """``parameters``: the weights, then the biases, for autograd."""
        ctx.linear, ctx.options = linear, options
        ctx.save_for_backward(time)
        return products.forward(linear, time, True, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return gradients in the order of the inputs."""
        (time,) = ctx.saved_tensors
        linear = ctx.linear
        weight, bias = products.weight_grad(grad, time, ctx.options.float32_gradients), grad.float().sum(0)
        return None, None, products.input_grad(linear, grad, False), *linear.split(weight), *linear.split(bias)


def modulate(weights: WeightCopies, time_BD: Tensor, options: BlockOptions) -> Tensor:
    """Return the modulation of all blocks and the last norm, from the activated time embedding."""
    linear = weights.modulation
    parameters = [*(module.weight for module in linear.modules), *(module.bias for module in linear.modules)]
    modulation: Tensor = Modulation.apply(linear, options, time_BD, *parameters)  # type: ignore[no-untyped-call]
    return modulation
