"""The single file that a task saves: the adapter if only an adapter is trained, else all trained weights."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sd3_light import __version__
from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.export.adapter_folder import adapter_facts, read_adapter
from sd3_light.export.adapter_proof import AdapterModules
from sd3_light.export.lora_file import cast_tensors, from_peft, write_lora
from sd3_light.export.lora_fusing import baked
from sd3_light.export.lycoris_file import write_lycoris
from sd3_light.files import atomic_file, scratch_folder
from sd3_light.model.adapter_layers import lycoris_modules
from sd3_light.model.lora_layers import ADAPTER, LoraModule, lora_scale
from sd3_light.tensor_file import METADATA_KEY


def write_trained(
    path: Path,
    state: Mapping[str, Tensor],
    transformer: nn.Module,
    adapter: AdapterConfig | None,
    save_dtype: torch.dtype = torch.float32,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write the trained weights, named as in ``transformer``, atomically; an existing file is replaced.

    A LoRA gets diffusers' names, ``transformer.<layer>.lora_A.weight``, with its scale multiplied in: it works in stock
    diffusers (``load_lora_weights``) and, for SD3, in ComfyUI.
    """
    facts = {**(facts or {}), **({"adapter": adapter_facts(adapter)} if adapter else {})}
    if adapter is None:
        return _write(path, state, save_dtype, facts)
    if adapter.type != "lora":
        modules = lycoris_modules(state, adapter.rank, adapter.alpha)
        return write_lycoris(path, modules, adapter.rank, save_dtype, facts)
    if isinstance(transformer, SD3Transformer2DModel):
        layout: Any = "peft" if adapter.use_dora else "diffusers"
        lora = from_peft(state, adapter.alpha, adapter.use_rslora)
        with scratch_folder(path) as folder:
            new = write_lora(folder / path.name, lora, layout=layout, save_dtype=save_dtype, facts=facts)
            os.replace(new, path)
        return path
    return _write(path, _lora_tensors(state, adapter), save_dtype, facts)


def read_trained_adapter(path: Path, transformer: nn.Module, adapter: AdapterConfig) -> AdapterModules:
    """Read the adapter to start from: any SD3 LoRA file; for other models, a file written by `write_trained`."""
    if isinstance(transformer, SD3Transformer2DModel) or adapter.type != "lora":
        return read_adapter(path, adapter.type)
    if not path.is_file():
        raise UserError(f"{path} is not a file; pass the .safetensors file that a task saved")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a complete safetensors file: {error}") from error
    modules = {}
    for name, down in tensors.items():
        layer, mark, _ = name.removeprefix("transformer.").partition(".lora_A.")
        if mark and (up := tensors.get(f"transformer.{layer}.lora_B.weight")) is not None:
            modules[layer] = LoraModule(down, up, 1.0, tensors.get(f"transformer.{layer}.lora_magnitude_vector"))
    if not modules:
        raise UserError(f"{path} contains no LoRA (transformer.<layer>.lora_A.weight and lora_B.weight)")
    return modules


def _lora_tensors(state: Mapping[str, Tensor], adapter: AdapterConfig) -> dict[str, Tensor]:
    """Return a LoRA's tensors by diffusers' names, with the scale multiplied into ``lora_B``."""
    tensors = {}
    for name, down in state.items():
        layer, mark, _ = name.partition(f".lora_A.{ADAPTER}.")
        if not mark:
            continue
        up = state[f"{layer}.lora_B.{ADAPTER}.weight"]
        module = LoraModule(down, up, lora_scale(down.shape[0], adapter.alpha, adapter.use_rslora))
        tensors[f"transformer.{layer}.lora_A.weight"] = down
        tensors[f"transformer.{layer}.lora_B.weight"] = baked(module).up
        if (magnitude := state.get(f"{layer}.lora_magnitude_vector.{ADAPTER}.weight")) is not None:
            tensors[f"transformer.{layer}.lora_magnitude_vector"] = magnitude
    return tensors


def _write(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, facts: Mapping[str, Any]) -> Path:
    saved = cast_tensors(tensors, dtype)
    metadata = {"version": __version__, "facts": dict(facts)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        save_file(saved, temporary, {METADATA_KEY: json.dumps(metadata, sort_keys=True, ensure_ascii=False)})
        written = load_file(temporary)
        assert written.keys() == saved.keys() and all(torch.equal(written[name], saved[name]) for name in saved), path
    return path
