"""The single file that a task saves: the adapter if only an adapter is trained, else all trained weights."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sd3_light.config import AdapterConfig
from sd3_light.config.faults import UserError
from sd3_light.core.files import AdapterNames, Layers
from sd3_light.core.registry import family_of_class
from sd3_light.export.adapter_folder import adapter_facts, adapter_modules, read_adapter, write_adapter_file
from sd3_light.export.export_spec import LORA_FILE
from sd3_light.export.lora_file import cast_tensors, diffusers_state, read_lora, save_tensors
from sd3_light.files import atomic_file, scratch_folder
from sd3_light.model.adapter_layers import AdapterModules


def write_trained(
    path: Path,
    state: Mapping[str, Tensor],
    transformer: nn.Module,
    adapter: AdapterConfig | None,
    save_dtype: torch.dtype = torch.float32,
    facts: Mapping[str, Any] | None = None,
    rename: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
) -> Path:
    """Write the trained weights, named as in ``transformer``, atomically; an existing file is replaced.

    A LoRA gets diffusers' names, ``transformer.<layer>.lora_A.weight``, with its scale multiplied in: it works in stock
    diffusers (``load_lora_weights``) and, for SD3, in ComfyUI. ``rename`` changes the names in the file, or converts
    the tensors.
    """
    facts = {**(facts or {}), **({"adapter": adapter_facts(adapter)} if adapter else {})}
    if adapter is None:
        return write_weights(path, rename(state) if rename else state, save_dtype, facts)
    if rename is not None:
        with scratch_folder(path) as folder:
            plain = load_file(write_trained(folder / path.name, state, transformer, adapter, save_dtype, facts))
        return write_weights(path, rename(plain), save_dtype, facts)
    modules: Any = adapter_modules(state, adapter)
    family = family_of_class(type(transformer))
    if family is None and adapter.type == "lora":
        return write_weights(path, diffusers_state(modules), save_dtype, facts)
    names = AdapterNames()
    padding = None
    if family is not None:
        names = family.files.adapters
        config: Any = transformer.config
        padding = None if family.files.single is None else family.files.single.needed_padding(config)
    with scratch_folder(path) as folder:
        file = write_adapter_file(folder / LORA_FILE, modules, adapter, save_dtype, facts, names, padding)
        os.replace(file, path)
    return path


class _AnyNames(AdapterNames):
    """The names of layers of any denoiser, also of those at its top."""

    def find_layers(self, name: str) -> Layers:
        """See `AdapterNames.find_layers`."""
        return Layers((name,))


def read_trained_adapter(path: Path, transformer: nn.Module, adapter: AdapterConfig) -> AdapterModules:
    """Read the adapter to start from: any LoRA file of a known family; otherwise a file written by `write_trained`."""
    family = family_of_class(type(transformer))
    if family is not None or adapter.type != "lora":
        return read_adapter(path, adapter.type, AdapterNames() if family is None else family.files.adapters)
    if not path.is_file():
        raise UserError(f"{path} is not a file; pass the .safetensors file that a task saved")
    return read_lora(path, names=_AnyNames()).modules


def write_weights(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, facts: Mapping[str, Any]) -> Path:
    """Write tensors by name, atomically; an existing file is replaced."""
    saved = cast_tensors(tensors, dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        save_tensors(temporary, saved, {"facts": dict(facts)})
        written = load_file(temporary)
        assert written.keys() == saved.keys() and all(torch.equal(written[name], saved[name]) for name in saved), path
    return path
