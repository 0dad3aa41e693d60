"""Adapter exports: a folder with one adapter file, its card and its proof.

LoKr and LoHa files have LyCORIS' layout, with ComfyUI's names for SD3; diffusers does not read them. As in LoRA files,
the scale is multiplied into the first factor and ``alpha`` is the rank: every reader's scale is 1.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd3_light import __version__
from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.export.adapter_proof import AdapterModules, prove_adapter
from sd3_light.export.card import adapter_card
from sd3_light.export.export_spec import LYCORIS_FILE, AdapterSpec, ExportError, write_json, write_texts
from sd3_light.export.lora_file import (
    LoraLayout,
    cast_tensors,
    load_tensors,
    own_metadata,
    read_lora,
    save_tensors,
    write_lora,
)
from sd3_light.files import atomic_file, new_folder
from sd3_light.model.adapter_layers import LycorisModule, lycoris_modules
from sd3_light.model.lora_layers import from_peft


def write_adapter(out: Path, state: Mapping[str, Tensor], spec: AdapterSpec) -> Path:
    """Write and verify the folder ``out``, then rename it into place; an existing one is replaced.

    ``out`` appears only after a clean process has loaded the file and the base model computed with it what it computes
    with the weights in memory.
    """
    not_finite = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if not_finite:
        raise ExportError(f"nothing was saved: {not_finite[0]} contains NaN or infinity")
    modules = adapter_modules(state, spec.adapter)
    adapter = {"base": spec.base_name, "adapter": adapter_facts(spec.adapter)}
    facts = {"sd3_light": __version__, "text": dict(spec.text), **spec.facts, **adapter}
    try:
        with new_folder(out, replace=True) as temporary:
            file = temporary / spec.file
            write_adapter_file(file, modules, spec.adapter, spec.save_dtype, {**spec.facts, **adapter})
            write_json(temporary / "proof.json", prove_adapter(file, modules, spec))
            write_texts(temporary, spec, facts, adapter_card(spec, facts))
    except UserError as error:  # the file cannot represent these weights
        raise ExportError(str(error)) from error
    return out


def adapter_facts(adapter: AdapterConfig) -> dict[str, Any]:
    """Return the adapter's settings for a file's metadata, as JSON without paths of the training machine."""
    keys = ("type", "rank", "alpha", "use_rslora", "use_dora", "target_modules", "base_bits")
    return {key: adapter.model_dump(mode="json")[key] for key in keys}


def adapter_modules(state: Mapping[str, Tensor], config: AdapterConfig) -> AdapterModules:
    """Return the layer updates of an adapter from its weights, named as in the model."""
    if config.type == "lora":
        return from_peft(state, config.alpha, config.use_rslora)
    return lycoris_modules(state, config.rank, config.alpha)


def write_adapter_file(
    path: Path, modules: Any, adapter: AdapterConfig, save_dtype: torch.dtype, facts: Mapping[str, Any]
) -> Path:
    """Write an adapter's modules, by diffusers' layer names, to a file atomically; an existing file is replaced."""
    if adapter.type == "lora":
        layout: LoraLayout = "peft" if adapter.use_dora else "diffusers"
        return write_lora(path, modules, layout=layout, save_dtype=save_dtype, facts=facts, replace_file=True)
    tensors: dict[str, Tensor] = {}
    names = {f"lycoris_{layer.replace('.', '_')}": layer for layer in modules}
    for stem, layer in names.items():
        factors = modules[layer].with_unit_scale().factors
        tensors |= {f"{stem}.{factor}": tensor for factor, tensor in factors.items()}
    saved = cast_tensors(tensors, save_dtype) | {f"{stem}.alpha": torch.tensor(float(adapter.rank)) for stem in names}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        save_tensors(temporary, saved, {"layout": "lycoris", "facts": dict(facts), "layers": names})
    return path


def read_adapter(path: Path, kind: str) -> AdapterModules:
    """Read the adapter in a file, or in a folder that contains one."""
    if kind == "lora":
        return read_lora(path).modules
    path = path / LYCORIS_FILE if path.is_dir() else path
    tensors, metadata = load_tensors(path)
    layers = own_metadata(metadata, path).get("layers", {})
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        stem, _, factor = key.partition(".")
        if stem not in layers:
            raise UserError(f"{path}: its metadata does not name the layer of {stem}; pass a file written by sd3-light")
        if factor != "alpha":
            modules.setdefault(layers[stem], {})[factor] = tensor
    return {layer: LycorisModule(factors) for layer, factors in modules.items()}
