"""LoRA files: one layout for diffusers and ComfyUI, kohya's layout, and a reader for all common layouts.

In every file written here the update is ``up @ down``: the scale is multiplied into ``up``. docs/formats/lora-format.md
explains why, and which layout to use when.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sd3_light import __version__
from sd3_light.config.faults import UserError
from sd3_light.core.files import AdapterNames, Padding, Ranks
from sd3_light.core.registry import family_of_file
from sd3_light.export.export_spec import LORA_FILE, LYCORIS_FILE, first_few
from sd3_light.export.lora_keys import Role, read_key, without_prefix
from sd3_light.files import new_file, refuse_existing, write_errors
from sd3_light.inputs import parse_json, read_limited, require_regular
from sd3_light.model.lora_layers import LoraModule, lora_scale
from sd3_light.tensor_file import HASH_KEY, MAX_DIMENSIONS, METADATA_KEY, stored, write_tensor_file

LoraLayout = Literal["diffusers", "kohya", "peft"]

_FOLDER_FILES = (LORA_FILE, "adapter_model.safetensors", LYCORIS_FILE)
_DIFFUSERS_KEY = re.compile(r"transformer\..+\.lora_[AB]\.weight")
_Scales = Callable[[str, int], float]
Module = TypeVar("Module")


@dataclass(frozen=True)
class LoadedAdapter(Generic[Module]):
    """An adapter's updates by diffusers' layer names, and the facts in our metadata."""

    modules: dict[str, Module]
    facts: dict[str, Any] = field(default_factory=dict)


# --- writing -----------------------------------------------------------------------------------


def write_lora(
    path: Path,
    modules: Mapping[str, LoraModule],
    *,
    layout: LoraLayout = "diffusers",
    save_dtype: torch.dtype = torch.float32,
    padding: Padding | None = None,
    facts: Mapping[str, Any] | None = None,
    names: AdapterNames | None = None,
) -> Path:
    """Write ``modules`` to a file atomically; an existing file is an error.

    ``"diffusers"`` works in stock diffusers and ComfyUI, ``"kohya"`` in ComfyUI and programs of that family, ``"peft"``
    is ``"diffusers"`` with DoRA magnitudes, which only diffusers reads. ``padding`` is for a LoRA that is used with a
    padded single file. ``facts`` (JSON) are written to the metadata. ``names`` are those of the model's family, SD3's
    by default.
    """
    names = names or family_of_file().files.adapters
    check_new_lora(path)
    _check(modules, layout, names)
    true_modules = modules
    if padding is not None:
        modules = names.pad(modules, padding)
    tensors, ranks = _kohya(modules, names) if layout == "kohya" else (_named(modules, names), {})
    alphas = {key: tensor for key, tensor in tensors.items() if key.endswith(".alpha")}
    saved = cast_tensors({key: tensors[key] for key in tensors if key not in alphas}, save_dtype) | alphas
    metadata: dict[str, Any] = {"layout": layout, "facts": dict(facts or {})}
    metadata |= ({"padding": list(padding)} if padding else {}) | ({"ranks": ranks} if ranks else {})
    metadata |= {"family": names.family} if names.family else {}
    return write_adapter_tensors(path, saved, metadata, names.metadata(true_modules, layout, metadata["facts"]))


def write_adapter_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], shown: Mapping[str, str]
) -> Path:
    """Write the file of an adapter atomically; an existing file is an error. See `save_tensors`."""
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as temporary:
            save_tensors(temporary, tensors, metadata, shown)
    return path


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], shown: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with our metadata; ``shown`` adds entries for other programs, with a hash."""
    text = json.dumps({"version": __version__, **metadata}, sort_keys=True, ensure_ascii=False)
    saved = {name: stored(tensor) for name, tensor in tensors.items()}
    write_tensor_file(path, saved, {METADATA_KEY: text, **(shown or {})}, HASH_KEY if shown else None)


def check_new_lora(path: Path) -> None:
    """Raise a UserError if the file exists or its name does not end in .safetensors."""
    refuse_existing(path)
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: programs find LoRA files by their suffix; choose a name that ends in .safetensors")


def diffusers_state(modules: Mapping[str, LoraModule]) -> dict[str, Tensor]:
    """Return the tensors of the default layout, which stock diffusers loads at the right scale."""
    return _named(modules, AdapterNames())


def _named(modules: Mapping[str, LoraModule], names: AdapterNames) -> dict[str, Tensor]:
    tensors = {}
    for name, module in modules.items():
        stem = names.stem(name)
        tensors[f"{stem}.lora_A.weight"] = module.down
        tensors[f"{stem}.lora_B.weight"] = module.with_unit_scale().up
        if module.magnitude is not None:
            tensors[f"{stem}.lora_magnitude_vector"] = module.magnitude
    return tensors


def _kohya(modules: Mapping[str, LoraModule], names: AdapterNames) -> tuple[dict[str, Tensor], Ranks]:
    tensors = {}
    single, ranks = names.fused(modules)
    for name, module in single.items():
        stem = f"lora_unet_{name.replace('.', '_')}"
        tensors[f"{stem}.lora_down.weight"] = module.down
        tensors[f"{stem}.lora_up.weight"] = module.up
        # always float32: bfloat16 cannot represent 257, and every reader divides alpha by the rank
        tensors[f"{stem}.alpha"] = torch.tensor(float(module.rank))
    return tensors, ranks


def _check(modules: Mapping[str, LoraModule], layout: LoraLayout, names: AdapterNames) -> None:
    """Raise a UserError for modules that the file cannot represent."""
    if not modules:
        raise UserError("there is no LoRA to write: no layer has one")
    unknown = [name for name in modules if names.find_layers(name) is None]
    if unknown:
        raise UserError(f"{unknown[0]} is not a layer of {names.denoiser}; a LoRA file cannot name it")
    for name, module in modules.items():
        _check_shapes(name, module)
        if module.down.is_meta or module.up.is_meta:
            raise UserError(f"{name}: its LoRA holds no data (meta tensor); gather the weights before saving")
    dora = [name for name, module in modules.items() if module.magnitude is not None]
    if dora and layout != "peft":
        raise UserError(
            f"{dora[0]} has a DoRA magnitude, which ComfyUI silently ignores; "
            'write layout "peft" for diffusers, or merge the LoRA into a model'
        )


def _check_shapes(name: str, module: LoraModule) -> None:
    down = module.down.shape
    up = module.up.shape
    if len(down) != len(up) or len(down) not in (2, 4) or 0 in down or up[1] != down[0] or up[2:] not in ((), (1, 1)):
        raise UserError(f"{name}: {list(down)} and {list(up)} are not a pair of low-rank factors")


def cast_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copy tensors to the CPU in ``dtype``; a UserError names the first that is not finite."""
    saved = {}
    for key, tensor in tensors.items():
        saved[key] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        if not saved[key].isfinite().all():
            finite = tensor.isfinite().all()
            cause = f"has values that {dtype} cannot hold" if finite else "has values that are not finite"
            raise UserError(f"nothing was saved: {key} {cause}")
    return saved


# --- reading -----------------------------------------------------------------------------------


def read_lora(
    path: Path, padding: Padding | None = None, names: AdapterNames | None = None
) -> LoadedAdapter[LoraModule]:
    """Read a LoRA of diffusers, peft, kohya or ComfyUI; unknown keys are errors that name them.

    A folder is searched for the file names of diffusers and peft. The scale comes from the ``.alpha`` tensors, else
    from the metadata of diffusers or peft, else it is 1, as in ComfyUI. ``padding`` is for a LoRA that was trained on a
    padded single file; files written here record it. ``names`` are those of the model's family, SD3's by default.
    """
    names = names or family_of_file().files.adapters
    file = adapter_file_in(path)
    tensors, metadata = load_tensors(file)
    own = own_metadata(metadata, file)
    try:
        require_numbers(tensors)
        modules = _modules(tensors, _scales(file, metadata), own.get("ranks", {}), names)
        padding = padding or (Padding(*own["padding"]) if "padding" in own else None)
        modules = names.unpad(modules, padding) if padding else modules
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return LoadedAdapter(modules, own.get("facts", {}))


def names_of_file(path: Path) -> AdapterNames:
    """Return the names in a LoRA, LoKr or LoHa file: of the family that it states, SD3's, or diffusers' own."""
    tensors, metadata = load_tensors(adapter_file_in(path))
    names = family_of_file(own_metadata(metadata, path).get("family")).files.adapters
    layers = [without_prefix(key.partition(".lora_")[0]) for key in tensors if _DIFFUSERS_KEY.fullmatch(key)]
    is_other = len(layers) == len(tensors) and any(names.find_layers(layer) is None for layer in layers)
    return AdapterNames() if is_other else names


def load_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of an adapter's file."""
    try:
        require_regular(file)
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                if (dimensions := len(opened.get_slice(key).get_shape())) > MAX_DIMENSIONS:
                    raise ValueError(f"{key} has {dimensions:,} dimensions")
            return {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as safetensors ({error}); pass a .safetensors file") from error


def diffusers_tensors(path: Path, names: AdapterNames | None = None) -> dict[str, Tensor]:
    """Read a LoRA file of any layout as the tensors that stock diffusers loads."""
    return diffusers_state(read_lora(path, names=names).modules)


def adapter_file_in(path: Path) -> Path:
    """Return the adapter's file in a folder; a file is returned as it is."""
    if not path.is_dir():
        return path
    files = [path / name for name in _FOLDER_FILES if (path / name).is_file()]
    if not files:
        raise UserError(f"{path} contains no {' or '.join(_FOLDER_FILES)}; pass the LoRA's file")
    return files[0]


def own_metadata(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    """Return the metadata that `save_tensors` wrote, with checked types; empty for other programs' files."""
    own = _json(metadata.get(METADATA_KEY, "{}"), f"{file}: {METADATA_KEY}")
    ranks = own.get("ranks", {})
    padding = own.get("padding", [1, 1])
    lists = [padding, *(ranks.values() if isinstance(ranks, dict) else [None])]
    valid = all(isinstance(numbers, list) and all(type(number) is int for number in numbers) for numbers in lists)
    valid = valid and [len(numbers) for numbers in lists] == [2, *[3] * len(ranks)]
    layers = own.get("layers", {})
    valid = valid and isinstance(layers, dict) and all(isinstance(layer, str) for layer in layers.values())
    if not valid or not isinstance(own.get("facts", {}), dict):
        raise UserError(f"{file}: its metadata {METADATA_KEY!r} is damaged; write the file again")
    return own


def require_numbers(tensors: Mapping[str, Tensor]) -> None:
    """Raise a UserError for tensors that are not finite floats."""
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() and not key.endswith(".alpha"):
            raise UserError(f"{key} has type {str(tensor.dtype).removeprefix('torch.')}; a LoRA's numbers are floats")
        if not tensor.isfinite().all():
            raise UserError(f"{key} contains NaN or infinity; pass another file")


def _modules(
    tensors: Mapping[str, Tensor], scales: _Scales, ranks: Mapping[str, list[int]], names: AdapterNames
) -> dict[str, LoraModule]:
    if not tensors:
        raise UserError("it is empty")
    modules: dict[str, LoraModule] = {}
    for layer, roles in _by_layer(tensors, names).items():
        layers = names.find_layers(layer)
        assert layers is not None
        module = LoraModule(roles["down"], roles["up"], 1.0, roles.get("magnitude"))
        _check_shapes(layer, module)
        module = replace(module, scale=_scale(layer, roles.get("alpha"), module.rank, scales))
        for name, part in names.split(layers, module, ranks).items():
            if name in modules:
                raise UserError(f"{name} has two LoRAs, one of them under the name {layer}")
            modules[name] = part
    return modules


def _scale(layer: str, alpha: Tensor | None, rank: int, scales: _Scales) -> float:
    if alpha is None:
        return scales(layer, rank)
    if alpha.numel() != 1:
        raise UserError(f"{layer}.alpha has shape {list(alpha.shape)}; an alpha is one number")
    return float(alpha.item()) / rank


def _by_layer(tensors: Mapping[str, Tensor], names: AdapterNames) -> dict[str, dict[Role, Tensor]]:
    """Group the tensors as layer -> role -> tensor; one error names the unknown keys."""
    layers: dict[str, dict[Role, Tensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        layer, role = read_key(key)
        if names.find_layers(layer) is None:
            unknown.append(key)
        elif role in layers.setdefault(layer, {}):
            raise UserError(f"{key} repeats another key of the file; a file can contain one adapter only")
        else:
            layers[layer][role] = tensor
    if unknown:
        raise UserError(f"not layers of {names.denoiser}: {first_few(unknown)}")
    for layer, roles in layers.items():
        for role, name in (("down", "lora_A (lora_down)"), ("up", "lora_B (lora_up)")):
            if role not in roles:
                raise UserError(f"{layer} has no {name}; the file is incomplete")
    return layers


def _scales(file: Path, metadata: Mapping[str, str]) -> _Scales:
    """Return the function (layer, rank) -> scale for layers without alpha: from diffusers' or peft's config, else 1."""
    config = _json(metadata.get("lora_adapter_metadata", "{}"), "lora_adapter_metadata")
    config = {key.removeprefix("transformer."): value for key, value in config.items()}
    config_file = file.with_name("adapter_config.json")
    if not config and file.name == "adapter_model.safetensors" and config_file.is_file():
        config = _json(_read(config_file), config_file.name)
    if config.get("lora_alpha") is None:
        return lambda layer, rank: 1.0
    pattern = config.get("alpha_pattern") or {}
    numbers = [config["lora_alpha"], *(pattern.values() if isinstance(pattern, dict) else [None])]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise UserError("its lora_alpha or alpha_pattern contains a value that is not a number; write the file again")
    alphas = {name.removeprefix("^"): alpha for name, alpha in pattern.items()}
    expressions = [name for name in alphas if not re.fullmatch(r"[\w.]+", name)]
    if expressions:
        raise UserError(f"its alpha_pattern has the expression {expressions[0]}; only layer names are supported there")

    def scale(layer: str, rank: int) -> float:
        matches = (alpha for name, alpha in alphas.items() if f".{layer}".endswith(f".{name}"))
        return lora_scale(rank, next(matches, config["lora_alpha"]), bool(config.get("use_rslora")))

    return scale


def _read(path: Path) -> bytes:
    try:
        return read_limited(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); pass a complete folder") from error


def _json(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); write the file again") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object; write the file again")
    return value
