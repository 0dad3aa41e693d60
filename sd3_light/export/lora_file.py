"""LoRA files: one that is right in diffusers and in ComfyUI, kohya's layout, and reading those that people have.

In every file that we write the update is ``up @ down``: the scale is multiplied into ``up``. docs/lora-format.md tells
why, and which layout is for whom.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sd3_light import __version__
from sd3_light.config.faults import UserError
from sd3_light.export.lora_layouts import (
    Padding,
    Ranks,
    baked,
    from_single_layers,
    pad_names,
    to_single_layers,
    unpad_names,
)
from sd3_light.export.lora_names import Role, find_layers, read_key
from sd3_light.files import new_file, refuse_existing, write_errors
from sd3_light.model.lora_layers import LoraModule, lora_scale

LoraLayout = Literal["diffusers", "kohya", "peft"]
METADATA_KEY = "sd3_light"
"""The one metadata entry: safetensors writes several in random order, and files must be equal byte for byte."""

_FOLDER_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
_Scales = Callable[[str, int], float]


@dataclass(frozen=True)
class LoraFile:
    """A LoRA by diffusers' names of the layers, the naming that its file had, and what our metadata says."""

    modules: dict[str, LoraModule]
    naming: Literal["diffusers", "single file"]
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
) -> Path:
    """Write ``modules`` to a file that appears whole or not at all; an existing one is an error.

    ``"diffusers"`` is right in stock diffusers and in ComfyUI, ``"kohya"`` in ComfyUI and the programs of that family,
    ``"peft"`` is ``"diffusers"`` with DoRA's magnitudes, which only diffusers reads. ``padding`` is for a LoRA that
    goes with a padded single file. ``facts`` (JSON) go into the metadata.
    """
    check_new_lora(path)
    _check(modules, layout)
    if padding is not None:
        modules = pad_names(modules, padding)
    tensors, ranks = _kohya(modules) if layout == "kohya" else (diffusers_state(modules), {})
    saved = {
        key: tensor if key.endswith(".alpha") else _cast(key, tensor, save_dtype) for key, tensor in tensors.items()
    }
    said: dict[str, Any] = {"version": __version__, "layout": layout, "facts": dict(facts or {})}
    said |= ({"padding": list(padding)} if padding else {}) | ({"ranks": ranks} if ranks else {})
    _save(path, saved, {METADATA_KEY: json.dumps(said, sort_keys=True, ensure_ascii=False)})
    return path


def check_new_lora(path: Path) -> None:
    """Refuse a name that is taken, or by which no program would know the file."""
    refuse_existing(path)
    if path.suffix != ".safetensors":
        raise UserError(f"{path}: programs know a LoRA by its ending; give a name that ends in .safetensors")


def diffusers_state(modules: Mapping[str, LoraModule]) -> dict[str, Tensor]:
    """The tensors of the default file: what stock diffusers loads at the right scale, from a file or as they are."""
    tensors = {}
    for name, module in modules.items():
        tensors[f"transformer.{name}.lora_A.weight"] = module.down
        tensors[f"transformer.{name}.lora_B.weight"] = baked(module).up
        if module.magnitude is not None:
            tensors[f"transformer.{name}.lora_magnitude_vector"] = module.magnitude
    return tensors


def _kohya(modules: Mapping[str, LoraModule]) -> tuple[dict[str, Tensor], Ranks]:
    tensors = {}
    single, ranks = to_single_layers(modules)
    for name, module in single.items():
        stem = f"lora_unet_{name.replace('.', '_')}"
        tensors[f"{stem}.lora_down.weight"] = module.down
        tensors[f"{stem}.lora_up.weight"] = module.up
        # always float32: bfloat16 knows no 257, and every reader divides this by the rank
        tensors[f"{stem}.alpha"] = torch.tensor(float(module.rank))
    return tensors, ranks


def _check(modules: Mapping[str, LoraModule], layout: LoraLayout) -> None:
    """Refuse what the file could not say, by name."""
    if not modules:
        raise UserError("there is no LoRA to write: no layer has one")
    unknown = [name for name in modules if find_layers(name) is None]
    if unknown:
        raise UserError(f"{unknown[0]} is no layer of an SD3 denoiser; a LoRA file cannot name it")
    for name, module in modules.items():
        _check_shapes(name, module)
        if module.down.is_meta or module.up.is_meta:
            raise UserError(f"{name}: its LoRA holds no data (meta tensor); gather the weights before saving")
    decomposed = [name for name, module in modules.items() if module.magnitude is not None]
    if decomposed and layout != "peft":
        raise UserError(
            f"{decomposed[0]} has a DoRA magnitude, which ComfyUI would leave out without a word; "
            'write layout "peft" for diffusers, or merge the LoRA into a model'
        )


def _check_shapes(name: str, module: LoraModule) -> None:
    down, up = module.down.shape, module.up.shape
    if len(down) != len(up) or len(down) not in (2, 4) or 0 in down or up[1] != down[0] or up[2:] not in ((), (1, 1)):
        raise UserError(f"{name}: {list(down)} and {list(up)} are no pair of low-rank factors")


def _cast(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    saved = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    if not saved.isfinite().all():
        cause = f"has values that {dtype} cannot hold" if tensor.isfinite().all() else "has values that are not finite"
        raise UserError(f"nothing was saved: {key} {cause}")
    return saved


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    with write_errors(path), new_file(path) as temporary:
        save_file(tensors, temporary, metadata)


# --- reading -----------------------------------------------------------------------------------


def from_peft(state: Mapping[str, Tensor], alpha: float, use_rslora: bool = False) -> dict[str, LoraModule]:
    """The LoRA in a state with the names of a peft model in memory, gathered from any engine."""
    modules, _ = _modules(state, lambda _, rank: lora_scale(rank, alpha, use_rslora), {})
    return modules


def read_lora(path: Path, padding: Padding | None = None) -> LoraFile:
    """Read a LoRA of diffusers, peft, kohya or ComfyUI; keys that it does not know are errors that name them.

    A folder is searched for the names that diffusers and peft give to their files. The scale is that of the ``.alpha``
    tensors, else of the metadata of diffusers or peft, else 1, as ComfyUI has it. ``padding`` is for a LoRA that was
    trained on a padded single file; of our own files it is known.
    """
    file = _file_of(path)
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as safetensors ({error}); give a .safetensors file") from error
    try:
        said = _said(metadata)
        _refuse_unusable(tensors)
        modules, naming = _modules(tensors, _scales(file, metadata), said.get("ranks", {}))
        padding = padding or (Padding(*said["padding"]) if "padding" in said else None)
        modules = unpad_names(modules, padding) if padding else modules
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return LoraFile(modules, naming, said.get("facts", {}))


def _said(metadata: Mapping[str, str]) -> dict[str, Any]:
    """What a file of ours says about itself, in the types that we write; empty for others'."""
    said = _json(metadata.get(METADATA_KEY, "{}"), METADATA_KEY)
    ranks, padding = said.get("ranks", {}), said.get("padding", [1, 1])
    lists = [padding, *(ranks.values() if isinstance(ranks, dict) else [None])]
    whole = all(isinstance(one, list) and all(type(number) is int for number in one) for one in lists)
    whole = whole and [len(one) for one in lists] == [2, *[3] * len(ranks)]
    if not whole or not isinstance(said.get("facts", {}), dict):
        raise UserError(f"its metadata {METADATA_KEY!r} is damaged; write the file anew")
    return said


def _refuse_unusable(tensors: Mapping[str, Tensor]) -> None:
    """Numbers that no weight can be made of, by the key that has them."""
    for key, tensor in tensors.items():
        if not tensor.is_floating_point() and not key.endswith(".alpha"):
            raise UserError(f"{key} has type {str(tensor.dtype).removeprefix('torch.')}; a LoRA's numbers are floats")
        if not tensor.isfinite().all():
            raise UserError(f"{key} holds NaN or infinity; give another file")


def diffusers_tensors(path: Path) -> dict[str, Tensor]:
    """The LoRA in a file of any layout, as stock diffusers takes it."""
    return diffusers_state(read_lora(path).modules)


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = [path / name for name in _FOLDER_FILES if (path / name).is_file()]
    if not found:
        raise UserError(f"{path} holds no {' or '.join(_FOLDER_FILES)}; give the LoRA's file")
    return found[0]


def _modules(
    tensors: Mapping[str, Tensor], scales: _Scales, ranks: Mapping[str, list[int]]
) -> tuple[dict[str, LoraModule], Literal["diffusers", "single file"]]:
    if not tensors:
        raise UserError("it is empty")
    modules: dict[str, LoraModule] = {}
    single = False
    for layer, roles in _by_layer(tensors).items():
        layers = find_layers(layer)
        assert layers is not None
        single |= layers.single is not None
        module = LoraModule(roles["down"], roles["up"], 1.0, roles.get("magnitude"))
        _check_shapes(layer, module)
        module = replace(module, scale=_scale(layer, roles.get("alpha"), module.rank, scales))
        for name, part in from_single_layers(layers, module, ranks).items():
            if name in modules:
                raise UserError(f"{name} has two LoRAs, one of them under the name {layer}")
            modules[name] = part
    return modules, "single file" if single else "diffusers"


def _scale(layer: str, alpha: Tensor | None, rank: int, scales: _Scales) -> float:
    if alpha is None:
        return scales(layer, rank)
    if alpha.numel() != 1:
        raise UserError(f"{layer}.alpha has shape {list(alpha.shape)}; an alpha is one number")
    return float(alpha.item()) / rank


def _by_layer(tensors: Mapping[str, Tensor]) -> dict[str, dict[Role, Tensor]]:
    """layer -> role -> tensor; all keys that have no meaning are named in one error."""
    found: dict[str, dict[Role, Tensor]] = {}
    strange = []
    for key, tensor in tensors.items():
        layer, role = read_key(key)
        if find_layers(layer) is None:
            strange.append(key)
        elif role in found.setdefault(layer, {}):
            raise UserError(f"{key} says again what another key of the file says; one adapter a file")
        else:
            found[layer][role] = tensor
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise UserError(f"no layers of an SD3 denoiser: {', '.join(strange[:3])}{more}")
    for layer, roles in found.items():
        for role, name in (("down", "lora_A (lora_down)"), ("up", "lora_B (lora_up)")):
            if role not in roles:
                raise UserError(f"{layer} has no {name}; the file is not complete")
    return found


def _scales(file: Path, metadata: Mapping[str, str]) -> _Scales:
    """layer, rank -> the scale where no alpha tensor says it: by the config of diffusers or peft, else 1."""
    config = _json(metadata.get("lora_adapter_metadata", "{}"), "lora_adapter_metadata")
    config = {key.removeprefix("transformer."): value for key, value in config.items()}
    beside = file.with_name("adapter_config.json")
    if not config and file.name == "adapter_model.safetensors" and beside.is_file():
        config = _json(beside.read_text(encoding="utf-8"), beside.name)
    if config.get("lora_alpha") is None:
        return lambda layer, rank: 1.0
    by_layer = config.get("alpha_pattern") or {}
    numbers = [config["lora_alpha"], *(by_layer.values() if isinstance(by_layer, dict) else [None])]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise UserError("its lora_alpha or alpha_pattern holds no number; write the file anew")
    alphas = {name.removeprefix("^"): alpha for name, alpha in by_layer.items()}
    patterns = [name for name in alphas if not re.fullmatch(r"[\w.]+", name)]
    if patterns:
        raise UserError(
            f"its alpha_pattern has the expression {patterns[0]}; only names of layers are understood there"
        )

    def scale(layer: str, rank: int) -> float:
        own = (alpha for name, alpha in alphas.items() if f".{layer}".endswith(f".{name}"))
        return lora_scale(rank, next(own, config["lora_alpha"]), bool(config.get("use_rslora")))

    return scale


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"{where} is no JSON ({error}); write the file anew") from error
    if not isinstance(found, dict):
        raise UserError(f"{where} is no JSON object; write the file anew")
    return found
