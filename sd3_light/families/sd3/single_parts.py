"""The parts of a model in a diffusers folder and in a single file: where each is and what its config requires."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from sd3_light.export.stored_parts import Build, PartConfig, part_shapes, read_stored, require_shapes
from sd3_light.families.sd3.single_names import (
    Tensors,
    fuse,
    fused_shapes,
    pad,
    padded_config,
    unfuse,
    vae_name,
    vae_tensor,
)
from sd3_light.families.sd3.start import DENOISER_PREFIX
from sd3_light.model.folder import TEXT_ENCODER_FOLDERS
from sd3_light.model.part_configs import WEIGHTS_STEM
from sd3_light.tensor_file import DTYPES, StoredTensor, stored

PREFIXES = {  # in the single file
    "transformer": DENOISER_PREFIX,
    "vae": "first_stage_model.",
    "text_encoder": "text_encoders.clip_l.transformer.",
    "text_encoder_2": "text_encoders.clip_g.transformer.",
    "text_encoder_3": "text_encoders.t5xxl.transformer.",
}
PROJECTION = "text_projection.weight"
_T5_EMBEDDING = "shared.weight"
_T5_SECOND_EMBEDDING = "encoder.embed_tokens.weight"


@dataclass(frozen=True)
class Model:
    """A model in diffusers' layout: config and tensors of each part that exists."""

    configs: dict[str, PartConfig]
    tensors: dict[str, dict[str, StoredTensor]]


def weights_stem(part: str) -> str:
    """Return the stem of the part's weight files in a folder."""
    return "model" if part in TEXT_ENCODER_FOLDERS else WEIGHTS_STEM


def _clip(config: PartConfig) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(CLIPTextConfig.from_dict(config))


def _t5(config: PartConfig) -> T5EncoderModel:
    return T5EncoderModel(T5Config.from_dict(config))


_BUILD: dict[str, Build] = {
    "transformer": SD3Transformer2DModel.from_config,
    "vae": AutoencoderKL.from_config,
    "text_encoder": _clip,
    "text_encoder_2": _clip,
    "text_encoder_3": _t5,
}


def expected_shapes(part: str, config: Mapping[str, Any], where: str = "a model") -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the part's tensors in diffusers' layout; an invalid config is a UserError."""
    return part_shapes(part, config, _BUILD[part], where)


def read_part(folder: Path, part: str) -> tuple[PartConfig, dict[str, StoredTensor]]:
    """Return config and tensors of a part from its own folder; an incomplete part is a UserError."""
    return read_stored(folder, part, weights_stem(part), _BUILD[part])


def to_single_file(model: Model, blocks: int) -> dict[str, StoredTensor]:
    """Return all tensors of a single file whose denoiser has ``blocks`` blocks, identity blocks included."""
    single = {}
    for part, tensors in model.tensors.items():
        converted = _to_single(part, tensors, model.configs[part], blocks)
        single.update({PREFIXES[part] + name: tensor for name, tensor in converted.items()})
    return single


def _to_single(part: str, tensors: Tensors, config: PartConfig, blocks: int) -> Tensors:
    if part == "vae":
        names = {stock: vae_name(stock, _levels(config)) for stock in tensors}
        return {name: vae_tensor(name, tensors[stock]) for stock, name in names.items()}
    if part == "text_encoder_3":  # `StableDiffusion3Pipeline.from_single_file` leaves it without data otherwise
        return {**tensors, _T5_SECOND_EMBEDDING: tensors[_T5_EMBEDDING]}
    if part != "transformer":
        return tensors
    wide = padded_config(config, blocks)
    return fuse(pad(tensors, expected_shapes(part, wide), config["num_layers"], blocks), wide)


def from_single_file(part: str, tensors: Tensors, config: PartConfig, where: str) -> dict[str, StoredTensor]:
    """Convert a part of a single file, without its prefix, to diffusers' layout; checked against its config."""
    shapes = expected_shapes(part, config, where)
    if part == "transformer":
        require_shapes(tensors, fused_shapes(shapes, config), where)
        return unfuse(tensors, config)
    if part == "vae":
        stock_names = {vae_name(stock, _levels(config)): stock for stock in shapes}
        renamed = {stock_names.get(name, name): tensor for name, tensor in tensors.items()}
        matrices = {
            name: tensor.reshaped(shapes[name])  # 1x1 convolutions in the file
            for name, tensor in renamed.items()
            if name in shapes and tensor.shape == (*shapes[name], 1, 1)
        }
        tensors = {**renamed, **matrices}
    if part == "text_encoder" and PROJECTION not in tensors:  # readers of single files do not apply CLIP-L's projection
        dtype = DTYPES[next(iter(tensors.values())).dtype].torch
        tensors = {**tensors, PROJECTION: stored(torch.eye(*shapes[PROJECTION]).to(dtype))}
    require_shapes(tensors, shapes, where)
    return {name: tensors[name] for name in shapes}


def _levels(config: PartConfig) -> int:
    return len(config.get("block_out_channels") or (64,))
