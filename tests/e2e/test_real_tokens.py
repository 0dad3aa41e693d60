"""text_tokens = "real": cached, trained, resumed, evaluated and exported."""

import json
import math
from pathlib import Path

import pytest
import torch

from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.train.verb import Resume
from tests.checkpoints import read_checkpoint
from tests.project import Project

REAL = ('model.text_tokens="real"', "model.text_recon_gamma=0.1", "checkpoint_every_n_steps=2")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Project:
    """A project with a cache of real tokens and a run of 4 steps with its proven export."""
    project = raw_project.copy(tmp_path_factory.mktemp("real") / "project")
    evaluation = ('eval_datasets=["data.toml"]', "eval_every_n_steps=4")
    done = project.train(*REAL, *evaluation, "max_steps=4", "save_every_n_steps=4", "num_dataloader_workers=1")
    assert done.step == 4
    return project


def final_tensors(project: Project, run: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = read_checkpoint(project.folder / run / "checkpoints" / checkpoint_name(4))[0]
    return tensors


def shard_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "shards").glob("*.safetensors"))


def test_a_run_on_real_tokens_trains_and_its_export_records_that(real: Project, cached_project: Project) -> None:
    steps = real.events("step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    for event in steps:
        assert math.isfinite(event["loss"])
        assert event["loss"] == pytest.approx(event["flow"] + 0.1 * event["text_recon"], rel=1e-5)
    assert steps[-1]["text_recon"] > 0
    assert {math.isfinite(event["flow"]) for event in real.events("eval")} == {True}
    assert shard_bytes(real.cache) < 0.9 * shard_bytes(cached_project.cache)
    folder = real.run / "exports" / "step-00000004"
    assert json.loads((folder / "proof.json").read_text())["max_difference"] <= 1e-5
    assert json.loads((folder / "sd3_light.json").read_text())["text"]["text_tokens"] == "real"
    card = " ".join((folder / "README.md").read_text().split())
    assert "pads the prompt and lets every token attend to the padding" in card
    assert (folder / "pipeline.py").is_file()


def test_a_resumed_run_on_real_tokens_equals_the_uninterrupted_run(real: Project, unproven: None) -> None:
    saved = real.run / "checkpoints" / checkpoint_name(2)
    real.train(*REAL, "max_steps=4", 'output_dir="resumed"', resume=Resume(saved))
    one, two = final_tensors(real, "run"), final_tensors(real, "resumed")
    assert set(one) == set(two)
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_padding_does_not_change_training(real: Project, unproven: None) -> None:
    """With batches of one nothing is padded; with four, all but the longest are."""
    alone = ("micro_batch_size_per_gpu=1", "gradient_accumulation_steps=4", 'output_dir="alone"')
    real.train(*REAL, "max_steps=4", *alone)
    assert real.losses("alone") == pytest.approx(real.losses(), rel=1e-5)
