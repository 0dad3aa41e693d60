"""Which SD3 denoiser a single file holds, by its header alone: no weight is read."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.tensor_file import Header, read_header

HEAD_WIDTH = 64  # of every SD3; readers know no other
PREFIX = "model.diffusion_model."
ABOUT = "sd3_light"
_SAMPLE_SIZE = 128  # SD3's; no tensor depends on it
_TELLING = (
    "x_embedder.proj.weight",
    "context_embedder.weight",
    "y_embedder.mlp.0.weight",
    "final_layer.linear.weight",
    "pos_embed",
    "joint_blocks.0.x_block.attn.qkv.weight",
)


def config_of_shapes(single: Mapping[str, tuple[int, ...]], where: str) -> dict[str, Any]:
    """The config that a denoiser's tensors tell. Without qk-norm the head width is SD3's; sample_size is always."""
    missing = [name for name in _TELLING if name not in single]
    if missing:
        raise UserError(f"{where} is no SD3 single file: it lacks {', '.join(missing)}; give one that holds a denoiser")
    try:
        shapes = [single[name] for name in _TELLING]
        (width, channels, patch, _), (_, text), (_, pooled), (outputs, _), (_, positions, _), _ = shapes
    except ValueError as error:
        raise UserError(f"{where} is no SD3 single file: its embedders have other shapes; give another file") from error
    blocks = {int(match[1]) for name in single if (match := re.match(r"joint_blocks\.(\d+)\.", name))}
    gap = next(number for number in range(len(blocks) + 1) if number not in blocks)
    if gap < len(blocks):
        raise UserError(f"{where} is no whole denoiser: it has joint_blocks.{max(blocks)} and lacks joint_blocks.{gap}")
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
    """The denoiser's config: what a file of ours says of itself, else what its shapes tell."""
    header = _header(path)
    about = header.metadata.get(ABOUT)
    if about is not None:
        try:
            config: dict[str, Any] = json.loads(about)["config"]
            return config
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}: its metadata is damaged ({error!r}); write the file anew") from error
    bare = not any(name.startswith(PREFIX) for name in header.entries)
    shapes = {
        name.removeprefix(PREFIX): tuple(entry["shape"])
        for name, entry in header.entries.items()
        if bare or name.startswith(PREFIX)
    }
    return config_of_shapes(shapes, str(path))


def _header(path: Path) -> Header:
    try:
        with open(path, "rb") as file:
            return read_header(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no safetensors file ({error}); give an SD3 single file") from error
