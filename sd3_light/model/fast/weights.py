"""Copies of the blocks' weights in the type that computes, made once a step, and laid so that products can share them.

Weights that multiply the same rows (query, key, value; the modulation of all blocks) stand one behind another, so that
one product serves them all. The float32 parameters stay the stock module's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn


@dataclass(frozen=True)
class Linear:
    """One product of a block: copies of its weight and bias, and the parameters that they are copies of."""

    weight: Tensor
    bias: Tensor
    modules: tuple[nn.Linear, ...]

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
    """The copies of a whole denoiser. ``refresh`` makes them follow the parameters."""

    def __init__(self, transformer: SD3Transformer2DModel, dtype: torch.dtype) -> None:
        self._copies: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._dtype = dtype
        weight: Tensor = transformer.proj_out.weight
        self._in_place = weight.device.type == "cpu" and weight.dtype == dtype
        blocks: Any = transformer.transformer_blocks
        norms = [norm.linear for block in blocks for norm in (block.norm1, block.norm1_context)]
        self.modulation = self._joined([*norms, transformer.norm_out.linear])
        self.blocks = [(self._image(block), self._text(block)) for block in blocks]

    def refresh(self) -> None:
        """Copy the parameters. Always: fused optimizers change them without a sign that could be asked for."""
        with torch.no_grad():
            torch._foreach_copy_(self._copies, [parameter.detach() for parameter in self._sources])

    def _joined(self, modules: Sequence[nn.Linear]) -> Linear:
        if len(modules) == 1 and self._in_place:
            return Linear(modules[0].weight.detach(), modules[0].bias.detach(), tuple(modules))
        first, outputs = modules[0].weight, sum(module.out_features for module in modules)
        weight = torch.empty(outputs, first.shape[1], dtype=self._dtype, device=first.device)
        bias = torch.empty(outputs, dtype=self._dtype, device=first.device)
        sizes = [module.out_features for module in modules]
        self._copies += [*weight.split(sizes), *bias.split(sizes)]
        self._sources += [module.weight for module in modules]
        self._sources += [module.bias for module in modules]
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


def _norms(query: Any, key: Any) -> tuple[nn.Parameter, nn.Parameter] | None:
    return None if query is None else (query.weight, key.weight)
