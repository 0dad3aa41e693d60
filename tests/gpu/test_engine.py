"""A training step on a GPU does not synchronize until its numbers are read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.checkpoint.background import CheckpointKeeper, CheckpointSaved
from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.config import SIZES, EmaConfig, TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.optim.ema import Averages

MODEL = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "tiny2"}


@pytest.fixture
def engine(tmp_path: Path) -> TorchEngine:
    keys: dict[str, Any] = {"output_dir": "out", "dataset": "data.toml", "max_steps": 10, "model": MODEL}
    config = TrainConfig.model_validate({**keys, "ema": {"enable": True}}, context={"base": tmp_path})
    transformer = new_transformer(SIZES["tiny2"].transformer_config(), 0)
    return TorchEngine(SD3TrainingModule(transformer, config), config, Launch(), torch.device("cuda", 0))


def batch(seed: int, poison: float = 0.0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 16, 8, 8), (4,), (4, 12, 256), (4, 224), (4, 16, 8, 8)]
    noisy, times, prompt, pooled, target = (torch.randn(shape, generator=generator) for shape in shapes)
    values = {"noisy": noisy, "t": times.sigmoid(), "prompt": prompt, "pooled": pooled, "target": target + poison}
    return Batch(4, values)


def test_a_step_never_synchronizes(engine: TorchEngine) -> None:
    averages = Averages(engine.weights, EmaConfig(enable=True))
    engine.train_step([batch(0), batch(1)], 1e-3).read()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = []
        for step in range(3):
            results.append(engine.train_step([batch(step), batch(step + 9)], 1e-3))
            averages.update(engine.weights, 100)
            _ = results[-1].ready
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert all(result.read().taken for result in results)


def test_a_non_finite_step_is_skipped_on_the_device(engine: TorchEngine) -> None:
    engine.train_step([batch(0)], 1e-3)
    before = {piece.name: piece.values.clone() for piece in engine.pieces()}
    result = engine.train_step([batch(1, poison=float("nan"))], 1e-3).read()
    assert not result.taken
    assert [piece.name for piece in engine.pieces() if not torch.equal(piece.values, before[piece.name])] == []


def test_memory_is_reserved_and_the_save_captures_its_moment(engine: TorchEngine, tmp_path: Path) -> None:
    keeper = CheckpointKeeper(tmp_path / "checkpoints", 0)
    keeper.prepare(engine.pieces())
    engine.train_step([batch(0)], 1e-3)
    expected = {piece.name: piece.values.cpu() for piece in engine.pieces()}
    keeper.save(1, engine.pieces(), {})
    engine.train_step([batch(1)], 1e-3)
    (saved,) = keeper.wait()
    assert isinstance(saved, CheckpointSaved)
    checkpoint = open_checkpoint(saved.path)
    assert [name for name in expected if not torch.equal(checkpoint.tensor(name).flatten(), expected[name])] == []
    keeper.close()
