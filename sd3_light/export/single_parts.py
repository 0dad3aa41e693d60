"""The parts of a model, in a diffusers folder and in a single file: where each lies and what its config promises."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from sd3_light.config.faults import UserError
from sd3_light.export.single_names import (
    Shapes,
    Tensors,
    fused,
    fused_shapes,
    padded,
    padded_config,
    split,
    unpadded,
    vae_name,
    vae_tensor,
)
from sd3_light.model.pipeline_folder import missing_weights
from sd3_light.model.start import WEIGHTS_STEM, read_json
from sd3_light.tensor_file import DTYPES, StoredTensor, read_tensor_file, stored

Config = dict[str, Any]
PREFIXES = {  # in the single file
    "transformer": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder": "text_encoders.clip_l.transformer.",
    "text_encoder_2": "text_encoders.clip_g.transformer.",
    "text_encoder_3": "text_encoders.t5xxl.transformer.",
}
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
PROJECTION = "text_projection.weight"
_MOST_LAYERS = 1000
# what some programs write and no loader needs: a table of numbers, and T5's embedding a second time
_SUPERFLUOUS = re.compile(r"\.position_ids$|^encoder\.embed_tokens\.weight$")


@dataclass(frozen=True)
class Model:
    """A model as diffusers has it: config and tensors of each of its parts that are there."""

    configs: dict[str, Config]
    tensors: dict[str, dict[str, StoredTensor]]


def weights_stem(part: str) -> str:
    """How the part's weight files are called in a folder."""
    return "model" if part in TEXT_ENCODERS else WEIGHTS_STEM


# --- what a config promises -------------------------------------------------------------------


def promised_shapes(part: str, config: Mapping[str, Any], where: str = "a model") -> dict[str, tuple[int, ...]]:
    """Names and shapes of the part's tensors in diffusers' layout; a config that makes no such part is a fault."""
    layers = config.get("num_layers", 1)
    if type(layers) is not int or not 0 < layers <= _MOST_LAYERS:  # a wrong number would take for ever
        raise UserError(f"{where}: the config of {part} has num_layers {layers!r}; fetch or write it anew")
    try:
        with torch.device("meta"):
            model = _empty(part, dict(config))
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{where}: the config of {part} makes none ({said}); fetch or write it anew") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {name: shape for name, shape in shapes.items() if not _SUPERFLUOUS.search(name)}


def _empty(part: str, config: Config) -> nn.Module:
    model: nn.Module
    if part == "transformer":
        model = SD3Transformer2DModel.from_config(config)
    elif part == "vae":
        model = AutoencoderKL.from_config(config)
    elif part == "text_encoder_3":
        model = T5EncoderModel(T5Config.from_dict(config))
    else:
        model = CLIPTextModelWithProjection(CLIPTextConfig.from_dict(config))
    return model


def require_shapes(found: Tensors, shapes: Shapes, where: str) -> None:
    """All tensors that ``shapes`` names, in these shapes, and no other, or a fault that names what is not."""
    strange = [name for name in found if name not in shapes and not _SUPERFLUOUS.search(name)]
    problems = [f"it lacks {name}" for name in shapes if name not in found]
    problems += [f"it has {name}, which is no part of it" for name in strange]
    for name, shape in shapes.items():
        if name in found and found[name].shape != shape:
            problems.append(f"{name} has shape {list(found[name].shape)}, not {list(shape)}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(
            f"{where} is not what its config promises, nothing was written: {'; '.join(problems[:5])}{more}"
        )


# --- folders ----------------------------------------------------------------------------------


def read_part(folder: Path, part: str) -> tuple[Config, dict[str, StoredTensor]]:
    """A part of a diffusers folder, whole, or a fault that names what is missing."""
    return read_place(folder / part, part)


def read_place(place: Path, part: str) -> tuple[Config, dict[str, StoredTensor]]:
    """The same of the folder in which the part itself lies."""
    config = read_json(place / "config.json")
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_files(place, weights_stem(part)):
        found, _ = open_tensors(file)
        twice = tensors.keys() & found.keys()
        if twice:
            raise UserError(f"{file} holds {min(twice)}, and so does another file of {place}; write the folder anew")
        tensors.update(found)
    require_shapes(tensors, promised_shapes(part, config, str(place)), str(place))
    return config, tensors


def _weight_files(place: Path, stem: str) -> list[Path]:
    missing = list(missing_weights(place, stem))
    if missing:
        raise UserError(f"{place} lacks {', '.join(missing)}; give a complete folder")
    single = place / f"{stem}.safetensors"
    if single.is_file():
        return [single]
    return [place / name for name in sorted({*read_json(place / f"{single.name}.index.json")["weight_map"].values()})]


def open_tensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file that the user gave."""
    try:
        return read_tensor_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give a safetensors file") from error
    except ValueError as error:
        raise UserError(f"{path} is no whole safetensors file ({error}); fetch or write it anew") from error


# --- both ways --------------------------------------------------------------------------------


def to_single_file(model: Model, blocks: int) -> dict[str, StoredTensor]:
    """All tensors of a single file whose denoiser has ``blocks`` blocks, identity blocks among them."""
    single = {}
    for part, tensors in model.tensors.items():
        named = _to_single(part, tensors, model.configs[part], blocks)
        single.update({PREFIXES[part] + name: tensor for name, tensor in named.items()})
    return single


def _to_single(part: str, tensors: Tensors, config: Config, blocks: int) -> Tensors:
    if part == "vae":
        names = {stock: vae_name(stock, _levels(config)) for stock in tensors}
        return {name: vae_tensor(name, tensors[stock]) for stock, name in names.items()}
    if part != "transformer":
        return tensors
    wide = padded_config(config, blocks)
    return fused(padded(tensors, promised_shapes(part, wide), config["num_layers"], blocks), wide)


def from_single_file(part: str, found: Tensors, config: Config, where: str) -> dict[str, StoredTensor]:
    """A part of a single file, its prefix taken off, as diffusers has it; checked against its config."""
    shapes = promised_shapes(part, config, where)
    if part == "transformer":
        require_shapes(found, fused_shapes(shapes, config), where)
        return split(found, config)
    if part == "vae":
        back = {vae_name(stock, _levels(config)): stock for stock in shapes}
        renamed = {back.get(name, name): tensor for name, tensor in found.items()}
        found = {name: _matrix(tensor, shapes.get(name)) for name, tensor in renamed.items()}
    if part == "text_encoder" and PROJECTION not in found:
        found = {**found, PROJECTION: _identity(found, shapes[PROJECTION])}
    require_shapes(found, shapes, where)
    return dict(found)


def without_pads(tensors: Tensors, config: Config, blocks: int, where: str) -> dict[str, StoredTensor]:
    """The denoiser of ``config`` out of one that was padded to ``blocks`` blocks."""
    return unpadded(tensors, config["num_layers"], blocks, where)


def _levels(config: Config) -> int:
    return len(config.get("block_out_channels") or (64,))


def _matrix(tensor: StoredTensor, shape: tuple[int, ...] | None) -> StoredTensor:
    """A convolution of one pixel as the matrix that diffusers has there."""
    return tensor.reshaped(shape) if shape is not None and tensor.shape == (*shape, 1, 1) else tensor


def _identity(found: Tensors, shape: tuple[int, ...]) -> StoredTensor:
    """What readers of single files take for CLIP-L's projection: none."""
    like = next(iter(found.values()))
    return stored(torch.eye(*shape).to(DTYPES[like.dtype]))
