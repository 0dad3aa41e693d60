"""Adapter files of SD3 denoisers: the names of layers, and LoRAs in the layout of single files.

There are two namings: diffusers' (``transformer_blocks.0.attn.to_q``), also used in memory, and that of single files
(``joint_blocks.0.x_block.attn.qkv``), which fuses three layers. Kohya's files replace ``.`` in names with ``_``. There
halves are swapped too, and the last block may be renumbered.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.core.files import AdapterNames, Layers, Padding, Ranks, Value
from sd3_light.families.sd3.file_metadata import adapter_metadata
from sd3_light.families.sd3.single_names import denoiser_rules
from sd3_light.families.sd3.start import HEAD_WIDTH
from sd3_light.model.lora_layers import LoraModule

_IN_BLOCK_NAME = re.compile(r"(transformer_blocks|joint_blocks)[._](\d+)[._](.+)")


class SD3AdapterNames(AdapterNames):
    """See `AdapterNames`. Files may have single-file names, which fuse q, k and v."""

    def find_layers(self, name: str) -> Layers | None:
        """See `AdapterNames.find_layers`: a name of either naming, with dots or underscores."""
        block = _IN_BLOCK_NAME.fullmatch(name)
        if block is None:
            return _OUTSIDE_LAYERS.get(name)
        layers = _BLOCK_LAYERS[block[1]].get(block[3])
        if layers is None:
            return None
        index = int(block[2])
        names = tuple(f"transformer_blocks.{index}.{each}" for each in layers.names)
        return Layers(names, layers.single and f"joint_blocks.{index}.{layers.single}")

    def fused(self, modules: Mapping[str, LoraModule]) -> tuple[dict[str, Any], Ranks]:
        """See `AdapterNames.fused`.

        Fusing concatenates ``down`` and makes ``up`` block diagonal, so the rank is the sum of the three.
        """
        by_single: dict[str, dict[str, LoraModule]] = {}
        for name, module in modules.items():
            by_single.setdefault(_single_name(name), {})[name] = module.with_unit_scale()
        fused = {}
        ranks = {}
        for single, parts in by_single.items():
            layers = self.find_layers(single)
            assert layers is not None
            if len(layers.names) == 1:
                fused[single] = _swap_halves(single, next(iter(parts.values())))
                continue
            qkv = [parts.get(name) for name in layers.names]
            fused[single] = _fuse(single, qkv)
            qkv_ranks = [part.rank if part else 0 for part in qkv]
            if len(set(qkv_ranks)) > 1:
                ranks[single] = qkv_ranks
        return fused, ranks

    def split(self, layers: Layers, module: LoraModule, ranks: Mapping[str, list[int]]) -> dict[str, Any]:
        """See `AdapterNames.split`."""
        if layers.single is None:
            return {layers.names[0]: module}
        if len(layers.names) == 1:
            return {layers.names[0]: _swap_halves(layers.single, module)}
        return dict(_split(layers.single, layers.names, module, ranks.get(layers.single)))

    def pad(self, modules: Mapping[str, Value], padding: Padding) -> dict[str, Value]:
        """See `AdapterNames.pad`."""
        last, new = _checked(padding)
        beyond = [name for name in modules if (_block_of(name) or 0) > last]
        if beyond:
            raise UserError(
                f"{beyond[0]} is not in a model of {padding.num_layers} blocks; pass the model's own number of blocks"
            )
        return {_with_block(name, last, new): module for name, module in modules.items()}

    def unpad(self, modules: Mapping[str, Value], padding: Padding) -> dict[str, Value]:
        """See `AdapterNames.unpad`."""
        last, new = _checked(padding)
        if new == last:
            return dict(modules)
        in_padding = [name for name in modules if last <= (_block_of(name) or 0) != new]
        if in_padding:
            raise UserError(
                f"{in_padding[0]} updates a block that pads {padding.num_layers} blocks to {padding.num_blocks}; "
                "the model has no such block, train without these layers"
            )
        return {_with_block(name, new, last): module for name, module in modules.items()}

    def metadata(self, modules: Mapping[str, Any], layout: str, facts: Mapping[str, Any]) -> dict[str, str]:
        """See `AdapterNames.metadata`."""
        return adapter_metadata(modules, layout, facts)


def _single_name(name: str) -> str:
    """Return the single-file name of the weight that contains a diffusers layer."""
    block = _IN_BLOCK_NAME.fullmatch(name)
    return f"joint_blocks.{block[2]}.{_SINGLE[block[3]]}" if block else _SINGLE[name]


def _with_block(name: str, old: int, new: int) -> str:
    """Renumber the block in a name; names of other blocks and outside the blocks are unchanged."""
    block = _IN_BLOCK_NAME.fullmatch(name)
    return f"{block[1]}.{new}.{block[3]}" if block and int(block[2]) == old else name


def _block_of(name: str) -> int | None:
    """Return the block number in a layer's name; None outside the blocks."""
    block = _IN_BLOCK_NAME.fullmatch(name)
    return int(block[2]) if block else None


def _by_spelling(table: Iterable[Layers]) -> dict[str, Layers]:
    names = {(layers.single or layers.names[0]): layers for layers in table}
    return names | {name.replace(".", "_"): layers for name, layers in names.items()}


def _layers(prefix: str, stock: str) -> list[Layers]:
    """Return the layers under two prefixes as the single-file rules pair them; block 0 has every kind of layer."""
    weights = [rule for rule in denoiser_rules(_ALL_LAYERS) if rule.single.endswith(".weight")]
    layers = []
    for rule in weights:
        names = [name.removesuffix(".weight") for name in (rule.single, *rule.stock)]
        if names[0].startswith(prefix) and (prefix or not names[0].startswith("joint_blocks.")):
            layers.append(Layers(tuple(name.removeprefix(stock) for name in names[1:]), names[0].removeprefix(prefix)))
    return layers


_ALL_LAYERS = {"num_layers": 2, "dual_attention_layers": (0,), "qk_norm": None}
_IN_BLOCK = _layers("joint_blocks.0.", "transformer_blocks.0.")
_ELSEWHERE = _layers("", "")
_SINGLE = {name: str(layers.single) for layers in _IN_BLOCK + _ELSEWHERE for name in layers.names}
_OUTSIDE_LAYERS = _by_spelling(_ELSEWHERE) | _by_spelling(Layers(layers.names, None) for layers in _ELSEWHERE)
_BLOCK_LAYERS = {
    "transformer_blocks": _by_spelling(Layers((name,), None) for layers in _IN_BLOCK for name in layers.names),
    "joint_blocks": _by_spelling(_IN_BLOCK),
}


def reader_padding(config: Mapping[str, Any]) -> Padding | None:
    """Return the padding that a denoiser's single file needs: readers expect as many blocks as heads of their width."""
    padding = Padding(int(config["num_layers"]), int(config["num_attention_heads"]))
    needed = padding.num_layers < padding.num_blocks and config["attention_head_dim"] == HEAD_WIDTH
    return padding if needed else None


def _checked(padding: Padding) -> tuple[int, int]:
    if not 0 < padding.num_layers <= padding.num_blocks:
        raise UserError(f"num_blocks {padding.num_blocks} is less than the model's {padding.num_layers} blocks")
    return padding.num_layers - 1, padding.num_blocks - 1


def _swap_halves(single: str, module: LoraModule) -> LoraModule:
    """Swap [scale, shift] of diffusers and [shift, scale] of single files, in the layers that have only these two."""
    rows = module.up.shape[0]
    width = module.down.shape[1]
    # only the last block's text modulation has two chunks; the others have six
    last_text = single.endswith("context_block.adaLN_modulation.1") and rows == 2 * width
    if not last_text and single != "final_layer.adaLN_modulation.1":
        return module
    magnitude = None if module.magnitude is None else module.magnitude.roll(rows // 2, 0)
    return replace(module, up=module.up.roll(rows // 2, 0), magnitude=magnitude)


def _fuse(single: str, parts: Iterable[LoraModule | None]) -> LoraModule:
    present = [part for part in parts if part is not None]
    shapes = {(part.down.shape[1:], part.up.shape[0]) for part in present}
    if len(shapes) > 1:
        raise UserError(
            f"{single}: its q, k and v have different widths {sorted(map(str, shapes))} and cannot be fused"
        )
    rows = present[0].up.shape[0]
    up = torch.block_diag(*(present[0].up.new_zeros(rows, 0) if part is None else part.up for part in parts))
    return LoraModule(torch.cat([part.down for part in present]), up)


def _split(single: str, names: tuple[str, ...], module: LoraModule, ranks: list[int] | None) -> dict[str, LoraModule]:
    rows = module.up.shape[0] // len(names)
    if module.up.ndim != 2 or module.up.shape[0] % len(names):
        raise UserError(f"{single}: {list(module.up.shape)} is not an update of three layers")
    if ranks is None:
        ranks = [module.rank // 3] * 3
    parts = {}
    column = 0
    diagonal = sum(ranks) == module.rank and _is_block_diagonal(module.up, rows, ranks)
    for index, (name, rank) in enumerate(zip(names, ranks, strict=True)):
        # trained as a fused layer: the three share `down`, and each has its own rows of `up`
        columns = slice(column, column + rank) if diagonal else slice(None)
        own = slice(index * rows, (index + 1) * rows)
        column += rank
        if diagonal and rank == 0:
            continue
        magnitude = None if module.magnitude is None else module.magnitude[own].clone()
        parts[name] = LoraModule(module.down[columns].clone(), module.up[own, columns].clone(), module.scale, magnitude)
    return parts


def _is_block_diagonal(up: Tensor, rows: int, ranks: list[int]) -> bool:
    inside = torch.block_diag(*(torch.ones(rows, rank, dtype=torch.bool) for rank in ranks))
    return not up[~inside].any()
