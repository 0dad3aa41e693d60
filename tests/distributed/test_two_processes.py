"""Two processes under torchrun (gloo) build the cache and train like one."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.evaluate import verb as evaluate
from tests.distributed.layouts import FSDP2, Job, launch, run_ranks
from tests.judge_folders import write_vision
from tests.project import Project

ROOT = Path(__file__).parents[2]
STEPS = 13  # an epoch has 11 steps


def torchrun(project: Project, *flags: str, processes: int = 2, **overrides: object) -> str:
    """Run `torchrun --nproc_per_node 2 train.py --config ... FLAGS` and return its stderr."""
    settings = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    return run_ranks(processes, ROOT / "train.py", "--config", project.train_toml, *flags, *settings).stderr


def checkpoint(project: Project, step: int, run: str) -> Path:
    return Path(project.folder / run / "checkpoints" / checkpoint_name(step))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """The reference: one process, batches of 4, an evaluation set, a checkpoint at step 5."""
    project = cached_project.copy(tmp_path_factory.mktemp("alone") / "project")
    project.hold_out(8)
    text = project.train_toml.read_text().replace("max_steps = 4", f"max_steps = {STEPS}")
    text = text.replace("checkpoint_every_n_steps = 2", "checkpoint_every_n_steps = 5\neval_every_n_steps = 10")
    project.train_toml.write_text(text.replace("seed = 3", 'seed = 3\neval_datasets = ["eval.toml"]'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
        project.train('output_dir="alone"')
    return project


@pytest.mark.slow
def test_sharded_weights_evaluate_and_sample_like_full_ones(
    fresh_project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that reads sharded weights: two kinds of averages, evaluation, samples, metrics, snapshots."""
    project = fresh_project
    project.hold_out(6)
    evaluation = 'eval_datasets = ["eval.toml"]\neval_every_n_steps = 2\neval_micro_batch_size_per_gpu = 4'
    text = project.train_toml.read_text().replace("seed = 3", f"seed = 3\n{evaluation}")
    text += '[[ema.track]]\nname = "wide"\npower_width = 0.1\nupdate_every = 1\n'
    text += '[sampling]\nprompts = ["a red circle", "a blue square", "a green star"]\nevery_n_steps = 3\nsteps = 2\n'
    text += f'[metrics]\ndataset = "data.toml"\nfeatures = "{write_vision(project.folder / "judge")}"\n'
    text += "every_n_steps = 9\nimages = 9\nsteps = 1\n"
    project.train_toml.write_text(text.replace("t5_max_length = 16", 't5_max_length = 16\ntext_tokens = "real"'))
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
    project.train('output_dir="full"')
    keys = ("micro_batch_size_per_gpu=2",)  # the next test proves exports of sharded weights
    launch([Job(str(project.train_toml), "sharded", FSDP2.accumulating(1), keys)], tmp_path)
    assert curve_of(project, "sharded") == pytest.approx(curve_of(project, "full"), rel=1e-5)
    names = ("raw", "ema", "wide")
    ours, theirs = project.events("eval", "sharded"), project.events("eval", "full")
    assert [event["weights"] for event in ours] == [*names, *names]
    assert [event["flow"] for event in ours] == pytest.approx([event["flow"] for event in theirs], rel=1e-5)
    assert len({event["flow"] for event in theirs}) == 6
    samples = project.events("sample", "sharded")
    assert [event["step"] for event in samples] == [3, 4]
    for event in samples:
        grids = [np.asarray(Image.open(project.folder / run / event["file"]), dtype=int) for run in ("sharded", "full")]
        assert np.abs(grids[0] - grids[1]).max() <= 1
    measured = [project.events("metrics", run)[-1] for run in ("sharded", "full")]
    for metric in ("kid", "distance", "frechet"):
        assert measured[0][metric] == pytest.approx(measured[1][metric], rel=0.02, abs=1e-4), metric
    assert (project.folder / "sharded" / "exports" / "best").resolve().name == checkpoint_name(4)
    last = [open_checkpoint(project.folder / run / "ema" / checkpoint_name(4)) for run in ("sharded", "full")]
    assert last[0].facts == last[1].facts
    for name in last[1].shapes:
        assert torch.allclose(*(saved.tensor(name).float() for saved in last), atol=1e-3), name


def curve_of(project: Project, run: str) -> list[float]:
    return [event["loss"] for event in project.events("step", run)]


def test_sharded_weights_are_exported_during_training(project: Project) -> None:
    """Every step exports from a thread without changing the trained module; frozen weights are exported in full."""
    torchrun(
        project,
        parallel='"fsdp2"',
        micro_batch_size_per_gpu=2,
        save_every_n_steps=1,
        max_steps=2,
        freeze='["context_embedder.*"]',
    )
    exports = sorted((project.run / "exports").iterdir())
    assert [path.name for path in exports] == [checkpoint_name(step) for step in (1, 2)]
    weights = [load_file(path / "transformer" / "diffusion_pytorch_model.safetensors") for path in exports]
    assert len({weight["proj_out.weight"].sum().item() for weight in weights}) == 2
    assert torch.equal(weights[0]["context_embedder.weight"], weights[1]["context_embedder.weight"])


@pytest.mark.slow  # test_layouts.py evaluates in every layout
def test_two_processes_evaluate_like_one(alone: Project) -> None:
    """`sd3-light evaluate MODEL --config` under torchrun: one table, one file."""
    model = alone.folder / "alone" / "exports" / checkpoint_name(STEPS)
    command = ["-m", "sd3_light", "evaluate", model, "--config", alone.train_toml, "--out", alone.folder / "loss.json"]
    done = run_ranks(2, *command)
    assert done.stdout.count("flow@0.9") == 1
    losses = json.loads((alone.folder / "loss.json").read_text())["eval"]
    assert set(losses) == {"flow", *(f"flow@0.{n}" for n in range(1, 10))}
    assert losses == pytest.approx(evaluate.validation_losses(alone.load(), model)["eval"], rel=1e-5)


def test_two_processes_divide_and_train_like_one(fresh_project: Project) -> None:
    """Both hold out the same images, and the training order follows from the others alone."""
    text = fresh_project.data_toml.read_text(encoding="utf-8")
    fresh_project.data(text.replace("[[directory]]", "validation = true\n\n[[directory]]"))
    keys = {"max_steps": 4, "eval_every_n_steps": 4, "save_every_n_steps": 100}
    output = torchrun(fresh_project, output_dir='"two"', micro_batch_size_per_gpu=2, **keys)
    assert output.count("2 of 40 images are held out; they are never trained on") == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
        options = [f"{key}={value}" for key, value in keys.items()]
        fresh_project.train('output_dir="one"', "micro_batch_size_per_gpu=4", *options)
    one, two = (fresh_project.losses(run) for run in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-4)
    for first, second in zip(*(fresh_project.events("eval", run) for run in ("one", "two")), strict=True):
        assert first["set"] == second["set"] == "validation"
        assert first["flow"] == pytest.approx(second["flow"], rel=1e-4)
