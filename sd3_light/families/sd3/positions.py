"""The position table: the buffer that SD3 adds to image tokens, with a row per place of a square grid.

diffusers spaces the positions of neighbouring tokens by (sample_size / 2) / pos_embed_max_size radians. Here the step
is a choice of the size. Trained weights contain the table, and every reader takes it from there.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from sd3_light.core.start import WeightsStart
from sd3_light.families.sd3.start import DENOISER_PREFIX
from sd3_light.model.part_configs import WEIGHTS_STEM
from sd3_light.tensor_file import StoredTensor, open_tensors

if TYPE_CHECKING:  # `check` reads a project without torch
    from diffusers import SD3Transformer2DModel
    from torch import Tensor

_TABLE_NAMES = ("pos_embed.pos_embed", f"{DENOISER_PREFIX}pos_embed", "pos_embed")
_TOLERANCE = 2.0**-7  # for tables in bfloat16
_FAR = 128


def position_table(width: int, side: int, step: float) -> "Tensor":
    """Return the table [1, side * side, width] in float32, as diffusers computes it for positions of this step."""
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    table: Tensor = get_2d_sincos_pos_embed(width, side, base_size=step * side, output_type="pt")
    return table.float().unsqueeze(0)


def set_position_step(transformer: "SD3Transformer2DModel", step: float) -> None:
    """Replace the position table of a new denoiser."""
    embed = transformer.pos_embed
    embed.pos_embed.copy_(position_table(embed.pos_embed.shape[-1], embed.pos_embed_max_size, step))


def start_position_step(start: WeightsStart) -> float | None:
    """Return the step of the table that training starts with; None if the weights' table is not of this kind."""
    if start.source is None:
        return float(start.size.position_step)
    files = [start.source] if start.source.is_file() else sorted(start.source.glob(f"{WEIGHTS_STEM}*.safetensors"))
    tables = [table for path in files for table in _stored_tables(path)]
    return _step_of(tables[0]) if tables else None


def _stored_tables(path: Path) -> list[StoredTensor]:
    tensors, _ = open_tensors(path)
    return [tensors[name] for name in _TABLE_NAMES if name in tensors]


def _step_of(table: StoredTensor) -> float | None:
    """Return the step, if the row of the second place consists of its sines and cosines."""
    import torch

    *_, places, width = (0, 0, *table.shape)
    side = math.isqrt(places)
    if side < 2 or width % 4 or math.prod(table.shape) != side * side * width:
        return None
    rows = table.reshaped((places, width))
    far = min(side - 1, _FAR)
    near_half, far_half = (rows.rows(at, at + 1).load().double().flatten()[: width // 2] for at in (1, far))
    near_angle, far_angle = (math.atan2(half[0].item(), half[width // 4].item()) for half in (near_half, far_half))
    # a table in bfloat16 is coarse: a far place has the same error over many steps, after whole turns
    step = (far_angle + math.tau * round((far * near_angle - far_angle) / math.tau)) / far
    angles = step * 10000 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    is_sinusoidal = torch.allclose(near_half, torch.cat([angles.sin(), angles.cos()]), rtol=0, atol=_TOLERANCE)
    return step if step > 0 and is_sinusoidal else None
