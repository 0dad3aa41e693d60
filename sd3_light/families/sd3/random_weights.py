"""Build a denoiser with random initial weights, for training from scratch."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from diffusers import SD3Transformer2DModel
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn

from sd3_light.families.sd3.positions import set_position_step
from sd3_light.randomness import sample_id, stream
from sd3_light.system import usable_cores


def new_transformer(config: dict[str, Any], seed: int, position_step: float | None = None) -> SD3Transformer2DModel:
    """Return a randomly initialised denoiser. Each weight is a pure function of seed, name and shape.

    Modulation and output start at zero, so every block starts as the identity (adaLN-zero, as in SD3). Without
    ``position_step`` the position table is diffusers'.
    """
    with init_empty_weights(include_buffers=False):  # torch's own initialisation would take longer
        transformer: SD3Transformer2DModel = SD3Transformer2DModel(**config)
    zeroed = _zeroed(transformer)
    narrow = _embedding_mlps(transformer)
    parameters = [
        (module, name, f"{path}.{name}")
        for path, module in transformer.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    ]

    def draw(parameter: tuple[nn.Module, str, str]) -> None:
        module, name, full_name = parameter
        values = torch.zeros(getattr(module, name).shape)
        if isinstance(module, nn.Linear | nn.Conv2d):
            if name == "weight" and module not in zeroed:
                _fill(values, stream(seed, "weights", 0, 0, sample_id(full_name)), 0.02 if module in narrow else None)
        else:
            assert name == "weight" and isinstance(module, RMSNorm), f"no rule for the initial value of {full_name}"
            values.fill_(1.0)
        setattr(module, name, nn.Parameter(values))

    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(draw, parameters))
    if position_step is not None:
        set_position_step(transformer, position_step)
    return transformer


def _fill(values: Tensor, generator: np.random.Generator, deviation: float | None) -> None:
    """Fill with a normal distribution of this deviation, or a Glorot-uniform one."""
    array = values.numpy().reshape(-1)
    if deviation is not None:
        generator.standard_normal(dtype=np.float32, out=array)
        values.mul_(deviation)
        return
    limit = math.sqrt(6 / sum(values.flatten(1).shape))
    generator.random(dtype=np.float32, out=array)
    values.mul_(2 * limit).sub_(limit)


def _zeroed(transformer: SD3Transformer2DModel) -> set[nn.Module]:
    norms = [norm for block in transformer.transformer_blocks for norm in (block.norm1, block.norm1_context)]
    return {*(norm.linear for norm in (*norms, transformer.norm_out)), transformer.proj_out}


def _embedding_mlps(transformer: SD3Transformer2DModel) -> set[nn.Module]:
    embed = transformer.time_text_embed
    parts = (embed.timestep_embedder, embed.text_embedder)
    return {linear for part in parts for linear in (part.linear_1, part.linear_2)}
