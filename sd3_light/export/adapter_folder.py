"""Adapter exports: a folder with one adapter file, its card and its proof."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd3_light import __version__
from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.export.adapter_card import adapter_card, base_name
from sd3_light.export.adapter_proof import AdapterModules, prove_adapter
from sd3_light.export.export_spec import FACTS_FILE, ExportError, write_json
from sd3_light.export.lora_file import from_peft, read_lora, write_lora
from sd3_light.export.lycoris_file import read_lycoris, write_lycoris
from sd3_light.files import new_folder
from sd3_light.model.adapter_layers import LycorisModule, lycoris_modules
from sd3_light.model.lora_layers import LoraModule

LORA_FILE = "pytorch_lora_weights.safetensors"
"""The file name that diffusers looks for in a LoRA folder."""
LYCORIS_FILE = "adapter.safetensors"


@dataclass(frozen=True)
class AdapterSpec:
    """What an adapter folder contains. ``base`` is the denoiser (folder or single file) that it was trained on.

    ``facts`` are written to the file's metadata and `sd3_light.json`, ``about`` to the card; ``files`` are more text
    files by name.
    """

    adapter: AdapterConfig
    base: Path
    transformer_config: Mapping[str, Any]
    save_dtype: torch.dtype = torch.bfloat16
    text: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The name of the adapter file in the folder."""
        return LORA_FILE if self.adapter.type == "lora" else LYCORIS_FILE


def adapter_modules(state: Mapping[str, Tensor], config: AdapterConfig) -> AdapterModules:
    """Return the layer updates of an adapter from its weights, named as in the model."""
    if config.type == "lora":
        return from_peft(state, config.alpha, config.use_rslora)
    return lycoris_modules(state, config.rank, config.alpha)


def read_adapter(path: Path, kind: str) -> AdapterModules:
    """Read the adapter in a file, or in a folder that contains one."""
    if kind == "lora":
        return read_lora(path).modules
    return read_lycoris(path / LYCORIS_FILE if path.is_dir() else path)


def write_adapter(out: Path, state: Mapping[str, Tensor], spec: AdapterSpec) -> Path:
    """Write and verify the folder ``out``, then rename it into place; an existing one is replaced.

    ``out`` appears only after a clean process has loaded the file and the base model computed with it what it computes
    with the weights in memory.
    """
    try:
        return _write(out, state, spec)
    except UserError as error:  # the file cannot represent these weights
        raise ExportError(str(error)) from error


def _write(out: Path, state: Mapping[str, Tensor], spec: AdapterSpec) -> Path:
    not_finite = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if not_finite:
        raise ExportError(f"nothing was saved: {not_finite[0]} contains NaN or infinity")
    modules = adapter_modules(state, spec.adapter)
    with new_folder(out, replace=True) as temporary:
        file = temporary / spec.file
        _write_file(file, modules, spec)
        proof = prove_adapter(file, modules, spec.adapter, spec.base, spec.transformer_config, spec.save_dtype)
        _write_texts(temporary, spec, proof)
    return out


def _write_file(path: Path, modules: AdapterModules, spec: AdapterSpec) -> None:
    facts = _facts(spec)
    lora = {name: module for name, module in modules.items() if isinstance(module, LoraModule)}
    lycoris = {name: module for name, module in modules.items() if isinstance(module, LycorisModule)}
    if lora:
        layout: Any = "peft" if spec.adapter.use_dora else "diffusers"
        write_lora(path, lora, layout=layout, save_dtype=spec.save_dtype, facts=facts)
    else:
        write_lycoris(path, lycoris, spec.adapter.rank, spec.save_dtype, facts)


def adapter_facts(adapter: AdapterConfig) -> dict[str, Any]:
    """Return the adapter's settings for a file's metadata, as JSON without paths of the training machine."""
    keys = ("type", "rank", "alpha", "use_rslora", "use_dora", "target_modules", "base_bits")
    return {key: adapter.model_dump(mode="json")[key] for key in keys}


def _facts(spec: AdapterSpec) -> dict[str, Any]:
    return {**spec.facts, "base": base_name(spec.base), "adapter": adapter_facts(spec.adapter)}


def _write_texts(folder: Path, spec: AdapterSpec, proof: Mapping[str, Any]) -> None:
    facts = {"sd3_light": __version__, "text": dict(spec.text), **_facts(spec)}
    write_json(folder / FACTS_FILE, facts)
    write_json(folder / "proof.json", proof)
    for name, content in spec.files.items():
        (folder / name).write_text(content, encoding="utf-8")
    card = adapter_card(spec.adapter, spec.file, spec.base, facts, spec.about)
    (folder / "README.md").write_text(card, encoding="utf-8")
