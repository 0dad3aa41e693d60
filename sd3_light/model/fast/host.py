"""A joint block on a CPU, forward and backward by hand: few operations, as each costs more to call than to compute.

It stands for `Block` of `block.py` where all samples have the same number of rows, in float32, keeping all that the
backward pass can use.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sd3_light.model.fast import host_ops as ops
from sd3_light.model.fast.rows import Plan
from sd3_light.model.fast.weights import Linear, Stream


@dataclass
class _Kept:
    """What one stream of a block keeps for the backward pass."""

    first: ops.Normed
    attended: Tensor | None = None
    second: ops.Normed | None = None
    u: Tensor | None = None
    share: Tensor | None = None
    g: Tensor | None = None


class HostBlock(torch.autograd.Function):
    """One joint block over both streams; inputs and outputs are those of `Block`."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, streams: tuple[Stream, Stream], num_heads: int, *tensors: Any
    ) -> tuple[Tensor, ...]:
        """``tensors``: for each stream x, y, bias, gate, modulation, out bias; then its parameters, for autograd."""
        given = (tensors[:6], tensors[6:12])
        lengths = [plan.image.longest, plan.text.longest]
        kept = [_Kept(_normed(stream, values)) for stream, values in zip(streams, given, strict=True)]
        qkv = [_product(stream.qkv, mine.first.h) for stream, mine in zip(streams, kept, strict=True)]
        heads = ops.join(qkv, [stream.norms for stream in streams], num_heads, lengths)
        # a text that is only read asks nothing
        asking = lengths if streams[1].out is not None else lengths[:1]
        attended = ops.attend(heads.qkv, sum(asking))
        outputs: list[Tensor] = []
        for stream, values, part, mine in zip(streams, given, attended.output.split(asking, dim=2), kept, strict=False):
            outputs += _add(stream, values, part, mine)
        ctx.set_materialize_grads(False)
        ctx.streams, ctx.lengths, ctx.kept, ctx.heads, ctx.attended = streams, lengths, kept, heads, attended
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients in the order of the inputs."""
        streams, kept, attended = ctx.streams, ctx.kept, ctx.attended
        late = [
            _add_backward(stream, mine, *grads[2 * at : 2 * at + 2])
            for at, (stream, mine) in enumerate(zip(streams, kept, strict=True))
            if stream.out is not None
        ]
        samples, heads, _, width = attended.output.shape
        parts = [end.attended.view(samples, -1, heads, width).transpose(1, 2) for end in late]
        grad = ops.attend_backward(attended, torch.cat(parts, dim=2))
        dqkv, norms = ops.join_backward(grad, ctx.heads, ctx.lengths)
        ctx.kept = ctx.attended = ctx.heads = None
        inputs: list[Any] = []
        weights: list[Any] = []
        for at, (stream, mine) in enumerate(zip(streams, kept, strict=True)):
            more, learned = _read_backward(stream, mine, late[at] if at < len(late) else None, dqkv[at])
            inputs += more
            weights += [*learned, *(norms[at] or ())]
        return (None, None, None, *inputs, *weights)


def _normed(stream: Stream, values: Any) -> ops.Normed:
    """The first norm of a stream; that of a text which is only read has scale before shift."""
    x, y, bias, gate, modulation, _ = values
    scale, shift = modulation.chunk(2, dim=1) if stream.out is None else modulation.chunk(5, dim=1)[1::-1]
    return ops.residual_norm(x, None if y is None else (y, bias, gate), scale, shift)


def _product(linear: Linear, rows: Tensor) -> Tensor:
    return torch.addmm(linear.bias, rows, _weight(linear).t())


def _weight(linear: Linear) -> Tensor:
    assert linear.weight is not None, "there is none in 8 bits on a CPU"
    return linear.weight


def _add(stream: Stream, values: Any, attended: Tensor, kept: _Kept) -> tuple[Tensor, Tensor]:
    """The second half: attention's output into the stream, and the feed-forward, which stays pending."""
    assert stream.out is not None and stream.up is not None and stream.down is not None
    gate, shift, scale = values[4].chunk(5, dim=1)[2:]
    kept.attended = ops.merge_heads(attended)
    a = torch.mm(kept.attended, _weight(stream.out).t())
    kept.second = ops.residual_norm(kept.first.x, (a, values[5], gate), scale, shift)
    kept.u = _product(stream.up, kept.second.h)
    kept.g, kept.share = ops.gelu(kept.u)
    x = kept.second.x
    kept.second.x = x.detach()  # an output that its own node held would be a circle
    return x, torch.mm(kept.g, _weight(stream.down).t())


@dataclass
class _Late:
    """Gradients that the second half of a stream hands to its first."""

    x: Tensor
    attended: Tensor
    modulation: list[Tensor]
    weights: list[Tensor]
    out_bias: Tensor


def _add_backward(stream: Stream, kept: _Kept, gx: Tensor, df: Tensor) -> _Late:
    assert stream.out is not None and stream.up is not None and stream.down is not None
    assert kept.second is not None and kept.g is not None and kept.u is not None and kept.share is not None
    down = torch.mm(df.t(), kept.g)
    du = ops.gelu_backward(torch.mm(df, _weight(stream.down)), kept.u, kept.share)
    found = ops.residual_norm_backward(kept.second, torch.mm(du, _weight(stream.up)), gx)
    assert found.y is not None and found.gate is not None and found.bias is not None and kept.attended is not None
    weights = [torch.mm(found.y.t(), kept.attended), torch.mm(du.t(), kept.second.h), du.sum(0), down]
    attended = torch.mm(found.y, _weight(stream.out))
    return _Late(found.x, attended, [found.gate, found.shift, found.scale], weights, found.bias)


def _read_backward(stream: Stream, kept: _Kept, late: _Late | None, dqkv: Tensor) -> tuple[list[Any], list[Any]]:
    """(gradients of the stream's six inputs, gradients of its weights and biases)"""
    found = ops.residual_norm_backward(kept.first, torch.mm(dqkv, _weight(stream.qkv)), late.x if late else None)
    weight, bias = torch.mm(dqkv.t(), kept.first.h), dqkv.sum(0)
    parts = [found.shift, found.scale, *late.modulation] if late else [found.scale, found.shift]
    inputs = [found.x, found.y, found.bias, found.gate, torch.cat(parts, dim=1), late.out_bias if late else None]
    learned = [*stream.qkv.split(weight), *stream.qkv.split(bias), *(late.weights if late else ())]
    return inputs, learned


class HostNorm(torch.autograd.Function):
    """`Norm` of `block.py`: the denoiser's last norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, bias: Tensor, gate: Tensor, modulation: Tensor) -> Tensor:
        """``modulation``: scale, then shift."""
        ctx.kept = ops.residual_norm(x, (y, bias, gate), *modulation.chunk(2, dim=1))
        return ctx.kept.h.detach()  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Any, ...]:
        """Gradients in the order of the inputs."""
        found = ops.residual_norm_backward(ctx.kept, dh.contiguous(), None)
        ctx.kept = None
        return found.x, found.y, found.bias, found.gate, torch.cat([found.scale, found.shift], dim=1)
