"""Weights in bfloat16 and released gradients on a GPU: the same steps, with less memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.config import SIZES, TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.core.compiling import compile_blocks
from sd3_light.engines import Launch
from sd3_light.engines.protocol import StepNumbers
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.optim import units

CUDA = torch.device("cuda", 0)
MODEL = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "tiny2"}


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units.split_into_units, "__defaults__", (2**17,))


def make(folder: Path, narrow: bool, release: bool, compiled: bool = False) -> TorchEngine:
    optimizer = {"type": "adamw8bit", "weight_dtype": "bfloat16" if narrow else "float32"}
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 10, "model": MODEL, "optimizer": optimizer}
    keys: dict[str, Any] = {"gradient_clipping": 0.0, "gradient_release": release}
    config = TrainConfig.model_validate({**table, **keys}, context={"base": folder})
    transformer = new_transformer(SIZES["tiny2"].transformer_config(), 0)
    for parameter in transformer.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        parameter.data = parameter.data.bfloat16() if narrow and parameter.dim() > 1 else parameter.data
    if compiled:
        compile_blocks(transformer)
    return TorchEngine(SD3TrainingModule(transformer, config), config, Launch(), CUDA)


def run_steps(engine: TorchEngine, count: int = 4) -> list[StepNumbers]:
    results = []
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        shapes = {"noisy": (4, 16, 8, 8), "prompt": (4, 5, 256), "pooled": (4, 224), "target": (4, 16, 8, 8)}
        values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        engine.module.begin(step)
        results.append(engine.train_step([Batch(4, {**values, "t": torch.rand(4, generator=generator)})], 1e-3).read())
    return results


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_released_gradients_take_the_same_steps(tmp_path: Path, narrow: bool, compiled: bool) -> None:
    plain = make(tmp_path, narrow, release=False, compiled=compiled)
    released = make(tmp_path, narrow, release=True, compiled=compiled)
    for one, other in zip(run_steps(plain), run_steps(released), strict=True):
        assert one.losses["loss"] == pytest.approx(other.losses["loss"], rel=1e-3)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-2)
        assert other.taken


def test_weights_in_bfloat16_follow_those_in_float32(tmp_path: Path) -> None:
    wide, narrow = make(tmp_path, narrow=False, release=True), make(tmp_path, narrow=True, release=True)
    for one, other in zip(run_steps(wide), run_steps(narrow), strict=True):
        assert one.losses["loss"] == pytest.approx(other.losses["loss"], rel=0.03)


def test_released_gradients_hold_no_memory(tmp_path: Path) -> None:
    peaks = {}
    for release in (False, True):
        engine = make(tmp_path, narrow=False, release=release)
        run_steps(engine, 1)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - sum(
            weight.grad.nbytes for weight in engine.module.trainable().values() if weight.grad is not None
        )
        run_steps(engine, 1)
        peaks[release] = torch.cuda.max_memory_allocated() - before
        del engine
    assert peaks[True] < peaks[False]
