"""The sizes of SD3 denoisers: of a config, in a folder or in a single file. Reads configs and headers only."""

import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sd3_light.config import SIZES, ModelConfig, ModelSize, UserError, resolve_size, size_from_transformer_config
from sd3_light.config.sizes import CUSTOM_SIZE, PRETRAIN_SIZE
from sd3_light.model.folder import text_shape, vae_shape
from sd3_light.model.part_configs import check_config, read_config, single_file_metadata
from sd3_light.tensor_file import open_tensors

HEAD_WIDTH = 64  # of every SD3; other readers assume it
DENOISER_PREFIX = "model.diffusion_model."
_SAMPLE_SIZE = 128  # SD3's; no tensor shape depends on it
_SHAPE_TENSORS = (
    "x_embedder.proj.weight",
    "context_embedder.weight",
    "y_embedder.mlp.0.weight",
    "final_layer.linear.weight",
    "pos_embed",
    "joint_blocks.0.x_block.attn.qkv.weight",
)
_SHAPELESS = ("name", "sample_size", "position_step")  # fields of a size that no weight depends on


def configured_size(model: ModelConfig) -> ModelSize:
    """Return the size that a [model] table describes; of a shape, the encoders and the VAE determine the rest."""
    if model.shape is None:
        return resolve_size(model)
    text = text_shape(model.diffusers_path, model.t5_max_length)
    channels, _ = vae_shape(model.diffusers_path)
    size = replace(
        SIZES[PRETRAIN_SIZE],
        **model.shape.model_dump(),
        name=CUSTOM_SIZE,
        text_width=text.t5_width,
        pooled_width=text.pooled_width,
        latent_channels=channels,
    )
    return size.with_overrides(qk_norm=model.qk_norm, position_step=model.position_step)


def folder_size(folder: Path) -> ModelSize:
    """Return the size of the denoiser in ``folder``, with its name in the table of sizes if it has one."""
    return named_size(read_config(folder, "transformer"), folder / "config.json")


def config_of_shapes(single: Mapping[str, tuple[int, ...]], where: str) -> dict[str, Any]:
    """Return the config that follows from a denoiser's tensor shapes; the rest is SD3's."""
    missing = [name for name in _SHAPE_TENSORS if name not in single]
    if missing:
        raise UserError(
            f"{where} is not an SD3 single file: it lacks {', '.join(missing)}; give a file with a denoiser"
        )
    try:
        shapes = [single[name] for name in _SHAPE_TENSORS]
        (width, channels, patch, _), (_, text), (_, pooled), (outputs, _), (_, positions, _), _ = shapes
    except ValueError as error:
        raise UserError(f"{where} is not an SD3 single file: unknown embedder shapes; give another file") from error
    blocks = {int(match[1]) for name in single if (match := re.match(r"joint_blocks\.(\d+)\.", name))}
    gap = next(number for number in range(len(blocks) + 1) if number not in blocks)
    if gap < len(blocks):
        raise UserError(
            f"{where} is not a complete denoiser: it has joint_blocks.{max(blocks)} and lacks joint_blocks.{gap}"
        )
    norm = single.get("joint_blocks.0.x_block.attn.ln_q.weight")
    head = HEAD_WIDTH if norm is None else norm[0]
    return {
        "sample_size": _SAMPLE_SIZE,
        "patch_size": patch,
        "in_channels": channels,
        "num_layers": len(blocks),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": text,
        "caption_projection_dim": width,
        "pooled_projection_dim": pooled,
        "out_channels": outputs // patch**2,
        "pos_embed_max_size": math.isqrt(positions),
        "dual_attention_layers": sorted({int(name.split(".")[1]) for name in single if ".x_block.attn2." in name}),
        "qk_norm": None if norm is None else "rms_norm",
    }


def single_file_config(path: Path) -> dict[str, Any]:
    """Return the denoiser's config: from the metadata if sd3-light wrote the file, otherwise from the tensor shapes."""
    if metadata := single_file_metadata(path):
        config: dict[str, Any] = dict(metadata["config"])
        return config
    tensors, _ = open_tensors(path)
    bare = not any(name.startswith(DENOISER_PREFIX) for name in tensors)
    shapes = {
        name.removeprefix(DENOISER_PREFIX): tensor.shape
        for name, tensor in tensors.items()
        if bare or name.startswith(DENOISER_PREFIX)
    }
    return config_of_shapes(shapes, str(path))


def named_size(config: dict[str, Any], path: Path) -> ModelSize:
    """Return the size of an SD3 denoiser's config, read from ``path``. Raises UserError for another model."""
    check_config(config, "transformer", str(path))
    kind = config.get("_class_name", "SD3Transformer2DModel")
    if kind != "SD3Transformer2DModel":
        raise UserError(f"{path} describes a {kind}; give the folder of an SD3Transformer2DModel")
    patch = config.get("patch_size", ModelSize.patch_size)
    channels = config.get("in_channels")
    if patch != ModelSize.patch_size:
        raise UserError(
            f"{path} has patch_size {patch}, SD3 has {ModelSize.patch_size}; give the folder of an SD3 denoiser"
        )
    if config.get("out_channels") not in (None, channels):
        raise UserError(
            f"{path} has in_channels {channels} and out_channels {config['out_channels']}, which are equal in an SD3 "
            "denoiser; give the folder of one"
        )
    try:
        size = size_from_transformer_config(config, name=CUSTOM_SIZE)
    except KeyError as missing:
        raise UserError(f"{path} lacks {missing}; give the folder of an SD3 denoiser") from missing
    names = (name for name, known in SIZES.items() if not differences(known, size))
    return replace(size, name=next(names, size.name))


def differences(a: ModelSize, b: ModelSize) -> tuple[str, ...]:
    """Return the fields in which two sizes differ, if any weight depends on them."""
    names = (field.name for field in fields(ModelSize) if field.name not in _SHAPELESS)
    return tuple(name for name in names if getattr(a, name) != getattr(b, name))
