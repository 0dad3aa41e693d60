"""The series of exports: what is frozen is copied before training, and the newest written one always stays."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sd3_light.checkpoint.state import Progress
from sd3_light.config import SIZES, TrainConfig
from sd3_light.model.layers import new_transformer
from sd3_light.training import saver as module
from sd3_light.training.saver import Saver

MODEL = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "tiny2", "dtype": "float32"}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    found: list[dict[str, torch.Tensor]] = []

    def write_folder(out: Path, state: dict[str, torch.Tensor], spec: Any) -> Path:
        out.mkdir(parents=True)
        found.append(dict(state))
        return out

    monkeypatch.setattr(module, "write_folder", write_folder)
    return found


def config(folder: Path, **keys: Any) -> TrainConfig:
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 10, "model": MODEL, **keys}
    return TrainConfig.model_validate(table, context={"base": folder})


def test_what_does_not_train_is_as_it_was_when_the_run_began(
    tmp_path: Path, written: list[dict[str, torch.Tensor]]
) -> None:
    transformer = new_transformer(SIZES["tiny2"].transformer_config(), 0)
    transformer.context_embedder.requires_grad_(False)
    saver = Saver.of(config(tmp_path), transformer, tmp_path / "exports")
    assert set(saver.untrained) == {"pos_embed.pos_embed", "context_embedder.weight", "context_embedder.bias"}
    expected = transformer.context_embedder.weight.clone()
    with torch.no_grad():
        transformer.context_embedder.weight.zero_()  # whatever an engine does to the live module
    trained = {name: p.detach() + 1 for name, p in transformer.named_parameters() if p.requires_grad}
    saver.save_full_model("x", trained, "raw", Progress())
    assert set(written[0]) == set(transformer.state_dict())
    assert torch.equal(written[0]["context_embedder.weight"], expected)
    assert torch.equal(written[0]["proj_out.bias"], transformer.proj_out.bias + 1)


def test_the_one_just_written_stays_whatever_is_later(tmp_path: Path, written: list[dict[str, torch.Tensor]]) -> None:
    transformer = new_transformer(SIZES["tiny2"].transformer_config(), 0)
    saver = Saver.of(config(tmp_path, keep_last_n_exports=1), transformer, tmp_path / "exports")
    for step in (5, 2, 3):
        assert saver.save_model({}, "raw", Progress(step)).is_dir()
