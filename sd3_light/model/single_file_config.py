"""Read a denoiser's config from the header of a single file; weights are not read."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.tensor_file import METADATA_KEY, Header, read_header

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
    header = _header(path)
    metadata = header.metadata.get(METADATA_KEY)
    if metadata is not None:
        try:
            config: dict[str, Any] = json.loads(metadata)["config"]
            return config
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}: its metadata is damaged ({error!r}); write the file again") from error
    bare = not any(name.startswith(DENOISER_PREFIX) for name in header.entries)
    shapes = {
        name.removeprefix(DENOISER_PREFIX): tuple(entry["shape"])
        for name, entry in header.entries.items()
        if bare or name.startswith(DENOISER_PREFIX)
    }
    return config_of_shapes(shapes, str(path))


def _header(path: Path) -> Header:
    try:
        with open(path, "rb") as file:
            return read_header(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a safetensors file ({error}); give an SD3 single file") from error
