"""Copies of the blocks' weights in the compute dtype, refreshed once per step and laid out for shared products.

Weights that multiply the same rows (query, key, value; the modulation of all blocks) are stacked, so that one product
serves all of them. The float32 parameters remain those of the stock module; replacing a parameter object after
construction has no effect on the copies. For fp8 products each weight is rounded from float32 twice, by row and by
column, because both products need scales along the dimension that they sum over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from sd3_light.families.sd3.fast.fp8 import E4M3, Fp8Rows, Fp8Weight, Operand, multiply, plain_rows
from sd3_light.families.sd3.fast.operations import operations


@dataclass(frozen=True)
class LinearCopy:
    """One product of a block: copies of its bias and weight, and the modules that they are copied from.

    For fp8 products ``fp8`` replaces ``weight``. ``fast_sums``: see `fp8.multiply`.
    """

    weight: Tensor | None
    bias: Tensor
    modules: tuple[nn.Linear, ...]
    fp8: Fp8Weight | None = None

    def forward(self, rows: Operand, biased: bool, fast_sums: bool) -> Tensor:
        """Return rows weight^T (+ bias)."""
        bias = self.bias if biased else None
        if isinstance(rows, Fp8Rows):
            assert self.fp8 is not None
            return multiply(rows, self.fp8.forward, bias, self.bias.dtype, fast_sums)
        assert self.weight is not None
        return torch.mm(rows, self.weight.t()) if bias is None else torch.addmm(bias, rows, self.weight.t())

    def input_grad(self, grad: Operand, fast_sums: bool) -> Tensor:
        """Return grad weight, the gradient of the product's input rows."""
        if isinstance(grad, Fp8Rows):
            assert self.fp8 is not None
            return multiply(grad, self.fp8.backward, None, self.bias.dtype, fast_sums)
        assert self.weight is not None
        return torch.mm(grad, self.weight)

    def split(self, rows: Tensor) -> list[Tensor]:
        """Split a gradient of the stacked weight or bias into those of the parameters."""
        return list(rows.split([module.out_features for module in self.modules]))


class LinearView(LinearCopy):
    """A product that reads its weights whenever it runs: those of a sharded block exist only then."""

    _dtype: torch.dtype

    def __init__(self, modules: tuple[nn.Linear, ...], dtype: torch.dtype) -> None:
        for name, value in (("modules", modules), ("_dtype", dtype)):
            object.__setattr__(self, name, value)

    @property
    def weight(self) -> Tensor:
        """The stacked weights."""
        return self._joined([module.weight for module in self.modules])

    @property
    def bias(self) -> Tensor:
        """The stacked biases."""
        return self._joined([module.bias for module in self.modules])

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        joined = parts[0] if len(parts) == 1 else torch.cat([part.detach() for part in parts])
        return joined.detach().to(self._dtype)


def weight_grad(grad: Operand, rows: Operand, float32: bool) -> Tensor:
    """Return grad^T rows, the gradient of a weight; never in fp8. ``float32``: do not round to the compute dtype."""
    grad = plain_rows(grad)
    rows = plain_rows(rows)
    if float32 and grad.is_cuda and grad.dtype != torch.float32:
        return torch.mm(grad.t(), rows, out_dtype=torch.float32)
    return torch.mm(grad.t(), rows)


@dataclass(frozen=True)
class StreamWeights:
    """The products of one stream of a block; the last block's text has no ``out`` and no feed-forward."""

    qkv: LinearCopy
    norms: tuple[Tensor, Tensor] | None
    out: LinearCopy | None
    up: LinearCopy | None
    down: LinearCopy | None

    def parameters(self) -> list[Tensor]:
        """Return the trainable parameters, in the order in which `block.py` returns gradients."""
        parameters: list[Tensor] = []
        for linear in (self.qkv, self.out, self.up, self.down):
            if linear is not None:
                parameters += [module.weight for module in linear.modules]
                # these biases are added later, with the pending update, and belong to the operation that adds it
                is_added_later = linear is self.out or linear is self.down
                parameters += [] if is_added_later else [module.bias for module in linear.modules]
        return parameters + list(self.norms or ())


class WeightCopies:
    """The copies for a denoiser; ``fp8``: in fp8 for its blocks. Call ``refresh`` after the parameters change."""

    def __init__(self, transformer: SD3Transformer2DModel, dtype: torch.dtype, fp8: bool = False) -> None:
        self._copies: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._dtype = dtype
        self._fp8 = fp8
        self._rounded: list[LinearCopy] = []
        blocks: Any = transformer.transformer_blocks
        norms = [norm.linear for block in blocks for norm in (block.norm1, block.norm1_context)]
        self.modulation = self._stacked([*norms, transformer.norm_out.linear], in_block=False)
        self.blocks = [(self._image(block), self._text(block)) for block in blocks]

    def refresh(self) -> None:
        """Copy the parameters. Unconditional: fused optimizers change them without bumping a version counter."""
        with torch.no_grad():
            torch._foreach_copy_(self._copies, [parameter.detach() for parameter in self._sources])
            for linear in self._rounded:
                assert linear.fp8 is not None
                weights = [module.weight.detach() for module in linear.modules]
                operations(weights[0].device).round_weight(weights, linear.fp8)

    def _stacked(self, modules: Sequence[nn.Linear], in_block: bool = True) -> LinearCopy:
        first = modules[0].weight
        sizes = [module.out_features for module in modules]
        bias = torch.empty(sum(sizes), dtype=self._dtype, device=first.device)
        self._copies += bias.split(sizes)
        self._sources += [module.bias for module in modules]
        if in_block and self._fp8:
            linear = LinearCopy(None, bias, tuple(modules), _empty_fp8(sum(sizes), first.shape[1], first.device))
            self._rounded.append(linear)
            return linear
        weight = torch.empty(sum(sizes), first.shape[1], dtype=self._dtype, device=first.device)
        self._copies += weight.split(sizes)
        self._sources += [module.weight for module in modules]
        return LinearCopy(weight, bias, tuple(modules))

    def _image(self, block: Any) -> StreamWeights:
        attn = block.attn
        qkv = self._stacked([attn.to_q, attn.to_k, attn.to_v])
        return StreamWeights(qkv, _norms(attn.norm_q, attn.norm_k), *self._tail(attn.to_out[0], block.ff))

    def _text(self, block: Any) -> StreamWeights:
        attn = block.attn
        qkv = self._stacked([attn.add_q_proj, attn.add_k_proj, attn.add_v_proj])
        norms = _norms(attn.norm_added_q, attn.norm_added_k)
        if block.context_pre_only:
            return StreamWeights(qkv, norms, None, None, None)
        return StreamWeights(qkv, norms, *self._tail(attn.to_add_out, block.ff_context))

    def _tail(self, out: nn.Linear, feed: Any) -> list[LinearCopy]:
        """Return the products after the attention."""
        return [self._stacked([linear]) for linear in (out, feed.net[0].proj, feed.net[2])]


class WeightViews(WeightCopies):
    """The same interface without copies, for blocks that are sharded: call ``of_block`` inside of a block's pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def refresh(self) -> None:
        """There are no copies."""

    def of_block(self, block: Any) -> tuple[StreamWeights, StreamWeights]:
        """Return the products of both streams."""
        return self._image(block), self._text(block)

    def modulation_of(self, modules: Sequence[nn.Linear]) -> LinearCopy:
        """Return the product of several norms."""
        return self._stacked(modules)

    def _stacked(self, modules: Sequence[nn.Linear], in_block: bool = True) -> LinearCopy:
        return LinearView(tuple(modules), self._dtype)


def _empty_fp8(outputs: int, inputs: int, device: torch.device) -> Fp8Weight:
    def rows(count: int, width: int) -> Fp8Rows:
        values = torch.empty(count, width, dtype=E4M3, device=device)
        return Fp8Rows(values, torch.empty(count, 1, device=device))

    return Fp8Weight(rows(outputs, inputs), rows(inputs, outputs))


def _norms(query: Any, key: Any) -> tuple[Tensor, Tensor] | None:
    return None if query is None else (query.weight.float(), key.weight.float())  # gathered ones may be bf16
