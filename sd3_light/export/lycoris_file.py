"""LoKr and LoHa files in LyCORIS' layout, by the names that ComfyUI knows for SD3. diffusers reads none of them.

As in LoRA files the scale is multiplied into the first factor, and ``alpha`` is the rank, so every reader's scale is 1.
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
from sd3_light.export.lora_file import METADATA_KEY
from sd3_light.files import atomic_file
from sd3_light.model.adapter_layers import LycorisModule

LYCORIS_PREFIX = "lycoris_"


def write_lycoris(
    path: Path,
    modules: Mapping[str, LycorisModule],
    rank: int,
    save_dtype: torch.dtype = torch.float32,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``modules``, by diffusers' names of the layers, to a file that appears whole or not at all."""
    tensors: dict[str, Tensor] = {}
    names = {}
    for layer, module in modules.items():
        stem = f"{LYCORIS_PREFIX}{layer.replace('.', '_')}"
        names[stem] = layer
        tensors |= {
            f"{stem}.{factor}": _cast(tensor, save_dtype) for factor, tensor in module.with_unit_scale().factors.items()
        }
        tensors[f"{stem}.alpha"] = torch.tensor(float(rank))
    broken = [key for key, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise UserError(f"nothing was saved: {broken[0]} has values that {save_dtype} cannot hold, or none at all")
    said = {"version": __version__, "layout": "lycoris", "facts": dict(facts or {}), "layers": names}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        save_file(tensors, temporary, {METADATA_KEY: json.dumps(said, sort_keys=True, ensure_ascii=False)})
    return path


def read_lycoris(path: Path) -> dict[str, LycorisModule]:
    """Read a file that `write_lycoris` wrote; its metadata says which layers its names mean."""
    try:
        with safe_open(path, framework="pt") as opened:
            said = json.loads((opened.metadata() or {}).get(METADATA_KEY, "{}"))
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a .safetensors file of a LoKr or LoHa") from error
    layers = said.get("layers", {})
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        stem, _, factor = key.partition(".")
        if stem not in layers:
            raise UserError(f"{path}: its metadata does not say which layer {stem} is; give a file that we wrote")
        if factor != "alpha":
            found.setdefault(layers[stem], {})[factor] = tensor
    return {layer: LycorisModule(factors) for layer, factors in found.items()}


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()
