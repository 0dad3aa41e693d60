"""Layer names in LoRA files for SD3 denoisers.

There are two namings: diffusers' (``transformer_blocks.0.attn.to_q``), also used in memory, and that of single files
(``joint_blocks.0.x_block.attn.qkv``), which fuses three layers. Kohya's files replace ``.`` in names with ``_``.
"""

import re
from collections.abc import Iterable

from sd3_light.core.files import Layers
from sd3_light.families.sd3.single_names import denoiser_rules

_IN_BLOCK_NAME = re.compile(r"(transformer_blocks|joint_blocks)[._](\d+)[._](.+)")


def find_layers(layer: str) -> Layers | None:
    """Return the layers for a name of either naming, with dots or underscores; None if unknown."""
    block = _IN_BLOCK_NAME.fullmatch(layer)
    if block is None:
        return _OUTSIDE_LAYERS.get(layer)
    layers = _BLOCK_LAYERS[block[1]].get(block[3])
    if layers is None:
        return None
    index = int(block[2])
    names = tuple(f"transformer_blocks.{index}.{name}" for name in layers.names)
    return Layers(names, layers.single and f"joint_blocks.{index}.{layers.single}")


def single_name(name: str) -> str:
    """Return the single-file name of the weight that contains a diffusers layer."""
    block = _IN_BLOCK_NAME.fullmatch(name)
    return f"joint_blocks.{block[2]}.{_SINGLE[block[3]]}" if block else _SINGLE[name]


def with_block(name: str, change: dict[int, int]) -> str:
    """Renumber the block in a name; names outside the blocks are unchanged."""
    block = _IN_BLOCK_NAME.fullmatch(name)
    if block is None or int(block[2]) not in change:
        return name
    return f"{block[1]}.{change[int(block[2])]}.{block[3]}"


def block_of(name: str) -> int | None:
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
_IN_BLOCK, _ELSEWHERE = _layers("joint_blocks.0.", "transformer_blocks.0."), _layers("", "")
_SINGLE = {name: str(layers.single) for layers in _IN_BLOCK + _ELSEWHERE for name in layers.names}
_OUTSIDE_LAYERS = _by_spelling(_ELSEWHERE) | _by_spelling(Layers(layers.names, None) for layers in _ELSEWHERE)
_BLOCK_LAYERS = {
    "transformer_blocks": _by_spelling(Layers((name,), None) for layers in _IN_BLOCK for name in layers.names),
    "joint_blocks": _by_spelling(_IN_BLOCK),
}
