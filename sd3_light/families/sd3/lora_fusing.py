"""LoRAs in the layout of single files: q, k and v fused, halves swapped, the last block renumbered."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.core.files import Layers, Padding, Ranks, Value
from sd3_light.families.sd3.lora_names import block_of, find_layers, single_name, with_block
from sd3_light.families.sd3.start import HEAD_WIDTH
from sd3_light.model.lora_layers import LoraModule


def reader_padding(config: Mapping[str, Any]) -> Padding | None:
    """Return the padding that a denoiser's single file needs: readers expect as many blocks as heads of their width."""
    padding = Padding(int(config["num_layers"]), int(config["num_attention_heads"]))
    needed = padding.num_layers < padding.num_blocks and config["attention_head_dim"] == HEAD_WIDTH
    return padding if needed else None


def to_single_layers(modules: Mapping[str, LoraModule]) -> tuple[dict[str, LoraModule], Ranks]:
    """Return the LoRA by single-file names with scale 1, and the ranks of fused layers whose three ranks differ.

    Fusing concatenates ``down`` and makes ``up`` block diagonal, so the rank is the sum of the three.
    """
    by_single: dict[str, dict[str, LoraModule]] = {}
    for name, module in modules.items():
        by_single.setdefault(single_name(name), {})[name] = module.with_unit_scale()
    fused, ranks = {}, {}
    for single, parts in by_single.items():
        layers = find_layers(single)
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


def from_single_layers(layers: Layers, module: LoraModule, ranks: Mapping[str, list[int]]) -> dict[str, LoraModule]:
    """Return the updates of the diffusers layers in one entry of a file; ``ranks`` comes from `to_single_layers`."""
    if layers.single is None:
        return {layers.names[0]: module}
    if len(layers.names) == 1:
        return {layers.names[0]: _swap_halves(layers.single, module)}
    return _split(layers.single, layers.names, module, ranks.get(layers.single))


def pad_names(modules: Mapping[str, Value], padding: Padding) -> dict[str, Value]:
    """Renumber the model's last block as in a padded single file."""
    last, new = _checked(padding)
    beyond = [name for name in modules if (block_of(name) or 0) > last]
    if beyond:
        raise UserError(
            f"{beyond[0]} is not in a model of {padding.num_layers} blocks; pass the model's own number of blocks"
        )
    return {with_block(name, {last: new}): module for name, module in modules.items()}


def unpad_names(modules: Mapping[str, Value], padding: Padding) -> dict[str, Value]:
    """Undo `pad_names`; an update of an identity block is an error: the model has no such block."""
    last, new = _checked(padding)
    if new == last:
        return dict(modules)
    in_padding = [name for name in modules if last <= (block_of(name) or 0) != new]
    if in_padding:
        raise UserError(
            f"{in_padding[0]} updates a block that pads {padding.num_layers} blocks to {padding.num_blocks}; "
            "the model has no such block, train without these layers"
        )
    return {with_block(name, {new: last}): module for name, module in modules.items()}


def _checked(padding: Padding) -> tuple[int, int]:
    if not 0 < padding.num_layers <= padding.num_blocks:
        raise UserError(f"num_blocks {padding.num_blocks} is less than the model's {padding.num_layers} blocks")
    return padding.num_layers - 1, padding.num_blocks - 1


def _swap_halves(single: str, module: LoraModule) -> LoraModule:
    """Swap [scale, shift] of diffusers and [shift, scale] of single files, in the layers that have only these two."""
    rows, width = module.up.shape[0], module.down.shape[1]
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
    parts, column = {}, 0
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
