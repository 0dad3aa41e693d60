"""One file with what a task trained: an adapter alone where only an adapter trains, else the trained weights."""

import json
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
from sd3_light.export.adapter_folder import AdapterModules, adapter_facts, read_adapter
from sd3_light.export.lora_file import METADATA_KEY, from_peft, write_lora
from sd3_light.export.lora_layouts import baked
from sd3_light.export.lycoris_file import write_lycoris
from sd3_light.files import atomic_file
from sd3_light.model.adapter_layers import lycoris_modules
from sd3_light.model.lora_layers import ADAPTER, LoraModule, lora_scale


def write_trained(
    path: Path,
    state: Mapping[str, Tensor],
    transformer: nn.Module,
    adapter: AdapterConfig | None,
    save_dtype: torch.dtype = torch.float32,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write the trained weights, by their names in ``transformer``, to a file that appears whole and is read back.

    A LoRA has diffusers' names, ``transformer.<layer>.lora_A.weight``, with its scale multiplied in: right in stock
    diffusers (``load_lora_weights``) and, of an SD3, in ComfyUI. An earlier file of the name is replaced.
    """
    facts = {**(facts or {}), **({"adapter": adapter_facts(adapter)} if adapter else {})}
    if adapter is None:
        return _write(path, state, save_dtype, facts)
    if adapter.type != "lora":
        modules = lycoris_modules(state, adapter.rank, adapter.alpha)
        return write_lycoris(path, modules, adapter.rank, save_dtype, facts)
    if isinstance(transformer, SD3Transformer2DModel):
        layout: Any = "peft" if adapter.use_dora else "diffusers"
        path.unlink(missing_ok=True)
        lora = from_peft(state, adapter.alpha, adapter.use_rslora)
        return write_lora(path, lora, layout=layout, save_dtype=save_dtype, facts=facts)
    return _write(path, _lora_tensors(state, adapter), save_dtype, facts)


def read_trained_adapter(path: Path, transformer: nn.Module, adapter: AdapterConfig) -> AdapterModules:
    """The adapter of a file to start from: any SD3 LoRA that people have, and for other models what is written here."""
    if isinstance(transformer, SD3Transformer2DModel) or adapter.type != "lora":
        return read_adapter(path, adapter.type)
    if not path.is_file():
        raise UserError(f"{path} is no file; name the .safetensors that a task saved")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is no whole safetensors file: {error}") from error
    found = {}
    for name, down in tensors.items():
        layer, mark, _ = name.removeprefix("transformer.").partition(".lora_A.")
        if mark and (up := tensors.get(f"transformer.{layer}.lora_B.weight")) is not None:
            found[layer] = LoraModule(down, up, 1.0, tensors.get(f"transformer.{layer}.lora_magnitude_vector"))
    if not found:
        raise UserError(f"{path} holds no LoRA (transformer.<layer>.lora_A.weight and lora_B.weight)")
    return found


def _lora_tensors(state: Mapping[str, Tensor], adapter: AdapterConfig) -> dict[str, Tensor]:
    """diffusers' names for the LoRA of any of its models; the scale is in ``lora_B``."""
    found = {}
    for name, down in state.items():
        layer, mark, _ = name.partition(f".lora_A.{ADAPTER}.")
        if not mark:
            continue
        up = state[f"{layer}.lora_B.{ADAPTER}.weight"]
        module = LoraModule(down, up, lora_scale(down.shape[0], adapter.alpha, adapter.use_rslora))
        found[f"transformer.{layer}.lora_A.weight"] = down
        found[f"transformer.{layer}.lora_B.weight"] = baked(module).up
        if (size := state.get(f"{layer}.lora_magnitude_vector.{ADAPTER}.weight")) is not None:
            found[f"transformer.{layer}.lora_magnitude_vector"] = size
    return found


def _write(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, facts: Mapping[str, Any]) -> Path:
    saved = {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in tensors.items()}
    broken = [name for name, tensor in saved.items() if not tensor.isfinite().all()]
    if broken:
        raise UserError(f"nothing was saved: {broken[0]} has values that are not finite in {dtype}")
    said = {"version": __version__, "facts": dict(facts)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        save_file(saved, temporary, {METADATA_KEY: json.dumps(said, sort_keys=True, ensure_ascii=False)})
        back = load_file(temporary)
        assert back.keys() == saved.keys() and all(torch.equal(back[name], saved[name]) for name in saved), path
    return path
