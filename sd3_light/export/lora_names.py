"""The names that LoRA files give to the layers of an SD3 denoiser, and what follows their prefix.

Two namings: diffusers' (``transformer_blocks.0.attn.to_q``), which is also the one in memory, and that of single files
(``joint_blocks.0.x_block.attn.qkv``), where three layers are one. Kohya's files write names with ``_`` for ``.``.
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
_BLOCK = re.compile(r"(transformer_blocks|joint_blocks)[._](\d+)[._](.+)")
# an adapter's name of peft (".default.") may stand before ".weight"
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
    r"\.dora_scale$": "is LyCORIS's DoRA, whose norm is another than peft's; merge the file where it was made",
    r"\.lokr_": "is a LoKr; only LoRA is read, merge the file where it was made",
    r"\.hada_": "is a LoHa; only LoRA is read, merge the file where it was made",
    r"\.lora_mid\.": "is a LoRA of three factors; merge the file where it was made",
    r"^(text_encoder|lora_te)": "belongs to a text encoder; only the denoiser's LoRA is read, leave such keys out",
}


class Key(NamedTuple):
    """What a key of a LoRA file means: ``layer`` as it is spelt there, without prefix, and the tensor's role."""

    layer: str
    role: Role


class Layers(NamedTuple):
    """The layers of diffusers that a name means: one, or three whose rows follow each other in a fused weight."""

    names: tuple[str, ...]
    single: str | None
    """The single file's name where that naming was used: the halves of some weights are swapped there."""


def read_key(key: str) -> Key:
    """Take a key apart; one that no LoRA has is an error that names it."""
    for pattern, reason in _REFUSED.items():
        if re.search(pattern, key):
            raise UserError(f"{key} {reason}")
    found = _ROLE.fullmatch(key)
    if found is None or (found["role"] != "alpha" and found["weight"] is None and "magnitude" not in found["role"]):
        raise UserError(f"{key} is no key of a LoRA (lora_A, lora_B, lora_down, lora_up, alpha)")
    layer = found["stem"]
    prefix = _PREFIX.match(layer)
    return Key(layer[prefix.end() :] if prefix else layer, _ROLES[found["role"]])


def find_layers(layer: str) -> Layers | None:
    """The layers that a name of either naming means, spelt with dots or underscores; None for any other name."""
    block = _BLOCK.fullmatch(layer)
    if block is None:
        return _OUTSIDE.get(layer)
    found = _INSIDE[block[1]].get(block[3])
    if found is None:
        return None
    index = int(block[2])
    names = tuple(f"transformer_blocks.{index}.{name}" for name in found.names)
    return Layers(names, found.single and f"joint_blocks.{index}.{found.single}")


def single_name(name: str) -> str:
    """The single file's name of the weight that holds a layer of diffusers."""
    block = _BLOCK.fullmatch(name)
    return f"joint_blocks.{block[2]}.{_SINGLE[block[3]]}" if block else _SINGLE[name]


def with_block(name: str, change: dict[int, int]) -> str:
    """A name with its block renumbered; names outside the blocks stay."""
    block = _BLOCK.fullmatch(name)
    if block is None or int(block[2]) not in change:
        return name
    return f"{block[1]}.{change[int(block[2])]}.{block[3]}"


def block_of(name: str) -> int | None:
    """The block that a layer lies in; None outside of all."""
    block = _BLOCK.fullmatch(name)
    return int(block[2]) if block else None


def _spelt(table: Iterable[Layers]) -> dict[str, Layers]:
    names = {(layers.single or layers.names[0]): layers for layers in table}
    return names | {name.replace(".", "_"): layers for name, layers in names.items()}


def _layers(prefix: str, stock: str) -> list[Layers]:
    """The layers under two prefixes, as the export of single files pairs them: a first block has all that one can."""
    weights = [rule for rule in denoiser_rules(_ALL_LAYERS) if rule.single.endswith(".weight")]
    found = []
    for rule in weights:
        names = [name.removesuffix(".weight") for name in (rule.single, *rule.stock)]
        if names[0].startswith(prefix) and (prefix or not names[0].startswith("joint_blocks.")):
            found.append(Layers(tuple(name.removeprefix(stock) for name in names[1:]), names[0].removeprefix(prefix)))
    return found


_ALL_LAYERS = {"num_layers": 2, "dual_attention_layers": (0,), "qk_norm": None}
_IN_BLOCK, _ELSEWHERE = _layers("joint_blocks.0.", "transformer_blocks.0."), _layers("", "")
_SINGLE = {name: str(layers.single) for layers in _IN_BLOCK + _ELSEWHERE for name in layers.names}
_OUTSIDE = _spelt(_ELSEWHERE) | _spelt(Layers(layers.names, None) for layers in _ELSEWHERE)
_INSIDE = {
    "transformer_blocks": _spelt(Layers((name,), None) for layers in _IN_BLOCK for name in layers.names),
    "joint_blocks": _spelt(_IN_BLOCK),
}
