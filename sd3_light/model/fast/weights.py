"""Copies of the blocks' weights in the type that computes, made once a step, and laid so that products can share them.

Weights that multiply the same rows (query, key, value; the modulation of all blocks) stand one behind another, so that
one product serves them all. The float32 parameters stay the stock module's own. A parameter put in another's place is
not followed. For products in 8 bits each weight is rounded from float32 twice, as both products want their operands in
rows of what they sum over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from sd3_light.model.fast.fp8 import E4M3, Eight, EightWeight
from sd3_light.model.fast.operations import operations


@dataclass(frozen=True)
class Linear:
    """One product of a block: copies of its bias and weight (or ``eight`` in its place), and the parameters that they
    are copies of."""

    weight: Tensor | None
    bias: Tensor
    modules: tuple[nn.Linear, ...]
    eight: EightWeight | None = None

    def split(self, rows: Tensor) -> list[Tensor]:
        """A gradient of the joined weight or bias as those of the parameters."""
        return list(rows.split([module.out_features for module in self.modules]))


@dataclass(frozen=True)
class Stream:
    """The products of one stream of a block; a text that is only read has no ``out`` and no feed-forward."""

    qkv: Linear
    norms: tuple[nn.Parameter, nn.Parameter] | None
    out: Linear | None
    up: Linear | None
    down: Linear | None

    def parameters(self) -> list[Tensor]:
        """All that learn, in the order in which `block.py` returns gradients."""
        found: list[Tensor] = []
        for linear in (self.qkv, self.out, self.up, self.down):
            if linear is not None:
                found += [module.weight for module in linear.modules]
                # the bias of a product that is added to the stream later is a parameter of who adds it
                is_added_later = linear is self.out or linear is self.down
                found += [] if is_added_later else [module.bias for module in linear.modules]
        return found + list(self.norms or ())


class Weights:
    """The copies of a whole denoiser; with ``fp8`` those of the blocks' products in 8 bits. ``refresh`` makes them
    follow the parameters."""

    def __init__(self, transformer: SD3Transformer2DModel, dtype: torch.dtype, fp8: bool = False) -> None:
        self._copies: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._dtype, self._fp8 = dtype, fp8
        self._rounded: list[Linear] = []
        blocks: Any = transformer.transformer_blocks
        norms = [norm.linear for block in blocks for norm in (block.norm1, block.norm1_context)]
        self.modulation = self._joined([*norms, transformer.norm_out.linear], in_block=False)
        self.blocks = [(self._image(block), self._text(block)) for block in blocks]

    def refresh(self) -> None:
        """Copy the parameters. Always: fused optimizers change them without a sign that could be asked for."""
        with torch.no_grad():
            torch._foreach_copy_(self._copies, [parameter.detach() for parameter in self._sources])
            self._round()

    def _round(self) -> None:
        for linear in self._rounded:
            assert linear.eight is not None
            weights = [module.weight.detach() for module in linear.modules]
            operations(weights[0].device).round_weight(weights, linear.eight)

    def _joined(self, modules: Sequence[nn.Linear], in_block: bool = True) -> Linear:
        first, sizes = modules[0].weight, [module.out_features for module in modules]
        bias = torch.empty(sum(sizes), dtype=self._dtype, device=first.device)
        self._copies += bias.split(sizes)
        self._sources += [module.bias for module in modules]
        if in_block and self._fp8:
            made = Linear(None, bias, tuple(modules), _room(sum(sizes), first.shape[1], first.device))
            self._rounded.append(made)
            return made
        weight = torch.empty(sum(sizes), first.shape[1], dtype=self._dtype, device=first.device)
        self._copies += weight.split(sizes)
        self._sources += [module.weight for module in modules]
        return Linear(weight, bias, tuple(modules))

    def _image(self, block: Any) -> Stream:
        attn = block.attn
        return Stream(
            self._joined([attn.to_q, attn.to_k, attn.to_v]),
            _norms(attn.norm_q, attn.norm_k),
            self._joined([attn.to_out[0]]),
            self._joined([block.ff.net[0].proj]),
            self._joined([block.ff.net[2]]),
        )

    def _text(self, block: Any) -> Stream:
        attn = block.attn
        qkv = self._joined([attn.add_q_proj, attn.add_k_proj, attn.add_v_proj])
        norms = _norms(attn.norm_added_q, attn.norm_added_k)
        if block.context_pre_only:
            return Stream(qkv, norms, None, None, None)
        feed = block.ff_context
        return Stream(
            qkv, norms, self._joined([attn.to_add_out]), self._joined([feed.net[0].proj]), self._joined([feed.net[2]])
        )


def _room(outputs: int, inputs: int, device: torch.device) -> EightWeight:
    def eight(count: int, width: int) -> Eight:
        values = torch.empty(count, width, dtype=E4M3, device=device)
        return Eight(values, torch.empty(count, 1, device=device))

    return EightWeight(eight(outputs, inputs), eight(inputs, outputs))


def _norms(query: Any, key: Any) -> tuple[nn.Parameter, nn.Parameter] | None:
    return None if query is None else (query.weight, key.weight)
