"""What a weight is, by the modules that hold it; weight decay and Muon depend on it.

The model that holds lists of blocks (`core.model`) has its embeddings (of patches, time and text) before the last of
them, and its output layers after it.
Tables are parameters of a module that also has layers, such as the modulation tables of Sana and Wan.
"""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from sd3_light.core.model import block_parents, is_block_list
from sd3_light.optim.chunks import Named

_MODULATION = re.compile(r"(^|\.)(norm\w*|\w*mod|\w*modulation)\.")
"""Modules inside a block that compute scales, shifts and gates, by their names in diffusers' classes."""
_MOST_PARTS = 9  # of a modulation in published denoisers; taller matrices are narrow for another reason


class WeightKinds:
    """Tells which parameters of ``model`` decay, which are matrices of its blocks, and which of them are fused."""

    def __init__(self, model: nn.Module) -> None:
        tables = {id(weight) for module in model.modules() for weight in _tables(module)}
        blocks: set[int] = set()
        embeddings: set[int] = set()
        self._parts: dict[int, int] = {}
        for parent in block_parents(model):
            children = list(parent.children())
            last = max(at for at, child in enumerate(children) if is_block_list(child))
            for child in children[: last + 1]:
                members = blocks if is_block_list(child) else embeddings
                members |= {id(weight) for weight in child.parameters()}
                if is_block_list(child):
                    self._parts |= dict(_modulations(child))
        self._free = tables | embeddings
        self._in_blocks = blocks - tables

    def add_alias(self, stand_in: nn.Parameter, weight: nn.Parameter) -> None:
        """Treat a parameter like the weight of the model that it stands for."""
        for members in (self._free, self._in_blocks):
            if id(weight) in members:
                members.add(id(stand_in))
        if id(weight) in self._parts:
            self._parts[id(stand_in)] = self._parts[id(weight)]

    def decays(self, weight: nn.Parameter) -> bool:
        """Return whether weight decay applies: to weights of products, not to norms, biases, tables and embeddings."""
        return weight.dim() >= 2 and id(weight) not in self._free

    def is_block_matrix(self, weight: nn.Parameter) -> bool:
        """Return whether a parameter is a matrix of a layer inside a block."""
        return weight.dim() == 2 and id(weight) in self._in_blocks

    def modulation_parts(self, weight: nn.Parameter) -> int:
        """Return how many square matrices a fused modulation has, one above the other; 1 for other matrices."""
        return self._parts.get(id(weight), 1)

    def groups(self, named: Named, weight_decay: float) -> list[dict[str, Any]]:
        """Return the optimizer groups with and without decay; empty ones are left out."""
        groups: dict[float, list[nn.Parameter]] = {weight_decay: [], 0.0: []}  # one group if there is no decay
        for weight in named.values():
            groups[weight_decay if self.decays(weight) else 0.0].append(weight)
        return [{"params": members, "weight_decay": decay} for decay, members in groups.items() if members]


def _modulations(blocks: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield the id of each fused modulation's weight and the number of its parts."""
    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear) and _MODULATION.search(name):
            rows, columns = module.weight.shape
            if rows % columns == 0 and 1 < rows // columns <= _MOST_PARTS:
                yield id(module.weight), rows // columns


def _tables(module: nn.Module) -> Iterator[nn.Parameter]:
    has_layers = any(True for child in module.children() for _ in child.parameters())
    if isinstance(module, nn.Embedding) or (has_layers and not isinstance(module, nn.MultiheadAttention)):
        yield from module.parameters(recurse=False)
