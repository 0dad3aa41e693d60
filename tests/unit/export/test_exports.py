"""Exports of a run: frozen weights are copied before training, a name is enough, the one just written stays."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel as Denoiser

from sd3_light.checkpoint.progress import Progress
from sd3_light.config import SIZES, TrainConfig
from sd3_light.export import of_run as module
from sd3_light.export.export_spec import ExportSpec
from sd3_light.export.of_run import Saver
from sd3_light.families.sd3 import prepare as sd3
from sd3_light.families.sd3.prepare import LightSD3Pipeline
from sd3_light.families.sd3.random_weights import new_transformer
from sd3_light.runlog import RunLog

pytestmark = pytest.mark.usefixtures("one_thread")

States = list[dict[str, torch.Tensor]]
MODEL = {"diffusers_path": "folder", "train_type": "sd3_light_pretrain", "size": "tiny2", "dtype": "float32"}


@pytest.fixture
def transformer() -> Denoiser:
    return new_transformer(SIZES["tiny2"].transformer_config(), 0)


specs: list[ExportSpec] = []  # of the exports in `written`


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> States:
    states: States = []
    specs.clear()

    def write_folder(out: Path, state: dict[str, torch.Tensor], spec: Any, owned: bool = False) -> Path:
        out.mkdir(parents=True)
        states.append(dict(state))
        specs.append(spec)
        return out

    monkeypatch.setattr(module, "write_folder", write_folder)
    return states


def config(folder: Path, **keys: Any) -> TrainConfig:
    table = {"output_dir": "out", "dataset": "data.toml", "max_steps": 10, "model": MODEL, **keys}
    return TrainConfig.model_validate(table, context={"base": folder})


def test_frozen_weights_are_exported_as_at_the_start(tmp_path: Path, transformer: Denoiser, written: States) -> None:
    transformer.context_embedder.requires_grad_(False)
    saver = Saver.of(config(tmp_path), transformer, tmp_path / "exports")
    assert set(saver.untrained) == {"pos_embed.pos_embed", "context_embedder.weight", "context_embedder.bias"}
    expected = transformer.context_embedder.weight.clone()
    with torch.no_grad():
        transformer.context_embedder.weight.zero_()  # as an engine may do to the live module
    trained = {name: p.detach() + 1 for name, p in transformer.named_parameters() if p.requires_grad}
    saver.save_full_model("x", trained, "raw", Progress())
    assert set(written[0]) == set(transformer.state_dict())
    assert torch.equal(written[0]["context_embedder.weight"], expected)
    assert torch.equal(written[0]["proj_out.bias"], transformer.proj_out.bias + 1)


def test_the_last_and_the_best_export_are_kept(tmp_path: Path, transformer: Denoiser, written: States) -> None:
    """Of the exported weights, averaged over the sets; a loss that is not finite does not count."""
    saver = Saver.of(config(tmp_path, keep_last_n_exports=1), transformer, tmp_path / "run" / "exports")
    for step in (5, 2, 3):
        assert saver.save_model({}, "raw", Progress(step)).is_dir()
    saver = Saver.of(config(tmp_path, keep_last_n_exports=1), transformer, tmp_path / "exports")
    losses = {1: (0.5, 0.5), 2: (0.1, 0.7), 3: (float("nan"), 0.1), 4: (0.6, 0.6)}
    with RunLog(tmp_path, tensorboard=False) as log:
        for step, sets in losses.items():
            for name, loss in zip("ab", sets, strict=True):
                log.event("eval", step=step, set=name, weights="raw", flow=loss)
                log.event("eval", step=step, set=name, weights="ema", flow=-step)
    for step in losses:
        saver.save_model({}, "raw", Progress(step))
    names = [path.name for path in sorted((tmp_path / "exports").glob("step-*"))]
    assert names == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("save", ["save_model", "save_full_model"])
def test_a_name_is_enough_and_only_the_main_process_writes(
    tmp_path: Path, transformer: Denoiser, written: States, monkeypatch: pytest.MonkeyPatch, save: str
) -> None:
    """It saves the live weights under their stock diffusers names."""
    transformer.context_embedder.requires_grad_(False)
    saver = Saver.of(config(tmp_path), transformer, tmp_path / "exports")
    with torch.no_grad():
        transformer.proj_out.bias.add_(3)
    before = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    for rank, count in ((1, 0), (0, 1)):
        monkeypatch.setattr(module.dist, "get_rank", lambda rank=rank: rank)
        assert getattr(saver, save)("mine") == tmp_path / "exports" / "mine"
        assert len(written) == count
    assert all(torch.equal(written[0][name], tensor) for name, tensor in before.items())
    assert set(written[0]) == set(before)
    assert torch.equal(transformer.proj_out.bias, before["proj_out.bias"])


def test_the_config_is_exported_without_secrets(tmp_path: Path, transformer: Denoiser, written: States) -> None:
    monitoring = {"enable_wandb": True, "wandb_api_key": "s3cr3t"}
    settings = config(tmp_path, monitoring=monitoring, save_dtype="float16")
    Saver.of(settings, transformer, tmp_path / "exports").save_full_model("x")
    text = specs[0].files["config.toml"]
    assert "s3cr3t" not in text
    again = TrainConfig.model_validate(tomllib.loads(text), context={"base": tmp_path / "elsewhere"})
    assert again.save_dtype == "float16"
    assert again.output_dir == settings.output_dir, "paths are absolute"
    assert specs[0].save_dtype == torch.float16


def test_the_card_has_the_facts_of_the_run(tmp_path: Path, transformer: Denoiser, written: States) -> None:
    (tmp_path / "data.toml").write_text('resolutions = [64, [80, 48]]\n[[directory]]\npath = "images"\n')
    events = [(2, "raw", 0.9), (2, "ema", 0.8), (4, "ema", 0.7), (6, "ema", 0.6)]
    run = tmp_path / "my-run"
    run.mkdir()
    lines = [
        {"event": "eval", "step": step, "samples": 4, "set": "held_out", "weights": weights, "flow": flow}
        for step, weights, flow in events
    ]
    not_finite = {"b": "nan", "c": None, "d": "inf"}
    lines += [{"event": "eval", "step": 4, "set": name, "weights": "ema", "flow": not_finite[name]} for name in "bcd"]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "score.json").write_text('{"num_prompts": 96, "whole": 0.5, "relation": null, "by_kind": {"one": {}}}')
    Saver.of(config(tmp_path), transformer, run / "exports").save_full_model("x", {}, "ema", Progress(step=5))
    facts = {"name": "my-run", "data set": "data", "resolutions": "64x64, 80x48", "base model": ""}
    assert specs[0].about == {**facts, "losses": {"held_out": 0.7}, "metrics": {}, "scores": {"whole": 0.5}}


def test_save_model(tmp_path: Path, transformer: Denoiser, written: States, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LightSD3Pipeline.save_model(dir, state_dict)`."""
    monkeypatch.setattr(sd3, "write_folder", module.write_folder)
    pipeline = LightSD3Pipeline.__new__(LightSD3Pipeline)
    pipeline.model = config(tmp_path).model
    pipeline.transformer = transformer
    assert pipeline.save_model(tmp_path / "out", pipeline.transformer.state_dict()) == tmp_path / "out"
    assert specs[0].save_dtype == torch.float32
    assert specs[0].transformer_config["num_layers"] == 2
    assert set(written[0]) == set(pipeline.transformer.state_dict())
