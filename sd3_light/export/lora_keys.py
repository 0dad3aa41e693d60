"""The keys of LoRA files: a prefix, a layer's name, and the tensor's role in the update."""

import re
from typing import Literal

from sd3_light.config.faults import UserError

Role = Literal["down", "up", "alpha", "magnitude"]

_PREFIX = re.compile(
    r"(base_model\.model\.)?(transformer\.|(model\.)?diffusion_model\.|lora_unet_|lora_transformer_|lycoris_)?"
)
# peft may put an adapter name (".default") before ".weight"
_ROLE = re.compile(
    r"(?P<stem>.+?)\.(?P<role>lora_(A|B|down|up)(?=\.)|lora_magnitude_vector|alpha(?!\.lora_))(\.\w+)??(?P<weight>\.weight)?"
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
