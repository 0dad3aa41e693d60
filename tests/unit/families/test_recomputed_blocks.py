"""A share of the blocks recomputes its activations: the first ones, each once more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from sd3_light.config import TrainConfig
from sd3_light.config.base import recomputed_blocks
from sd3_light.core.batch import Batch
from sd3_light.core.model import denoiser_blocks
from sd3_light.core.registry import family_of
from tests.stock import save_stock


def config(folder: Path, level: Any) -> TrainConfig:
    keys = {"output_dir": "out", "dataset": "data.toml", "max_steps": 1, "activation_checkpointing": level}
    model = {"type": "flux", "diffusers_path": str(folder), "transformer_dtype": "float32"}
    return TrainConfig.model_validate({**keys, "model": model}, context={"base": folder})


@pytest.mark.parametrize(
    ("level", "blocks", "expected"), [(False, 24, 0), (True, 24, 24), ("host", 24, 24), (0.5, 5, 3), (0.01, 24, 1)]
)
def test_the_number_of_recomputed_blocks(level: Any, blocks: int, expected: int) -> None:
    assert recomputed_blocks(level, blocks) == expected


@pytest.mark.parametrize("level", [0.0, 1.0, 1.5, -0.5, 2, "half", float("nan")])
def test_other_levels_are_refused(tmp_path: Path, level: Any) -> None:
    with pytest.raises(ValidationError, match="activation_checkpointing"):
        config(tmp_path, level)


@pytest.mark.parametrize("level", [False, 0.5, True])
def test_the_first_blocks_are_computed_twice(tmp_path: Path, level: Any) -> None:
    save_stock("flux", tmp_path)
    settings = config(tmp_path, level)
    family = family_of(settings.model)
    denoiser: Any = family.weights.load(family.weights.start(settings.model), 0)
    runs: list[int] = []
    blocks = denoiser_blocks(denoiser)
    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=number: runs.append(number))
    module = family.training.model(denoiser, settings, fast=False)
    width = denoiser.config.joint_attention_dim
    channels = denoiser.config.in_channels // 4
    values = {name: torch.randn(1, channels, 8, 8) for name in ("noisy", "target")}
    values |= {"t": torch.rand(1), "text": torch.randn(1, 8, width)}
    values["pooled"] = torch.randn(1, denoiser.config.pooled_projection_dim)
    module(Batch(1, values))["loss"].backward()
    again = recomputed_blocks(level, len(blocks))
    assert len(blocks) > 2
    assert runs == [*range(len(blocks)), *reversed(range(again))]
