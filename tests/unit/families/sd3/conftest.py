"""A [model] table and cached features of samples, as training reads them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config import ModelConfig, TrainConfig
from sd3_light.randomness import stream

MODEL = {"train_type": "sd3_light_pretrain", "size": "tiny2", "dtype": "float32"}
SHAPES = {"clip_l": (7, 96), "clip_g": (7, 128), "t5": (5, 256), "clip_l.pooled": (96,), "clip_g.pooled": (128,)}


@pytest.fixture(scope="package")
def cleaning() -> None:
    """Nothing, in place of the other families' fixture: SD3 does not clean captions."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create the part of a diffusers folder that training reads before it saves."""
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"scaling_factor": 1.5, "shift_factor": 0.06}))
    return tmp_path


@pytest.fixture
def model(folder: Path) -> Callable[..., ModelConfig]:
    def table(**keys: Any) -> ModelConfig:
        return ModelConfig.model_validate({"diffusers_path": str(folder), **MODEL, **keys}, context={"base": folder})

    return table


@pytest.fixture
def config(folder: Path) -> Callable[..., TrainConfig]:
    def table(model: dict[str, Any] | None = None, **keys: Any) -> TrainConfig:
        tables = {"diffusers_path": str(folder), **MODEL, **(model or {})}
        needed = {"output_dir": "out", "dataset": "data.toml", "max_steps": 3}
        return TrainConfig.model_validate({**needed, "model": tables, **keys}, context={"base": folder})

    return table


@pytest.fixture
def batch() -> Callable[..., dict[str, Any]]:
    """Make cached features of samples; each depends on its id alone, not on its batch."""

    def make(
        ids: Sequence[int], epoch: int = 0, repeats: Sequence[int] | None = None, size: tuple[int, int] = (4, 6)
    ) -> dict[str, Any]:
        def normals(name: str, *shape: int) -> torch.Tensor:
            rows = [torch.from_numpy(stream(0, f"test-{name}", 0, 0, i).standard_normal(shape)).float() for i in ids]
            return torch.stack(rows)

        return {
            "sample_id": torch.tensor(list(ids)),
            "epoch": torch.full((len(ids),), epoch),
            "repeat": torch.tensor(list(repeats or [0] * len(ids))),
            "moments": normals("moments", 32, *size).half(),
            "mask": None,
            **{name: normals(name, *shape).bfloat16() for name, shape in SHAPES.items()},
        }

    return make


@pytest.fixture
def real_batch(batch: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Make the same for a cache of real tokens: each sample has its own lengths, and zeros follow its rows."""

    def make(ids: Sequence[int], **keys: Any) -> dict[str, Any]:
        features = batch(ids, **keys)
        for name, (most, _) in list(SHAPES.items())[:3]:
            lengths = torch.tensor([1 + (7 * i + (name == "t5")) % most for i in ids])
            features[f"{name}.length"] = lengths
            features[name] = features[name] * (torch.arange(most) < lengths[:, None])[..., None]
            features[name] = features[name][:, : int(lengths.max())]  # as long as the longest sample, as in caches
        return features

    return make
