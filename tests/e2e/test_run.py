"""One run from the cache to images: its log, files and exports, compared with stock diffusers."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from PIL import Image
from safetensors.torch import load_file

from sd3_light.config import load_config
from sd3_light.config.faults import UserError
from sd3_light.evaluate import against
from sd3_light.evaluate import verb as evaluate
from sd3_light.evaluate.against import AgainstOptions
from sd3_light.evaluate.composition import ScoreOptions
from sd3_light.export import init
from sd3_light.export import verb as export
from sd3_light.export.chosen import choose_model
from sd3_light.families.sd3.positions import position_table
from sd3_light.flow.objective import BAND_NAMES
from sd3_light.report import verb as report
from sd3_light.report.inspect import verb as inspect
from sd3_light.sample import verb as sample
from sd3_light.sample.image_requests import PromptRow
from sd3_light.train.verb import Resume
from tests.checkpoints import read_checkpoint
from tests.e2e.conftest import PROMPT, SECRET
from tests.judge_folders import write_clip
from tests.project import Project

WEIGHTS = Path("transformer", "diffusion_pytorch_model.safetensors")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / WEIGHTS)


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(two) and all(torch.equal(one[name], two[name]) for name in one)


def test_steps_evaluations_and_grids_are_logged_with_their_numbers(finished: Project) -> None:
    steps = finished.events("step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert [event["samples"] for event in steps] == [4, 8, 12, 16]
    for event in steps:
        assert math.isfinite(event["loss"])
        assert event["loss"] > 0
        assert event["grad_norm"] > 0
        assert event["lr"] == 1e-3
        assert event["samples_per_second"] > 0
        assert 0 <= event["data_wait"] <= 1
        assert event["steps"] == 1
        assert event["param_norm"] > 1
        assert event["tflops_per_gpu"] > 0
        assert event["host_memory_gib"] > 0.1
        assert event["epoch"] == pytest.approx(event["step"] / 11)
        assert event["ema_decay"] == {"ema": event["step"] / (event["step"] + 9)}
        assert event["band"]
        assert set(event["band"]) <= set(BAND_NAMES)
    assert finished.events("start")[0]["world"] == 1
    events = finished.events("eval")
    assert [(event["step"], event["weights"]) for event in events] == [
        (step, weights) for step in (0, 2, 4) for weights in ("raw", "ema")
    ]
    assert events[0]["flow"] == events[1]["flow"], "before the first step the EMA equals the weights"
    assert events[4]["flow"] != events[5]["flow"]
    for event in events:
        assert event["set"] == "held_out"
        curves = [event[f"flow@{quantile}"] for quantile in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)]
        assert all(math.isfinite(value) and value > 0 for value in curves)
        assert event["flow"] == pytest.approx(sum(curves) / 9)
    files = [event["file"] for event in finished.events("sample")]
    assert files == ["samples/step-00000002.png", "samples/step-00000004.png"]
    for file in files:
        grid = Image.open(finished.run / file)
        assert grid.width > 2 * 48
        assert len(np.unique(np.asarray(grid.convert("L")))) > 10


def test_the_run_folder_has_the_documented_contents_and_is_read(finished: Project) -> None:
    assert sorted(path.name for path in finished.run.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.toml",
        "exports",
        "log.jsonl",
        "samples",
        "tensorboard",
    ]
    assert sorted(path.name for path in (finished.run / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    assert [path.name for path in (finished.run / "exports").iterdir()] == ["step-00000004"]
    original, resolved = finished.load().train, load_config(finished.run / "config.toml").train
    # the step of the position table is written down, so that the size's default can change
    assert resolved.model == original.model.model_copy(update={"position_step": 1.0})
    assert resolved.optimizer == original.optimizer
    assert resolved.eval_datasets == original.eval_datasets
    assert SECRET in finished.train_toml.read_text()
    files = [path for path in finished.run.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    summary = report.run(finished.run)
    assert summary.step_range == [0, 4], "starting with the evaluation before the first step"
    assert set(summary.last) >= {"start", "step", "eval", "sample", "checkpoint", "export"}
    assert report.render(summary).row_count > 5
    cache = inspect.run(finished.cache)
    assert cache.counts["used"] == 40
    assert cache.buckets == {"64x64": 20, "80x48": 10, "48x80": 10}


def test_the_export_has_the_ema_weights(finished: Project, export_folder: Path) -> None:
    tensors, facts = read_checkpoint(finished.run / "checkpoints" / "step-00000004")
    assert facts["progress"] == {"step": 4, "samples": 16, "skipped": 0, "position": 4}
    saved = weights_of(export_folder)
    average = {name.removeprefix("ema/"): tensor for name, tensor in tensors.items() if name.startswith("ema/")}
    assert all(torch.equal(saved[name], tensor) for name, tensor in average.items())
    assert set(saved) - set(average) == {"pos_embed.pos_embed"}, "every weight trains; the position table is a buffer"
    assert not torch.equal(saved["proj_out.weight"], tensors["param/proj_out.weight"])
    assert (export_folder / "proof.json").is_file()


def test_checkpoints_are_exported_again(finished: Project, export_folder: Path, tmp_path: Path, unproven: None) -> None:
    export.run(finished.run, tmp_path / "again")
    assert equal(weights_of(tmp_path / "again"), weights_of(export_folder))
    for name in ("model_index.json", "sd3_light.json", "README.md", "scheduler/scheduler_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (export_folder / name).read_bytes(), name
    export.run(finished.run, tmp_path / "raw", finished.run / "checkpoints" / "step-00000002", "raw")
    tensors, _ = read_checkpoint(finished.run / "checkpoints" / "step-00000002")
    saved = weights_of(tmp_path / "raw")
    assert torch.equal(saved["proj_out.weight"], tensors["param/proj_out.weight"])
    facts = json.loads((tmp_path / "raw" / "sd3_light.json").read_text())
    assert (facts["weights"], facts["step"]) == ("raw", 2)
    (tmp_path / "existing").mkdir()
    with pytest.raises(UserError, match="already exists; choose another name"):
        export.run(finished.run, tmp_path / "existing")
    assert list((tmp_path / "existing").iterdir()) == []
    (tmp_path / "run").mkdir()
    shutil.copy(finished.run / "config.toml", tmp_path / "run")
    with pytest.raises(UserError, match="has no checkpoint to export yet"):
        export.run(tmp_path / "run", tmp_path / "out")


def test_an_export_draws_at_the_size_and_with_the_positions_it_was_trained_with(
    project: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Proven with stock diffusers; a resumed run and a later export of its checkpoint keep both."""
    project.data('resolutions = [48]\n[[directory]]\npath = "images"\n')
    sampling = ('sampling.prompts=["a star"]', "sampling.every_n_steps=2", "sampling.steps=2")
    project.train("max_steps=1", "model.position_step=1.0", "checkpoint_every_n_steps=1")
    project.train("max_steps=2", "model.position_step=0.5", *sampling, resume=Resume())
    assert "using the checkpoint's model.position_step = 1" in capfd.readouterr().err
    exports = [project.run / "exports" / f"step-0000000{step}" for step in (1, 2)]
    exports.append(export.run(project.run, tmp_path / "again"))
    table = position_table(128, 16, 1.0)
    for folder in exports:
        assert json.loads((folder / "transformer" / "config.json").read_text())["sample_size"] == 6
        assert torch.equal(weights_of(folder)["pos_embed.pos_embed"], table)
        stock = SD3Transformer2DModel.from_pretrained(folder / "transformer")
        assert torch.equal(stock.pos_embed.pos_embed, table)
    sample.run(exports[-1], [PromptRow("a star")], [0], tmp_path / "images", sample.SampleOptions(steps=2, grid=False))
    with Image.open(tmp_path / "images" / "00000.png") as image:
        assert image.size == (48, 48)
    with Image.open(project.run / "samples" / "step-00000002.png") as grid:
        assert json.loads(grid.text["size"]) == [48, 48]  # type: ignore[attr-defined]


def test_shapes_train_and_branches_cool(project: Project, unproven: None, capfd: pytest.CaptureFixture[str]) -> None:
    """A run of any shape, then a branch off its checkpoint whose last two steps decay, with a shift by tokens."""
    project.train_toml.write_text(project.train_toml.read_text().replace('size = "tiny2"\n', ""))
    shape = ("model.shape={num_layers=1, num_heads=3, head_dim=32}", "model.sqrt_shift=true")
    project.train("max_steps=2", "checkpoint_every_n_steps=1", *shape, "model.shape.position_step=0.5")
    keys = ('output_dir="branch"', "max_steps=4", "cooldown_steps=3")
    project.train(*keys, *shape, resume=Resume(project.run / "checkpoints" / "step-00000001"))
    (changes,) = [line for line in capfd.readouterr().err.splitlines() if "the config has changed" in line]
    assert "position_step" not in changes, "a run keeps its table"
    rates = [event["lr"] for event in project.events("step", "branch")]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    config = json.loads((project.folder / "branch/exports/step-00000004/transformer/config.json").read_text())
    shown = ("num_layers", "num_attention_heads", "attention_head_dim", "joint_attention_dim", "in_channels")
    assert [config[key] for key in shown] == [1, 3, 32, 256, 16]
    table = weights_of(project.folder / "branch/exports/step-00000004")["pos_embed.pos_embed"]
    assert torch.equal(table, position_table(96, 192, 0.5))
    scheduler = project.folder / "branch/exports/step-00000004/scheduler/scheduler_config.json"
    assert json.loads(scheduler.read_text())["shift"] == 0.25, "of 16 tokens"
    model = load_config(project.folder / "branch/config.toml").train.model
    assert (model.shape.num_heads, model.position_step) == (3, 0.5)


@pytest.mark.parametrize("guidance", [3.0, 1.0])
def test_a_sample_equals_the_stock_pipelines_image(export_folder: Path, tmp_path: Path, guidance: float) -> None:
    seed, steps = 11, 3
    sample.run(export_folder, [PromptRow(PROMPT)], [seed], tmp_path, sample.SampleOptions(steps, guidance))
    pipe = StableDiffusion3Pipeline.from_pretrained(export_folder, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    stock = pipe(
        PROMPT,
        generator=torch.Generator("cpu").manual_seed(seed),
        max_sequence_length=16,
        num_inference_steps=steps,
        guidance_scale=guidance,
    ).images[0]
    ours = Image.open(tmp_path / "00000.png")
    assert ours.size == (64, 64)
    assert np.array_equal(np.asarray(ours), np.asarray(stock))
    facts = json.loads(ours.text["sd3_light"])
    assert (facts["prompt"], facts["seed"]) == (PROMPT, seed)
    rows, out = [PromptRow(PROMPT), PromptRow("两个绿色的星星")], tmp_path / "several"
    assert sample.run(export_folder, rows, [1, 2], out, sample.SampleOptions(1, guidance, 80, 48)) == out / "grid.png"
    images = [np.asarray(Image.open(out / f"{number:05d}.png")) for number in range(4)]
    assert all(image.shape == (48, 80, 3) for image in images)
    assert not np.array_equal(images[0], images[1]), "the seed matters"
    assert not np.array_equal(images[0], images[2]), "the text matters"
    assert len(list(out.iterdir())) == 5


def test_a_model_is_measured_against_true_images(export_folder: Path, tmp_path: Path, finished: Project) -> None:
    result = evaluate.run(export_folder, 3, options=ScoreOptions(1, 1.0), out=tmp_path / "score.json")
    assert json.loads((tmp_path / "score.json").read_text()) == json.loads(json.dumps(result.as_dict()))
    options, page = AgainstOptions(steps=1, guidance=1.0, batch=2), tmp_path / "page.html"
    measured = against.run([finished.run], finished.folder / "eval.toml", write_clip(tmp_path), options, page=page)
    scores = measured.scores[str(finished.run)]
    assert scores.count == 8
    assert all(estimate is not None for estimate in scores.estimates.values())
    drawn = against.draw(choose_model(export_folder), measured.truths[:2], torch.device("cpu"), options)
    assert all(np.array_equal(measured.images[str(finished.run)][row], drawn[row]) for row in range(2))


def test_init_writes_initial_weights_once_and_a_run_starts_from_them(project: Project, unproven: None) -> None:
    """A `diffusers_path` written by `sd3-light init` is recognised by its marker, and its denoiser is used."""
    start = project.folder / "start"
    init.run(project.load(), start)
    first = weights_of(start)
    with pytest.raises(UserError, match=r"start already exists; choose another name"):
        init.run(project.load("seed=9"), start)
    assert equal(weights_of(start), first)
    init.run(project.load(), project.folder / "again")
    assert equal(weights_of(project.folder / "again"), first), "initial weights depend on size and seed only"
    init.run(project.load("seed=9"), project.folder / "other")
    assert not equal(weights_of(project.folder / "other"), first)
    project.train("max_steps=2")
    text = project.train_toml.read_text().replace('init = "random"\n', "").replace(str(project.model), "start")
    project.train_toml.write_text(text)
    project.train("max_steps=2", 'output_dir="from_folder"')
    assert project.losses("from_folder") == project.losses()


def test_an_export_is_fine_tuned_but_for_frozen_weights(project: Project, export_folder: Path, unproven: None) -> None:
    """Without `train_type` the denoiser of `diffusers_path` is fine-tuned. Frozen weights are part of the export."""
    text = project.train_toml.read_text().replace('train_type = "sd3_light_pretrain"\n', "")
    text = text.replace('init = "random"\nsize = "tiny2"\n', "").replace(str(project.model), str(export_folder))
    project.train_toml.write_text(text)
    project.train(
        "max_steps=1", "optimizer.lr=1e-6", "ema.enable=false", 'freeze=["transformer_blocks.[0].*", "*embed*"]'
    )
    before, after = weights_of(export_folder), weights_of(project.run / "exports" / "step-00000001")
    assert all(torch.allclose(before[name], after[name], atol=1e-5) for name in before)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"proj_out.weight", "norm_out.linear.weight"} <= changed
    assert all(name.startswith(("transformer_blocks.1.", "norm_out.", "proj_out.")) for name in changed)


def test_frozen_weights_stay_and_the_others_change(project: Project, unproven: None) -> None:
    init.run(project.load(), project.folder / "start")
    before = weights_of(project.folder / "start")
    freeze = 'freeze=["transformer_blocks.0.*", "context_embedder.*"]'
    project.train("max_steps=2", freeze)
    after = weights_of(project.run / "exports" / "step-00000002")
    frozen = {name for name in before if name.startswith(("transformer_blocks.0.", "context_embedder."))}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not moved & frozen
    assert {"proj_out.weight", "norm_out.linear.weight"} <= moved
    tensors, _ = read_checkpoint(project.run / "checkpoints" / "step-00000002")
    assert not any(frozen & {name.split("/", 1)[1]} for name in tensors), "a checkpoint has only trained weights"
    export.run(project.run, project.folder / "out")
    assert equal(weights_of(project.folder / "out"), after), "frozen weights come from the initial weights"
    project.train("max_steps=3", freeze, resume=Resume())
    assert sorted(project.losses()) == [1, 2, 3]


def test_other_losses_train_and_a_pattern_that_freezes_nothing_is_rejected(project: Project, unproven: None) -> None:
    project.train("model.text_recon_gamma=0.25", "model.text_recon_target_layer=0")
    for event in project.events("step"):
        assert event["text_recon"] >= 0
        assert event["loss"] == pytest.approx(event["flow"] + 0.25 * event["text_recon"], rel=1e-5)
    assert project.events("step")[-1]["text_recon"] > 0
    project.train("max_steps=1", 'output_dir="mse"')
    project.train("max_steps=1", 'output_dir="huber"', "pseudo_huber_c=0.1")
    squared, huber = project.losses("mse")[1], project.losses("huber")[1]
    assert 0 < huber < squared
    assert math.isfinite(huber)
    with pytest.raises(UserError, match=r"freeze: 'blocks\.\*' matches no parameter; names look like 'transformer_"):
        project.train('freeze=["blocks.*"]', 'output_dir="other"')


def test_epochs_end_a_run_and_only_the_newest_checkpoints_are_kept(project: Project, unproven: None) -> None:
    text = project.train_toml.read_text().replace("max_steps = 4\n", "epochs = 1\n")
    project.train_toml.write_text(text)
    done = project.train("checkpoint_every_n_steps=4", "keep_last_n_checkpoints=2", "save_every_n_epochs=1")
    assert (done.step, done.samples) == (11, 44)
    kept = sorted(path.name for path in (project.run / "checkpoints").iterdir())
    assert kept == ["step-00000008", "step-00000011"]
