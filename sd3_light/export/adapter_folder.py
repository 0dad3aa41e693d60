"""Adapter exports: a folder with one adapter file, its card and its proof."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd3_light import __version__
from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.core.files import AdapterNames, Padding
from sd3_light.export.adapter_proof import prove_adapter
from sd3_light.export.card import adapter_card, licence_file
from sd3_light.export.export_spec import AdapterSpec, ExportError, write_json, write_texts
from sd3_light.export.lora_file import LoraLayout, read_lora, write_lora
from sd3_light.export.lycoris_file import read_lycoris, write_lycoris
from sd3_light.files import new_folder
from sd3_light.model.adapter_layers import AdapterModules, lycoris_modules
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
            written_facts = {**spec.facts, **adapter}
            names = spec.family.files.adapters
            write_adapter_file(file, modules, spec.adapter, spec.save_dtype, written_facts, names, spec.padding)
            write_json(temporary / "proof.json", prove_adapter(file, modules, spec))
            write_texts(temporary, spec, facts, licence_file(None) | {"README.md": adapter_card(spec, facts)})
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
    path: Path,
    modules: Any,
    adapter: AdapterConfig,
    save_dtype: torch.dtype,
    facts: Mapping[str, Any],
    names: AdapterNames,
    padding: Padding | None = None,
) -> Path:
    """Write an adapter's modules, by diffusers' layer names, to a new file. ``names`` are those of the model's family.

    A LoRA is for the folder. A LoKr or LoHa, which only readers of single files use, is for the file that is padded
    by ``padding``.
    """
    options: dict[str, Any] = {"save_dtype": save_dtype, "facts": facts, "names": names}
    if adapter.type == "lora":
        layout: LoraLayout = "peft" if adapter.use_dora else "diffusers"
        return write_lora(path, modules, layout=layout, **options)
    return write_lycoris(path, modules, padding=padding, **options)


def read_adapter(path: Path, kind: str, names: AdapterNames | None = None) -> AdapterModules:
    """Read the adapter of this type in a file, or in a folder that contains one."""
    return (read_lora if kind == "lora" else read_lycoris)(path, names=names).modules
