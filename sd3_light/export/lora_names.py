"""Layer names and key formats of LoRA files for SD3 denoisers.

There are two namings: diffusers' (``transformer_blocks.0.attn.to_q``), also used in memory, and that of single files
(``joint_blocks.0.x_block.attn.qkv``), which fuses three layers. Kohya's files replace ``.`` in names with ``_``.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from sd3_light.config.faults import UserError
from sd3_light.export.single_names import denoiser_rules

Role = Literal["down", "up", "alpha", "magnitude"]

_PREFIX = re.compile(
    r"(base_model\.model\.)?(transformer\.|(model\.)?diffusion_model\.|lora_unet_|lora_transformer_|lycoris_)?"
)
_IN_BLOCK_NAME = re.compile(r"(transformer_blocks|joint_blocks)[._](\d+)[._](.+)")
# peft may put an adapter name (".default") before ".weight"
_ROLE = re.compile(
    r"(?P<stem>.+?)\.(?P<role>lora_(A|B|down|up)(?=\.)|lora_magnitude_vector|alpha)(\.\w+)??(?P<weight>\.weight)?"
)
_ROLES: dict[str, Role] = {
    "lora_A": "down",
    "lora_down": "down",
    "lora_B": "up",
    "lora_up": "up",
    "alpha": "alpha",
    "lora_magnitude_vector": "magnitude",
}
_REFUSED = {
    r"\.dora_scale$": "is LyCORIS' DoRA, whose norm differs from peft's; merge it with the program that made it",
    r"\.lokr_": "is a LoKr; pass a LoRA",
    r"\.hada_": "is a LoHa; pass a LoRA",
    r"\.lora_mid\.": "is a LoRA of three factors; merge it with the program that made it",
    r"^(text_encoder|lora_te)": "belongs to a text encoder; only the denoiser's LoRA is supported, remove such keys",
}


class Layers(NamedTuple):
    """The diffusers layers that a name refers to: one, or three whose rows are concatenated in a fused weight."""

    names: tuple[str, ...]
    single: str | None
    """The single-file name if that naming was used: the halves of some weights are swapped there."""


def read_key(key: str) -> tuple[str, Role]:
    """Return a key's layer, as spelled there without prefix, and its role; an unknown key is an error that names it."""
    for pattern, reason in _REFUSED.items():
        if re.search(pattern, key):
            raise UserError(f"{key} {reason}")
    match = _ROLE.fullmatch(key)
    if match is None or (match["role"] != "alpha" and match["weight"] is None and "magnitude" not in match["role"]):
        raise UserError(f"{key} is not a key of a LoRA (lora_A, lora_B, lora_down, lora_up, alpha)")
    return without_prefix(match["stem"]), _ROLES[match["role"]]


def without_prefix(stem: str) -> str:
    """Return the layer's name, as spelled in a key."""
    return _PREFIX.sub("", stem, count=1)


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
