"""Two processes under torchrun (gloo) build the cache and train like one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sd3_light.checkpoint.reading import open_checkpoint
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.evaluate import verb as evaluate
from sd3_light.train.verb import Resume
from sd3_light.world import write_dataset
from tests.distributed.layouts import FSDP2, Job, launch
from tests.judge_folders import write_vision
from tests.project import Project
from tests.warm import REAL_PYTHON

ROOT = Path(__file__).parents[2]
STEPS = 13  # an epoch has 11 steps


def torchrun(project: Project, *flags: str, processes: int = 2, **overrides: object) -> str:
    """Run `torchrun --nproc_per_node 2 train.py --config ... FLAGS` and return its stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(ROOT / "train.py"), "--config", str(project.train_toml), *flags]
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    # on a machine with one GPU two processes would share it, which NCCL does not support
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stderr


def shards(project: Project) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (project.cache / "shards").glob("*.safetensors")}


def checkpoint(project: Project, step: int, run: str) -> Path:
    return Path(project.folder / run / "checkpoints" / checkpoint_name(step))


def curve(project: Project, run: str, first: int = 0) -> list[float]:
    """Return loss and gradient norm of every step after ``first``."""
    events = [event for event in project.events("step", run) if event["step"] > first]
    assert [event["step"] for event in events] == list(range(first + 1, STEPS + 1))
    return [number for event in events for number in (event["loss"], event["grad_norm"])]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """The reference: one process, batches of 4, an evaluation set, a checkpoint at step 5."""
    project = cached_project.copy(tmp_path_factory.mktemp("alone") / "project")
    write_dataset(project.folder / "held_out", 8, seed=2, held_out=True)
    (project.folder / "eval.toml").write_text('resolutions = [64]\n[[directory]]\npath = "held_out"\n')
    text = project.train_toml.read_text().replace("max_steps = 4", f"max_steps = {STEPS}")
    text = text.replace("checkpoint_every_n_steps = 2", "checkpoint_every_n_steps = 5\neval_every_n_steps = 10")
    project.train_toml.write_text(text.replace("seed = 3", 'seed = 3\neval_datasets = ["eval.toml"]'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
        project.train('output_dir="alone"')
    return project


@pytest.mark.slow  # test_cache_builders.py builds with three ranks
def test_two_processes_cache_the_same_bytes(fresh_project: Project, cached_project: Project) -> None:
    """Each takes units that the other has not, without communication."""
    output = torchrun(fresh_project, "--cache_only")
    assert shards(fresh_project) == shards(cached_project)
    assert "cache 40/40" in output, "the main process counts the work of all"


@pytest.mark.slow  # caching does not depend on the launcher
def test_the_deepspeed_launcher_caches_the_same_bytes(fresh_project: Project, cached_project: Project) -> None:
    """The documented command: `deepspeed --num_gpus=2 train.py --deepspeed --config X --cache_only`."""
    pytest.importorskip("deepspeed")
    command = [str(Path(REAL_PYTHON).parent / "deepspeed"), "--num_gpus=2", "--master_port=29531"]
    command += [str(ROOT / "train.py"), "--deepspeed", "--config", str(fresh_project.train_toml), "--cache_only"]
    environment = {**os.environ, "PATH": f"{Path(REAL_PYTHON).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "dist_world_size=2" in done.stdout + done.stderr
    assert shards(fresh_project) == shards(cached_project)


@pytest.mark.slow  # test_layouts.py covers it too, in fewer launches
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_processes_train_like_one(alone: Project, parallel: str) -> None:
    """Loss curve, evaluation and checkpoint; padding of the last evaluation batch has no weight."""
    torchrun(alone, output_dir=f'"{parallel}"', micro_batch_size_per_gpu=2, parallel=f'"{parallel}"')
    (start,) = alone.events("start", parallel)
    assert (start["world"], start["engine"]) == (2, f"torch {parallel}")
    assert curve(alone, parallel) == pytest.approx(curve(alone, "alone"), rel=1e-5)
    ours, theirs = alone.events("eval", parallel), alone.events("eval", "alone")
    assert [event["weights"] for event in ours] == [event["weights"] for event in theirs] == ["raw", "ema"]
    for event, other in zip(ours, theirs, strict=True):
        for name in ("flow", "flow@0.1", "flow@0.9"):
            assert event[name] == pytest.approx(other[name], rel=1e-5), name
    actual, expected = (open_checkpoint(checkpoint(alone, STEPS, run)) for run in (parallel, "alone"))
    assert len(list(actual.path.glob("rank-*.safetensors"))) == 2, "both processes wrote a part"
    assert actual.facts["progress"] == expected.facts["progress"]
    assert actual.shapes == expected.shapes
    for name in actual.shapes:
        if name.startswith(("param/", "ema/")):
            assert torch.allclose(actual.tensor(name), expected.tensor(name), atol=2e-5), name
    assert [path.name for path in (alone.folder / parallel / "exports").iterdir()] == [f"step-{STEPS:08d}"]


# --- all losses --------------------------------------------------------------------------------

LOSSES = {"model.text_recon_gamma": 0.25, "model.text_recon_target_layer": 0, "pseudo_huber_c": 0.1}


@pytest.fixture(scope="module")
def every_loss(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Project:
    """The reference: one process, batches of 4, text reconstruction, pseudo-Huber, and masks of different widths for
    every other image, so that samples of a batch weigh their pixels differently."""
    project = raw_project.copy(tmp_path_factory.mktemp("losses") / "project")
    (project.folder / "masks").mkdir()
    for number, path in enumerate(sorted(project.images.glob("*.png"))[::2]):
        with Image.open(path) as image:
            mask = Image.new("L", image.size, 0)
        mask.paste(255, (0, 0, 16 + 4 * (number % 8), mask.height))
        mask.save(project.folder / "masks" / path.name)
    project.data(project.data_toml.read_text() + 'mask_path = "masks"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
        project.train('output_dir="alone"', *(f"{key}={value}" for key, value in LOSSES.items()))
        project.train('output_dir="plain"')
    return project


def parts(project: Project, run: str) -> list[float]:
    """Return all losses and the gradient norm of every step."""
    keys = ("loss", "flow", "text_recon", "grad_norm")
    return [event[key] for event in project.events("step", run) for key in keys]


@pytest.mark.slow  # test_layouts.py has a reference with every loss
def test_every_loss_contributes(every_loss: Project) -> None:
    events = every_loss.events("step", "alone")
    assert len(events) == 4
    for event, plain in zip(events, every_loss.events("step", "plain"), strict=True):
        assert event["loss"] == pytest.approx(event["flow"] + 0.25 * event["text_recon"], rel=1e-5)
        assert event["flow"] < 0.9 * plain["flow"], "far from zero pseudo-Huber grows slower than the square"
    assert events[-1]["text_recon"] > events[0]["text_recon"] == 0, "initially the blocks do not change the text"


@pytest.mark.slow  # test_layouts.py accumulates 2 and 4 micro-batches
def test_accumulation_does_not_change_any_loss(every_loss: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
    shares = {**LOSSES, "micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    every_loss.train('output_dir="accumulated"', *(f"{key}={value}" for key, value in shares.items()))
    # losses are around 1; the text loss starts at 1e-7, at the level of rounding
    assert parts(every_loss, "accumulated") == pytest.approx(parts(every_loss, "alone"), rel=1e-5, abs=1e-11)


@pytest.mark.slow  # test_layouts.py covers it too, in fewer launches
@pytest.mark.parametrize(("parallel", "accumulation"), [("ddp", 1), ("fsdp2", 2)])
def test_two_processes_compute_the_same_losses(every_loss: Project, parallel: str, accumulation: int) -> None:
    shares = {"micro_batch_size_per_gpu": 2 // accumulation, "gradient_accumulation_steps": accumulation}
    torchrun(every_loss, output_dir=f'"{parallel}"', parallel=f'"{parallel}"', **LOSSES, **shares)
    assert parts(every_loss, parallel) == pytest.approx(parts(every_loss, "alone"), rel=1e-5, abs=1e-11)


# --- resuming and exporting --------------------------------------------------------------------


@pytest.mark.slow  # test_layouts.py covers it too, in fewer launches
def test_a_checkpoint_belongs_to_the_run_not_to_the_layout(
    alone: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sharded, accumulating processes resume one process's checkpoint, and one process resumes theirs."""
    torchrun(
        alone,
        "--resume_from_checkpoint",
        str(checkpoint(alone, 5, "alone")),
        output_dir='"halves"',
        micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=2,
        parallel='"fsdp2"',
    )
    (event,) = alone.events("resume", "halves")
    assert (event["world"], event["step"]) == (2, 5)
    assert curve(alone, "halves", 5) == pytest.approx(curve(alone, "alone", 5), rel=1e-5)
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
    alone.train('output_dir="back"', resume=Resume(checkpoint(alone, 10, "halves")))
    assert curve(alone, "back", 10) == pytest.approx(curve(alone, "alone", 10), rel=1e-5)


@pytest.mark.slow
def test_sharded_weights_evaluate_and_sample_like_full_ones(
    fresh_project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that reads sharded weights: two kinds of averages, evaluation, samples, metrics, snapshots."""
    project = fresh_project
    write_dataset(project.folder / "held_out", 6, seed=2, held_out=True)
    (project.folder / "eval.toml").write_text('resolutions = [64]\n[[directory]]\npath = "held_out"\n')
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
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "sd3_light"]
    command += ["evaluate", str(model), "--config", str(alone.train_toml), "--out", str(alone.folder / "loss.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
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
