"""LoKr and LoHa files in LyCORIS' layout, with ComfyUI's names for SD3; diffusers does not read them.

As in LoRA files, the scale is multiplied into the first factor and ``alpha`` is the rank: every reader's scale is 1.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.core.files import AdapterNames, Padding
from sd3_light.core.registry import family_of_file
from sd3_light.export.export_spec import first_few
from sd3_light.export.lora_file import (
    LoadedAdapter,
    adapter_file_in,
    cast_tensors,
    check_new_lora,
    load_tensors,
    own_metadata,
    read_lora,
    require_numbers,
    write_adapter_tensors,
)
from sd3_light.export.lora_keys import without_prefix
from sd3_light.model.adapter_layers import LycorisModule, is_lycoris_name

_LOKR = [(("lokr_w1",), ("lokr_w1_a", "lokr_w1_b")), (("lokr_w2",), ("lokr_w2_a", "lokr_w2_b"))]
_LOHA = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}
_FACTORS = [_LOHA, *({*first, *second} for first, second in product(*_LOKR))]


def write_lycoris(
    path: Path,
    modules: Mapping[str, LycorisModule],
    *,
    save_dtype: torch.dtype = torch.float32,
    padding: Padding | None = None,
    facts: Mapping[str, Any] | None = None,
    names: AdapterNames | None = None,
) -> Path:
    """Write ``modules`` to a file atomically; an existing file is an error.

    With ``padding`` the file is for a padded single file, as ComfyUI reads it; without, for the folder. Its metadata
    names the model's own layers, so that it is read back in the same way. ``names`` are those of the model's family,
    SD3's by default.
    """
    names = names or family_of_file().files.adapters
    check_new_lora(path)
    layers = {layer: layer for layer in modules}
    numbered = names.pad(layers, padding) if padding else layers
    stems = {names.lycoris_stem(name): layer for name, layer in numbered.items()}
    tensors: dict[str, Tensor] = {}
    for stem, layer in stems.items():
        factors = modules[layer].with_unit_scale().factors
        tensors |= {f"{stem}.{factor}": tensor for factor, tensor in factors.items()}
    alphas = {f"{stem}.alpha": torch.tensor(float(modules[layer].rank or 1)) for stem, layer in stems.items()}
    metadata: dict[str, Any] = {"layout": "lycoris", "facts": dict(facts or {}), "layers": stems}
    metadata |= {"padding": list(padding)} if padding else {}
    shown = names.metadata(modules, "lycoris", metadata["facts"])
    return write_adapter_tensors(path, cast_tensors(tensors, save_dtype) | alphas, metadata, shown)


def read_lycoris(
    path: Path, padding: Padding | None = None, names: AdapterNames | None = None
) -> LoadedAdapter[LycorisModule]:
    """Read a LoKr or LoHa: a file written here, or one of another program with diffusers' layer names.

    ``padding`` is for a file that another program trained on a padded single file. ``names`` are those of the model's
    family, SD3's by default.
    """
    names = names or family_of_file().files.adapters
    file = adapter_file_in(path)
    tensors, metadata = load_tensors(file)
    own = own_metadata(metadata, file)
    try:
        require_numbers(tensors)
        modules = _modules(tensors, own.get("layers", {}), names)
        if padding is not None and "padding" not in own:
            modules = names.unpad(modules, padding)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return LoadedAdapter(modules, own.get("facts", {}))


def read_any_adapter(
    path: Path, padding: Padding | None = None, names: AdapterNames | None = None
) -> LoadedAdapter[Any]:
    """Read a LoRA, LoKr or LoHa file."""
    return read_lycoris(path, padding, names) if is_lycoris(path) else read_lora(path, padding, names)


def is_lycoris(path: Path) -> bool:
    """Return whether a file, or the adapter's file in a folder, contains a LoKr or LoHa."""
    return any(is_lycoris_name(key) for key in load_tensors(adapter_file_in(path))[0])


def _modules(tensors: Mapping[str, Tensor], layers: Mapping[str, str], names: AdapterNames) -> dict[str, LycorisModule]:
    by_layer: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        stem, _, factor = key.rpartition(".")
        by_layer.setdefault(layers.get(stem) or _layer_of(stem, names), {})[factor] = tensor
    return {layer: _module(layer, factors) for layer, factors in by_layer.items()}


def _layer_of(stem: str, names: AdapterNames) -> str:
    """Return the diffusers layer of another program's name; a layer that is fused in single files is an error."""
    layers = names.find_layers(without_prefix(stem))
    if layers is None:
        raise UserError(f"{stem} is not a layer of {names.denoiser}, and its metadata does not name the layer")
    if layers.single is not None:
        raise UserError(f"{stem} is a layer of a single file, not of diffusers; merge it with the program that made it")
    return layers.names[0]


def _module(layer: str, factors: dict[str, Tensor]) -> LycorisModule:
    alpha = factors.pop("alpha", None)
    if set(factors) not in _FACTORS:
        raise UserError(f"{layer}: {first_few(sorted(factors), 6)} are not the factors of a LoKr or LoHa")
    module = LycorisModule(factors)
    try:
        fits = all(tensor.ndim == 2 and tensor.numel() for tensor in factors.values()) and len(module.shape) == 2
    except RuntimeError:
        fits = False
    if not fits or (alpha is not None and alpha.numel() != 1):
        raise UserError(f"{layer}: the shapes of its factors do not fit together; pass another file")
    return module if alpha is None or module.rank is None else replace(module, scale=float(alpha.item()) / module.rank)
