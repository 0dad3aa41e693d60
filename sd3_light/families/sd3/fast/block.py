"""One joint block with a hand-written forward and backward pass.

A block does not add its last product to the stream. It stays pending (`reference.PendingUpdate`): the next reader adds
it and norms the sum in one pass. Shapes: M rows of a stream, D width, B samples; see `row_layout.py`.

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

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sd3_light.families.sd3.fast.fp8 import Fp8Rows, Operand, RowForm
from sd3_light.families.sd3.fast.operations import operations
from sd3_light.families.sd3.fast.reference import PendingUpdate
from sd3_light.families.sd3.fast.row_layout import RowLayout, Rows
from sd3_light.families.sd3.fast.sample_attention import attend
from sd3_light.families.sd3.fast.weights import LinearCopy, StreamWeights, weight_grad

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
    recomputed: int | None = None
    """How many blocks, the first ones, keep what ``keep`` says; the others keep everything. None: all of them."""
    float32_gradients: bool = True
    """Keep weight gradients in float32 instead of rounding them to the compute dtype."""
    products: Products = "plain"
    fast_sums: bool = True
    """fp8 products accumulate at the tensor cores' full speed, with less than float32 precision."""

    def of_block(self, number: int) -> "BlockOptions":
        """Return the options of a block, counted from 0."""
        keeps_all = self.recomputed is not None and number >= self.recomputed
        return replace(self, keep="all") if keeps_all else self

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

    def restore(self, streams: "Streams", saved: list[_Activations], heads: int, layout: RowLayout) -> None:
        """Recompute the leaves."""
        for leaf in self.leaves:
            leaf.untyped_storage().resize_(leaf.numel() * leaf.itemsize)
        # through `data`, so that autograd does not count it as an in-place change
        _join(streams, saved, heads, layout, tuple(leaf.data for leaf in self.leaves))


class FastBlock(torch.autograd.Function):
    """One joint block over both streams; returns each stream and its pending product."""

    @staticmethod
    def forward(
        ctx: Any,
        layout: RowLayout,
        weights: tuple[StreamWeights, StreamWeights],
        heads: int,
        options: BlockOptions,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        """``tensors``: the six inputs of each stream (see `_Stream`); then all parameters, for autograd."""
        image = _Stream(weights[0], tensors[:6], layout.image, options)
        text = _Stream(weights[1], tensors[6:12], layout.text, options)
        ctx.set_materialize_grads(False)
        ctx.layout = layout
        ctx.heads = heads
        ctx.streams = (image, text)
        outputs, saved, attention = _compute(layout, ctx.streams, heads)
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
        layout = ctx.layout
        heads = ctx.heads
        streams = ctx.streams
        saved, attention = ctx.saved or _compute(layout, streams, heads, recompute=True)[1:]
        ctx.saved = ctx.streams = None
        ops = streams[0].ops
        if streams[0].options.keep == "products":
            attention.restore(streams, saved, heads, layout)
            for stream, acts in zip(streams, saved, strict=True):
                if stream.weights.out is not None:
                    acts.attended = ops.gather_rows(attention.joined.detach(), stream.rows)
        tails = [streams[0].tail_backward(saved[0], grads[:2]), streams[1].tail_backward(saved[1], grads[2:])]
        grad_joined = ops.scatter_rows(tails[0].attended, tails[1].attended, layout).view_as(attention.joined)
        leaf_grads = torch.autograd.grad(attention.joined, attention.leaves, grad_joined)
        grad_qkv = tuple(part.contiguous() for part in leaf_grads)
        del attention, grad_joined, leaf_grads
        input_grads: list[Any] = []
        weight_grads: list[Tensor] = []
        for stream, acts, tail in zip(streams, saved, tails, strict=True):
            of_inputs, of_weights = stream.head_backward(acts, tail, grad_qkv, heads)
            input_grads += of_inputs
            weight_grads += of_weights
        return (None, None, None, None, *input_grads, *weight_grads)


def _compute(
    layout: RowLayout, streams: "Streams", heads: int, recompute: bool = False
) -> tuple[tuple[Tensor, ...], list[_Activations], _Attention]:
    """Return (outputs, activations for the backward pass, attention); ``recompute`` skips products that only the
    outputs need."""
    options = streams[0].options
    form = options.form(is_kept=recompute or options.keep == "all")
    saved = [stream.head(form) for stream in streams]
    qkv = _join(streams, saved, heads, layout)
    with torch.enable_grad():
        query, key, value = (part.detach().requires_grad_() for part in qkv)
        joined = attend(query, key, value, layout, options.attention)
    outputs: list[Tensor] = []
    for stream, acts in zip(streams, saved, strict=True):
        outputs += stream.tail(acts, joined.detach(), recompute, form)
    return tuple(outputs), saved, _Attention((query, key, value), joined)


def _join(
    streams: "Streams", saved: list[_Activations], heads: int, layout: RowLayout, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    norms = (streams[0].weights.norms, streams[1].weights.norms)
    return streams[0].ops.join((saved[0].qkv, saved[1].qkv), norms, heads, layout, out)  # type: ignore[no-any-return]


def _plain_or_none(rows: Operand) -> Tensor | None:
    return rows.plain if isinstance(rows, Fp8Rows) else rows


@dataclass
class _TailGrads:
    """Gradients from the second half of a stream to its first: along the stream, and of the attention output."""

    x: Tensor | None
    attended: Tensor
    modulation: list[Tensor]
    weights: list[Any]
    out_bias: Tensor | None = None


@dataclass(frozen=True)
class _Stream:
    """One stream of a block; ``inputs``: x, pending product, its bias and gate, modulation, bias of the out projection.

    The head is the first half, norm and qkv product. The tail adds the attention output and runs the feed-forward.
    """

    weights: StreamWeights
    inputs: Any
    rows: Rows
    options: BlockOptions

    @property
    def ops(self) -> ModuleType:
        """The operations for the stream's device."""
        return operations(self.inputs[0].device)

    @property
    def pending(self) -> PendingUpdate | None:
        """The update that the previous block left."""
        _, y, bias, gate, *_ = self.inputs
        return None if y is None else (y, bias, gate)

    @property
    def head_modulation(self) -> list[Tensor]:
        """Scale and shift of the first norm; the last text has no others, in this order."""
        modulation: Tensor = self.inputs[4]
        is_last = self.weights.out is None
        return list(modulation.chunk(2, dim=1) if is_last else modulation.chunk(5, dim=1)[1::-1])

    def head(self, form: RowForm) -> _Activations:
        """Run the norm and the qkv product."""
        x1, h1 = self.ops.residual_norm(self.inputs[0], self.pending, *self.head_modulation, self.rows, form)
        return _Activations(x1, _plain_or_none(h1), self.weights.qkv.forward(h1, True, self.options.fast_sums))

    def tail(self, acts: _Activations, joined: Tensor, recompute: bool, form: RowForm) -> tuple[Tensor, ...]:
        """Return the stream and its product that stays pending; nothing for the last text."""
        weights = self.weights
        ops = self.ops
        fast = self.options.fast_sums
        if weights.out is None or weights.up is None or weights.down is None:
            return ()
        gate, shift, scale = self.inputs[4].chunk(5, dim=1)[2:]
        attended = ops.gather_rows(joined, self.rows, form)
        acts.attended = _plain_or_none(attended)
        acts.a = weights.out.forward(attended, False, fast)
        x2, h2 = ops.residual_norm(acts.x1, (acts.a, self.inputs[5], gate), scale, shift, self.rows, form)
        # detached: a node that holds its own output is a cycle
        acts.x2 = x2.detach()
        acts.h2 = _plain_or_none(h2)
        acts.u = weights.up.forward(h2, True, fast)
        if recompute:  # GELU's backward pass recomputes g
            return ()
        g = ops.gelu(acts.u, form)
        acts.g = _plain_or_none(g)
        return x2, weights.down.forward(g, False, fast)

    def tail_backward(self, acts: Any, grads: tuple[Tensor, ...]) -> _TailGrads:
        """Return the gradients of the second half; zeros for the last text."""
        weights = self.weights
        ops = self.ops
        options = self.options
        if weights.out is None or weights.up is None or weights.down is None:
            return _TailGrads(None, torch.zeros_like(acts.x1), [], [])
        form = options.form(is_kept=True)
        fast = options.fast_sums
        float32 = options.float32_gradients
        gx = grads[0]
        df = grads[1] if form == "plain" else ops.round_rows(grads[1])
        gate, shift, scale = self.inputs[4].chunk(5, dim=1)[2:]
        dg = weights.down.input_grad(df, fast)
        du, g, up_bias = ops.gelu_backward(dg, acts.u, acts.g is None, form)
        del dg
        down = weight_grad(df, acts.g if g is None else g, float32)
        acts.g = acts.u = g = None
        dh2 = weights.up.input_grad(du, fast)
        pending = (acts.a, self.inputs[5], gate)
        shift_or_none = shift if acts.h2 is None else None
        dx, da, dscale, dshift, dgate, out_bias, h2 = ops.residual_norm_backward(
            dh2, gx, acts.x2, pending, scale, self.rows, shift_or_none, form
        )
        up = weight_grad(du, acts.h2 if h2 is None else h2, float32)
        del du, dh2
        out = weight_grad(da, acts.attended, float32)
        acts.x2 = acts.h2 = acts.a = acts.attended = None
        attended = weights.out.input_grad(da, fast)
        return _TailGrads(dx, attended, [dgate, dshift, dscale], [out, up, up_bias, down], out_bias)

    def head_backward(
        self, acts: Any, tail: _TailGrads, grad_qkv: tuple[Tensor, ...], heads: int
    ) -> tuple[list[Any], list[Any]]:
        """Return (gradients of the stream's six inputs, gradients of its parameters)."""
        ops = self.ops
        qkv = self.weights.qkv
        form = self.options.form(is_kept=True)
        dqkv, bias, norms = ops.join_backward(grad_qkv, acts.qkv, self.weights.norms, heads, self.rows, form)
        dh1 = qkv.input_grad(dqkv, self.options.fast_sums)
        scale, shift = self.head_modulation
        dx, dy, dscale, dshift, dgate, dbias, h1 = ops.residual_norm_backward(
            dh1, tail.x, acts.x1, self.pending, scale, self.rows, shift if acts.h1 is None else None
        )
        weight = weight_grad(dqkv, acts.h1 if h1 is None else h1, self.options.float32_gradients)
        first = [dscale, dshift] if self.weights.out is None else [dshift, dscale]
        modulation = torch.cat([*first, *tail.modulation], dim=1).to(self.inputs[4].dtype)
        gate = None if dgate is None else dgate.to(self.inputs[3].dtype)
        of_weights = [*qkv.split(weight), *qkv.split(bias), *tail.weights, *(norms or ())]
        return [dx, dy, dbias, gate, modulation, tail.out_bias], of_weights


Streams = tuple[_Stream, _Stream]


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
        ctx.linear = linear
        ctx.options = options
        ctx.save_for_backward(time)
        return linear.forward(time, True, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return gradients in the order of the inputs."""
        (time,) = ctx.saved_tensors
        linear = ctx.linear
        weight = weight_grad(grad, time, ctx.options.float32_gradients)
        bias = grad.float().sum(0)
        return None, None, linear.input_grad(grad, False), *linear.split(weight), *linear.split(bias)


def modulate(linear: LinearCopy, time_BD: Tensor, options: BlockOptions) -> Tensor:
    """Return the modulation of all blocks and the last norm, or of some, from the activated time embedding."""
    parameters = [*(module.weight for module in linear.modules), *(module.bias for module in linear.modules)]
    modulation: Tensor = Modulation.apply(linear, options, time_BD, *parameters)  # type: ignore[no-untyped-call]
    return modulation
