"""LoKr and LoHa files in LyCORIS' layout, with ComfyUI's names for SD3. diffusers does not read them.

As in LoRA files, the scale is multiplied into the first factor and ``alpha`` is the rank: every reader's scale is 1.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sd3_light import __version__
from sd3_light.config.faults import UserError
from sd3_light.export.lora_file import cast_tensors
from sd3_light.files import atomic_file
from sd3_light.model.adapter_layers import LycorisModule
from sd3_light.tensor_file import METADATA_KEY

LYCORIS_PREFIX = "lycoris_"


def write_lycoris(
    path: Path,
    modules: Mapping[str, LycorisModule],
    rank: int,
    save_dtype: torch.dtype = torch.float32,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``modules``, by diffusers' layer names, to a file atomically."""
    tensors: dict[str, Tensor] = {}
    names = {}
    for layer, module in modules.items():
        stem = f"{LYCORIS_PREFIX}{layer.replace('.', '_')}"
        names[stem] = layer
        tensors |= {f"{stem}.{factor}": tensor for factor, tensor in module.with_unit_scale().factors.items()}
    saved = cast_tensors(tensors, save_dtype) | {f"{stem}.alpha": torch.tensor(float(rank)) for stem in names}
    metadata = {"version": __version__, "layout": "lycoris", "facts": dict(facts or {}), "layers": names}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        save_file(saved, temporary, {METADATA_KEY: json.dumps(metadata, sort_keys=True, ensure_ascii=False)})
    return path


def read_lycoris(path: Path) -> dict[str, LycorisModule]:
    """Read a file written by `write_lycoris`; its metadata maps its names to layers."""
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = json.loads((opened.metadata() or {}).get(METADATA_KEY, "{}"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); pass a .safetensors file of a LoKr or LoHa") from error
    layers = metadata.get("layers", {})
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        stem, _, factor = key.partition(".")
        if stem not in layers:
            raise UserError(f"{path}: its metadata does not name the layer of {stem}; pass a file written by sd3-light")
        if factor != "alpha":
            modules.setdefault(layers[stem], {})[factor] = tensor
    return {layer: LycorisModule(factors) for layer, factors in modules.items()}
