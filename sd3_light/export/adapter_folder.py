"""An adapter as people use it: one file, its card, and the proof that it does on the base what it did in training."""

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
from sd3_light.export.adapter_proof import prove_adapter
from sd3_light.export.diffusers_folder import write_json
from sd3_light.export.export_spec import FACTS_FILE, ExportError
from sd3_light.export.lora_file import from_peft, read_lora, write_lora
from sd3_light.export.lycoris_file import read_lycoris, write_lycoris
from sd3_light.files import new_folder
from sd3_light.model.adapter_layers import LycorisModule, lycoris_modules
from sd3_light.model.lora_layers import LoraModule

LORA_FILE = "pytorch_lora_weights.safetensors"
"""The name by which diffusers finds a LoRA in a folder."""
LYCORIS_FILE = "adapter.safetensors"

AdapterModules = Mapping[str, LoraModule] | Mapping[str, LycorisModule]


@dataclass(frozen=True)
class AdapterSpec:
    """What an adapter's folder must be. ``base`` is the denoiser's folder (or single file) that it was trained on,
    ``facts`` go into the file's metadata and `sd3_light.json`, ``about`` into the card, ``files`` are more texts."""

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
        """The adapter's own file in the folder."""
        return LORA_FILE if self.adapter.type == "lora" else LYCORIS_FILE


def adapter_modules(state: Mapping[str, Tensor], config: AdapterConfig) -> AdapterModules:
    """The updates that an adapter's weights, by their names in the model, stand for."""
    if config.type == "lora":
        return from_peft(state, config.alpha, config.use_rslora)
    return lycoris_modules(state, config.rank, config.alpha)


def read_adapter(path: Path, kind: str) -> AdapterModules:
    """The adapter of a file, or of a folder that holds one."""
    if kind == "lora":
        return read_lora(path).modules
    return read_lycoris(path / LYCORIS_FILE if path.is_dir() else path)


def write_adapter(out: Path, state: Mapping[str, Tensor], spec: AdapterSpec) -> Path:
    """Write, prove, rename: the folder ``out`` appears only when the file has been loaded by a clean process and the
    base computed with it what it computes with the weights in memory. An existing ``out`` is replaced."""
    try:
        return _write(out, state, spec)
    except UserError as fault:  # of what a file can say
        raise ExportError(str(fault)) from fault


def _write(out: Path, state: Mapping[str, Tensor], spec: AdapterSpec) -> Path:
    modules = _checked(state, spec)
    with new_folder(out, replace=True) as temporary:
        _write_file(temporary / spec.file, modules, spec)
        file, config = temporary / spec.file, spec.transformer_config
        proof = prove_adapter(file, modules, spec.adapter, spec.base, config, spec.save_dtype)
        _write_texts(temporary, spec, proof)
    return out


def _checked(state: Mapping[str, Tensor], spec: AdapterSpec) -> AdapterModules:
    """The adapter as updates of layers; a fault names its key."""
    broken = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if broken:
        raise ExportError(f"nothing was saved: {broken[0]} holds NaN or infinity")
    return adapter_modules(state, spec.adapter)


def _write_file(path: Path, modules: AdapterModules, spec: AdapterSpec) -> None:
    facts = _facts(spec)
    lora = {name: module for name, module in modules.items() if isinstance(module, LoraModule)}
    other = {name: module for name, module in modules.items() if isinstance(module, LycorisModule)}
    if lora:
        layout: Any = "peft" if spec.adapter.use_dora else "diffusers"
        write_lora(path, lora, layout=layout, save_dtype=spec.save_dtype, facts=facts)
    else:
        write_lycoris(path, other, spec.adapter.rank, spec.save_dtype, facts)


def adapter_facts(adapter: AdapterConfig) -> dict[str, Any]:
    """What a file's metadata says of its adapter: JSON, without places of the machine that trained it."""
    kept = ("type", "rank", "alpha", "use_rslora", "use_dora", "target_modules", "base_bits")
    return {key: adapter.model_dump(mode="json")[key] for key in kept}


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
