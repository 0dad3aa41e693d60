"""`sd3-light new`: configs that `check` accepts, with sizes that fit a GPU by `check`'s own formula."""

import json
import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from PIL import Image
from typer.testing import CliRunner

from sd3_light.assets import DEMO
from sd3_light.check import verb as check
from sd3_light.cli import app, new_verb
from sd3_light.cli.new_verb import _report
from sd3_light.cli.process import run_guarded
from sd3_light.config import SIZES, AdapterConfig, ConfigFaults, TrainConfig, UserError
from sd3_light.core.caption_lengths import short_captions
from sd3_light.core.registry import family_named, with_family_values
from sd3_light.cost.amount import format_bytes
from sd3_light.cost.gpu_memory import gpu_memory
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.new import verb as new
from sd3_light.new.kinds import KINDS
from sd3_light.new.memory_choice import MemoryChoice, choose_memory
from sd3_light.new.project_text import TextValues, data_toml, train_toml
from sd3_light.new.verb import NewProject
from sd3_light.recipes import FOLDER as RECIPES
from sd3_light.system import Gpu
from tests.families import deep_compression_vae, save_pipeline
from tests.project import Project

GIB = 2**30
LISTED = "the kinds are lora, edit, finetune, reward, pretrain, icons, distill"


@pytest.fixture
def images(raw_project: Project) -> str:
    return str(raw_project.images)


def gpu(gib: float) -> tuple[Gpu, ...]:
    return (Gpu("a GPU", int(gib * GIB)),)


@pytest.mark.parametrize("kind", ["lora", "finetune", "reward", "icons", "distill"])
def test_check_accepts_what_new_writes(tmp_path: Path, images: str, kind: str) -> None:
    project = new.run(kind, images, str(DEMO), tmp_path, gpus=gpu(24))
    estimate = check.run(check.load(project.train_toml))
    assert (estimate.data.samples, estimate.total_steps) == (40, project.steps)
    assert estimate.gpu.total == project.memory.needed, "new plans with the formula of check"
    assert project.memory.fits
    train = tomllib.loads(project.train_toml.read_text(encoding="utf-8"))
    assert len(set(train["sampling"]["prompts"])) == 4
    captions = {path.read_text(encoding="utf-8") for path in Path(images).rglob("*.txt")}
    assert not captions & set(train["sampling"]["prompts"])
    assert (train["model"]["t5_max_length"], train["output_dir"]) == (16, f"runs/{kind}")
    assert "EDIT" not in project.train_toml.read_text() + project.data_toml.read_text()


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_keeps_the_values_of_its_recipe(name: str) -> None:
    kind = KINDS[name]
    micro_batch = 8 if kind.batch > 8 else 2
    plan = MemoryChoice(micro_batch, kind.batch // micro_batch, "selective")
    prompts = ('a "quoted" word', "back\\slash", "一只猫")
    values = TextValues(name, "images", "owner/model", 256, plan, 77, epoch_steps=1000, prompts=prompts)
    text = train_toml(kind, values)
    ours, recipe = tomllib.loads(text), tomllib.loads((RECIPES / f"{kind.recipe}.toml").read_text(encoding="utf-8"))
    sizes = (ours["micro_batch_size_per_gpu"], ours["gradient_accumulation_steps"])
    assert sizes == (plan.micro_batch, plan.accumulation)
    assert tuple(ours.pop("sampling")["prompts"]) == prompts
    changed = {"diffusers_path": "owner/model", "t5_max_length": 77}
    assert ours["model"] == {**recipe["model"], **changed}
    assert {key: ours[key] for key in ("optimizer", "ema")} == {key: recipe[key] for key in ("optimizer", "ema")}
    assert not any(line.rstrip() == "#" for line in text.splitlines()[6:])
    data = tomllib.loads(data_toml(kind, values))
    references = {"references": ["images-before"]} if kind.references else {}
    assert (data["resolutions"], data["directory"]) == ([256], [{"path": "images", **references}])


@pytest.mark.parametrize(
    ("kind", "scheduler", "shift"), [("lora", 1.0, 1.0), ("finetune", 1.5, 1.5), ("icons", 2.0, 3.0)]
)
def test_weights_keep_their_shift(tmp_path: Path, images: str, kind: str, scheduler: float, shift: float) -> None:
    model = Path(shutil.copytree(DEMO, tmp_path / "model"))
    path = model / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shift": scheduler}))
    project = new.run(kind, images, str(model), tmp_path / "out")
    text = project.train_toml.read_text(encoding="utf-8")
    assert tomllib.loads(text)["model"]["shift"] == shift
    assert ("as in the model's scheduler" in text) == (shift == scheduler)


def test_icons_on_a_cpu_are_planned_for_an_hour(tmp_path: Path, images: str, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(check, "cpu_speed", lambda *_: 1e10)
    project = new.run("icons", images, str(DEMO), tmp_path / "cpu")
    train = tomllib.loads(project.train_toml.read_text(encoding="utf-8"))
    assert (train["model"]["shape"], project.memory.samples_per_step) == ({"num_layers": 4, "num_heads": 4}, 16)
    assert 100 <= project.steps < 2000, "40 images, and an hour of half a core"
    assert re.match(r"(at most|about) (59 min \d+ s|1 h) of training steps", project.time)
    assert project.steps == check.run(check.load(project.train_toml)).total_steps
    shorter = check.load(project.train_toml, ["max_steps=8"])
    assert check.run(shorter).total_steps == 8, "no other key has to change"
    monkeypatch.setattr(check, "cpu_speed", lambda *_: 1.28e12)
    assert new.run("icons", images, str(DEMO), tmp_path / "many").steps == 2000, "the shortest run"
    monkeypatch.setattr("sd3_light.cli.new_verb.visible_gpus", lambda: [])
    arguments = ["new", "icons", "--data", images, "--model", str(DEMO), "--out", str(tmp_path / "said")]
    assert run_guarded(lambda: app(arguments, standalone_mode=False)) == 0
    time = r"time: about .* of training steps on \d+ CPU cores, by a few steps timed here"
    assert re.search(time, capfd.readouterr().err)
    monkeypatch.setattr(check, "cpu_speed", lambda *_: None)
    assert "not measured" in new.run("icons", images, str(DEMO), tmp_path / "unknown").time


def test_few_images_are_not_repeated_for_10000_steps(tmp_path: Path, images: str) -> None:
    h200 = (Gpu("NVIDIA H200", 140 * GIB),)
    project = new.run("icons", images, str(DEMO), tmp_path, gpus=h200)
    train = tomllib.loads(project.train_toml.read_text(encoding="utf-8"))
    assert (project.steps, train["max_steps"]) == (1000, 1000), "1,000 epochs of one step"
    assert train["model"]["shape"] == {"num_layers": 8, "num_heads": 8}
    estimate = check.run(check.load(project.train_toml))
    lines = dict(check.conclude(check.load(project.train_toml).train, estimate, check.Target(h200[0])))
    assert project.time == lines["time"], "the estimate of check"
    time = new.run("icons", images, str(DEMO), tmp_path / "unknown", gpus=gpu(24)).time
    assert "10% to 50% of the peaks of GPUs with this memory, A10G to 4090" in time


def test_unequal_gpus_are_planned_by_the_smallest(tmp_path: Path, images: str) -> None:
    both = new.run("icons", images, str(DEMO), tmp_path / "both", gpus=(*gpu(140), *gpu(6))).memory
    assert both.available == 6 * GIB
    assert both.fits
    assert both.processes == 2
    equal = new.run("icons", images, str(DEMO), tmp_path / "equal", gpus=gpu(6) * 2).memory
    assert both == equal


def test_less_memory_gives_smaller_batches_and_then_checkpointing(tmp_path: Path, images: str) -> None:
    plans = []
    for number, gib in enumerate((80, 16, 6, 4)):
        plan = new.run("icons", images, str(DEMO), tmp_path / str(number), gpus=gpu(gib)).memory
        assert plan.fits, gib
        assert plan.samples_per_step == 1024, "accumulation keeps the batch"
        assert plan.needed is not None
        assert plan.needed <= 0.92 * gib * GIB
        plans.append((plan.micro_batch, plan.checkpointing))
    assert plans[0] == (1024, False)
    assert plans[1][0] < 1024
    assert plans[1][1] is False
    assert plans[-1][1] is True
    smallest = new.run("icons", images, str(DEMO), tmp_path / "smallest", gpus=gpu(1)).memory
    assert (smallest.micro_batch, smallest.checkpointing, smallest.fits) == (1, True, False)
    assert [size for size, _ in plans] == sorted((size for size, _ in plans), reverse=True)


def medium_in(folder: Path, images: str) -> tuple[NewProject, TrainConfig, check.RunEstimate]:
    """SD3.5 medium in place of the demo model, whose weights always fit."""
    project = new.run("finetune", images, str(DEMO), folder, gpus=gpu(80))
    loaded = check.load(project.train_toml)
    estimate = check.run(loaded)
    cost = SD3Cost(SIZES["sd3.5_medium"], loaded.train.model)
    return project, loaded.train, replace(estimate, setup=replace(estimate.setup, cost=cost, bounds=()))


def test_less_memory_releases_gradients_then_narrows_weights(tmp_path: Path, images: str) -> None:
    project, train, medium = medium_in(tmp_path, images)
    assert not project.memory.release
    chosen = {}
    for gib in (80, 40, 24, 22, 12):
        plan = choose_memory(medium, train, KINDS["finetune"], gpu(gib))
        assert plan.fits, gib
        assert (plan.accumulation == 1) or not plan.release
        chosen[gib] = (plan.release, plan.narrow, plan.averages)
        text = train_toml(KINDS["finetune"], TextValues("finetune", "images", "owner/model", 64, plan))
        table = tomllib.loads(text)
        assert table.get("gradient_release", False) == plan.release
        assert table["gradient_clipping"] == (0.0 if plan.release else 1.0)
        assert table["optimizer"].get("weight_dtype") == ("bfloat16" if plan.narrow else None)
        assert table["optimizer"]["type"] == ("adamw8bit" if plan.release else "adamw")
        assert table["ema"]["enable"] == plan.averages
    assert list(chosen) == [80, 40, 24, 22, 12]
    assert [release for release, _, _ in chosen.values()] == [False, True, True, True, True]
    assert [narrow for _, narrow, _ in chosen.values()] == [False, False, True, False, True]
    assert [averages for _, _, averages in chosen.values()] == [True, True, True, False, False]
    without_gpu = choose_memory(medium, train, KINDS["finetune"], ())
    assert without_gpu.samples_per_step == KINDS["finetune"].batch > without_gpu.micro_batch
    several = choose_memory(medium, train, KINDS["finetune"], gpu(12) * 2)
    assert not several.release, "several GPUs shard the weights"


def test_all_weights_that_do_not_fit_get_blocks_in_host_memory(tmp_path: Path, images: str, capfd: Any) -> None:
    project, train, medium = medium_in(tmp_path, images)
    plans = [choose_memory(medium, train, KINDS["finetune"], gpu(gib)) for gib in (12, 10, 8, 1.5)]
    assert [plan.fits for plan in plans] == [True, True, True, False]
    assert 0 == plans[0].swap_blocks < plans[1].swap_blocks < plans[2].swap_blocks < plans[3].swap_blocks == 24
    blocks = medium.setup.cost.layer_parameters[1:-1]
    for plan in plans[1:]:
        assert (plan.release, plan.narrow, plan.averages, plan.micro_batch) == (True, True, False, 1)
        assert plan.host == pytest.approx(4.03 * plan.swap_blocks * sum(blocks) / 24, rel=0.2)
    text = train_toml(KINDS["finetune"], TextValues("finetune", "images", "owner/model", 64, plans[1]))
    table = tomllib.loads(text)
    assert (table["swap_blocks"], table["gradient_release"]) == (plans[1].swap_blocks, True)
    held = f"# {format_bytes(plans[1].host)} of host memory, for weights and moments that do not fit on the GPU"
    assert held in text
    keys = ("swap_blocks", "gradient_release", "activation_checkpointing")
    train = train.model_copy(update={key: table[key] for key in keys})
    setup = replace(medium.setup, swapped=train.swap_blocks, release=True, checkpointing=True, batch=1, ema_tracks=0)
    assert gpu_memory(replace(setup, weight_bytes=2, optimizer="adamw8bit", fast=False)).total <= 10 * GIB
    _report(replace(project, memory=plans[1]))
    assert f"swap_blocks = {plans[1].swap_blocks} (" in capfd.readouterr().err


def test_check_agrees_with_a_release_of_gradients(tmp_path: Path, images: str, capfd: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(MemoryChoice, "fits", property(lambda plan: plan.narrow))
    project = new.run("finetune", images, str(DEMO), tmp_path, gpus=gpu(24))
    monkeypatch.undo()
    assert (project.memory.release, project.memory.narrow, project.memory.averages) == (True, True, True)
    estimate = check.run(check.load(project.train_toml))
    assert estimate.gpu.total == project.memory.needed
    assert "weights 2 + AdamW in 8 bits 2.031" in estimate.gpu.state.formula
    _report(project)
    message = r"AdamW with float32 .* needs .*, estimated: so moments have 8 bits, gradients are released, weights are"
    assert re.search(message, capfd.readouterr().err)


def test_an_adapter_that_does_not_fit_gets_8_bits_and_then_swapped_blocks(tmp_path: Path, images: str) -> None:
    """The denoiser in the estimate is a large one: 38 blocks of 8 B parameters in all, as in SD3.5 large."""
    project = new.run("lora", images, str(DEMO), tmp_path / "small", gpus=gpu(24))
    assert (project.memory.base_bits, project.memory.swap_blocks, project.memory.host) == (16, 0, 0)
    train = check.load(project.train_toml).train
    assert train.adapter is not None
    estimate = check.run(check.load(project.train_toml), 1)
    cost = SD3Cost(replace(SIZES["demo"], num_layers=38, num_heads=38, head_dim=64))
    setup = replace(estimate.setup, cost=cost, adapter=cost.adapter_parameters(train.adapter), bounds=())
    large = replace(estimate, setup=setup)
    plans = [choose_memory(large, train, KINDS["lora"], gpu(gib)) for gib in (80, 24, 16, 8, 6, 5, 1.5)]
    assert [plan.fits for plan in plans] == [True] * 6 + [False]
    chosen = [(plan.base_bits, plan.swap_blocks) for plan in plans]
    assert chosen[:2] == [(16, 0), (16, 0)]
    assert chosen[2] == (8, 0)
    assert [bits for bits, _ in chosen[3:]] == [8] * 4
    counts = [count for _, count in chosen[3:]]
    assert 2 < counts[0] < counts[1] < counts[2] < counts[3] == 38
    for plan in plans[3:6]:
        assert plan.needed is not None
        fewer = gpu_memory(replace(setup, batch=1, checkpointing=True, base_bits=8, swapped=plan.swap_blocks - 1))
        assert plan.needed < fewer.total, "fewer blocks need more"
        assert plan.host == pytest.approx(plan.swap_blocks * plans[-1].host / 38, rel=0.05)
    text = train_toml(KINDS["lora"], TextValues("lora", images, str(DEMO), 64, plans[3]))
    table = tomllib.loads(text)
    assert (table["swap_blocks"], table["adapter"]["base_bits"]) == (plans[3].swap_blocks, 8)
    assert f"# {format_bytes(plans[3].host)} of host memory" in text


def test_several_gpus_share_the_batch_and_the_weights(tmp_path: Path, images: str) -> None:
    project = new.run("finetune", images, str(DEMO), tmp_path, gpus=gpu(24) * 4)
    loaded = check.load(project.train_toml)
    assert loaded.train.parallel == "fsdp2"
    assert project.memory.samples_per_step == 32
    assert check.run(loaded, 4).gpu.total == project.memory.needed


def test_paths_below_the_folder_are_relative(fresh_project: Project) -> None:
    project = new.run("lora", str(fresh_project.images), str(DEMO), fresh_project.folder)
    data = tomllib.loads(project.data_toml.read_text(encoding="utf-8"))
    assert data["directory"] == [{"path": "images"}]
    assert tomllib.loads(project.train_toml.read_text(encoding="utf-8"))["model"]["diffusers_path"] == str(DEMO)


def test_a_url_stays_as_it_is(tmp_path: Path, images: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{tmp_path.name}/images"
    fsspec.filesystem("memory").put(images, url, recursive=True)
    project = new.run("icons", url, str(DEMO), tmp_path / "out")
    assert project.images == 40
    assert tomllib.loads(project.data_toml.read_text(encoding="utf-8"))["directory"] == [{"path": url}]
    monkeypatch.setattr("sd3_light.cli.new_verb.is_terminal", lambda: True)
    asked = CliRunner().invoke(app, ["new", "icons", "--out", str(tmp_path / "asked")], input=f"{url}\n{DEMO}\n")
    assert asked.exit_code == 0, asked.output


def test_nothing_is_written_if_something_is_wrong(tmp_path: Path, images: str) -> None:
    with pytest.raises(ConfigFaults) as caught:
        new.run("lora", str(tmp_path / "nowhere"), "missing", tmp_path / "out")
    assert sorted(str(fault).partition(": ")[0] for fault in caught.value.faults) == ["--data", "--model"]
    assert "relative paths" not in str(caught.value), "those of options start where the command runs"
    with pytest.raises(UserError, match=r"--model is missing: `sd3-light parts .* or give --model stabilityai/"):
        new.run("icons", images, None, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigFaults, match=r"--data: directory: no usable sample"):
        new.run("lora", str(tmp_path / "empty"), str(DEMO), tmp_path / "out")
    shutil.copy(next(Path(images).glob("*.png")), tmp_path / "empty")
    with pytest.raises(ConfigFaults, match=r"\(1 no_caption\); .*write each caption next to its image, as NAME\.txt"):
        new.run("lora", str(tmp_path / "empty"), str(DEMO), tmp_path / "out")
    (tmp_path / "empty" / "labels.csv").write_text("id,words\n1,a cat\n")
    with pytest.raises(ConfigFaults, match=r"labels\.csv is not read: none of the columns \['id', 'words'\] is one of"):
        new.run("lora", str(tmp_path / "empty"), str(DEMO), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    new.run("lora", images, str(DEMO), tmp_path / "out")
    with pytest.raises(UserError, match=r"lora\.toml exists; choose another folder with --out"):
        new.run("lora", images, str(DEMO), tmp_path / "out")


def test_the_command_prints_the_next_three(tmp_path: Path, images: str, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["new", "lora", "--data", images, "--model", str(DEMO), "--out", str(tmp_path), "--gpu-memory", "24"]
    assert run_guarded(lambda: app(arguments, standalone_mode=False)) == 0
    out, err = capfd.readouterr()
    assert "40 images at 64 px, 800 steps of 4 samples" in " ".join(out.split())
    assert re.search(r"fits: .* of 24 GiB of GPU memory, estimated, with micro-batches of 4", err)
    assert re.findall(r"^  sd3-light (\w+)", err, re.MULTILINE) == ["check", "train", "sample"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["new"], "KIND is missing"),
        (["new", "lora"], "--data FOLDER is missing"),
        (["new", "lorra", "--data", "x"], f"unknown kind 'lorra'; {LISTED}"),
    ],
)
def test_missing_arguments_are_named(arguments: list[str], problem: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(lambda: app(arguments, standalone_mode=False)) == 2
    assert problem in capfd.readouterr().err


def test_a_terminal_is_asked_and_a_wrong_answer_asked_again(tmp_path: Path, images: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("sd3_light.cli.new_verb.is_terminal", lambda: True)
    answers = ("icon", "icons", "nowhere", images, str(DEMO))
    result = CliRunner().invoke(app, ["new", "--out", str(tmp_path)], input="\n".join(answers) + "\n")
    assert result.exit_code == 0, result.output
    assert "What do you want to train? [lora]" in result.output
    assert "from about 20 images" in result.output
    assert f"unknown kind 'icon'; {LISTED}" in result.output
    assert "no such file or folder: nowhere" in result.output
    assert (tmp_path / "icons.toml").is_file()


@pytest.mark.parametrize(("limit", "has_graphs"), [(1e3, False), (1e15, True)])
def test_graphs_count_if_used(tmp_path: Path, images: str, monkeypatch: Any, limit: float, has_graphs: bool) -> None:
    monkeypatch.setattr("sd3_light.cost.graph_choice.LAUNCH_BOUND_FLOPS", limit)
    project = new.run("finetune", images, str(DEMO), tmp_path, gpus=gpu(24))
    estimate = check.run(check.load(project.train_toml))
    assert ("graphs" in estimate.gpu.step.formula) == has_graphs
    assert estimate.gpu.total == project.memory.needed


# --- what a practitioner would write -------------------------------------------------------------


def folder_of(folder: Path, sizes: list[tuple[int, int]], caption: str = "a photo of sks dog {}") -> str:
    """Write blank captioned images."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        Image.new("RGB", size).save(folder / f"{number:04d}.png")
        (folder / f"{number:04d}.txt").write_text(caption.format(number), encoding="utf-8")
    return str(folder)


def written(project: NewProject) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the train and the dataset TOML."""
    return tuple(tomllib.loads(path.read_text(encoding="utf-8")) for path in (project.train_toml, project.data_toml))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("buckets", "batch", "fair"),
    [
        ([20], 4, 4),
        ([18], 4, 4),
        ([19, 1], 4, 1),
        ([12, 8], 4, 4),
        ([10, 7, 3], 4, 4),
        ([18, 2], 4, 2),
        ([1], 4, 4),
        ([40], 1024, 1024),
        ([5000, 1], 32, 32),
        ([1000, 1], 32, 16),
        ([], 4, 4),
    ],
)
def test_a_batch_repeats_no_image_of_a_small_bucket(buckets: list[int], batch: int, fair: int) -> None:
    kind = replace(KINDS["lora"], batch=batch)
    fitted = kind.with_fair_batch(buckets)
    assert (fitted.batch, fitted.shrunk) == (fair, batch // fair)
    assert fitted.shortest * fair == kind.shortest * batch, "as many samples"


def test_one_wide_image_of_twenty_is_seen_as_often_as_the_others(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "dogs", [(64, 64)] * 19 + [(128, 64)])
    project = new.run("lora", data, str(DEMO), tmp_path / "out", gpus=gpu(24))
    estimate = check.run(check.load(project.train_toml))
    assert [row.padding for row in estimate.data.rows] == [0, 0]
    assert (project.memory.samples_per_step, project.steps) == (1, 3200)
    train, _ = written(project)
    assert (train["warmup_steps"], train["save_every_n_steps"], train["checkpoint_every_n_steps"]) == (160, 800, 400)
    assert "more would repeat images of small buckets" in project.train_toml.read_text(encoding="utf-8")
    several = new.run("lora", data, str(DEMO), tmp_path / "several", gpus=gpu(24) * 2)
    assert any(note.startswith("2 GPUs train 2 samples per step, and images of small") for note in several.notes)


def test_a_lora_has_the_size_of_its_model_caption_dropout_and_early_samples(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "dogs", [(64, 64)] * 20)
    project = new.run("lora", data, str(DEMO), tmp_path / "out", gpus=gpu(24))
    train, dataset = written(project)
    assert dataset["resolutions"] == [64], "the demo model was trained at 64 px"
    assert KINDS["lora"].resolution == 1024
    model = train["model"]
    assert (model["enable_uncond_text_dropout"], model["uncond_text_dropout"]) == (True, "joint")
    assert model["uncond_text_dropout_prob"] == 0.05
    assert train["sampling"]["prompts"][0] == "sks dog on the surface of the moon"
    assert (train["sampling"]["at_steps"], train["sampling"]["every_n_steps"]) == ([1, 16], 80)


@pytest.mark.parametrize(("dual", "second"), [([], False), ([0, 1], True)])
def test_the_second_attention_of_sd35_is_adapted(tmp_path: Path, dual: list[int], second: bool) -> None:
    size = replace(SIZES["demo"], dual_attention_layers=tuple(dual))
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(size.transformer_config()))
    targets = family_named("sd3").recipe(tmp_path).get("adapter.target_modules", [])
    assert ("attn2.to_q" in targets) == second
    if second:
        adapter = AdapterConfig(rank=4, target_modules=tuple(targets))
        first = sum(SD3Cost(size).adapter_parameters(AdapterConfig(rank=4)))
        assert sum(SD3Cost(size).adapter_parameters(adapter)) == first + 2 * 4 * 4 * 2 * size.width
    keys = {"adapter.target_modules": targets} if second else {}
    values = TextValues("lora", "images", "owner/model", 64, MemoryChoice(1, 1, False), keys=keys)
    table = tomllib.loads(train_toml(KINDS["lora"], values))["adapter"]
    assert table.get("target_modules", []) == targets


def test_all_weights_have_joint_dropout_nine_buckets_and_exports_by_steps(tmp_path: Path, images: str) -> None:
    train, dataset = written(new.run("finetune", images, str(DEMO), tmp_path, gpus=gpu(24)))
    assert train["model"]["uncond_text_dropout"] == "joint"
    assert dataset["num_ar_buckets"] == 9
    assert "save_every_n_epochs" not in train
    assert train["save_every_n_steps"] == 100, "a short run exports its last step alone"
    for epoch_steps, interval in ((10, 100), (60, 150), (1000, 1000)):
        values = TextValues("finetune", "images", "m", 64, MemoryChoice(32, 1, False), epoch_steps=epoch_steps)
        assert tomllib.loads(train_toml(KINDS["finetune"], values))["save_every_n_steps"] == interval


@pytest.mark.parametrize(("steps", "early", "interval"), [(1, None, 1), (30, [1], 3), (400, [1, 8], 40), (9, None, 1)])
def test_the_first_samples_are_drawn_early(steps: int, early: list[int] | None, interval: int) -> None:
    kind = replace(KINDS["lora"], shortest=1, epochs=1)
    values = TextValues("lora", "i", "m", 64, MemoryChoice(1, 1, False), epoch_steps=steps, prompts=("a prompt",))
    sampling = tomllib.loads(train_toml(kind, values))["sampling"]
    assert (sampling.get("at_steps"), sampling["every_n_steps"]) == (early, interval)


@pytest.mark.parametrize(("affordable", "decay"), [(400, 0.978), (None, 0.98)])
def test_an_average_has_a_decay_that_its_run_reaches(affordable: int | None, decay: float) -> None:
    values = TextValues("lora", "images", "m", 64, MemoryChoice(4, 1, False), affordable=affordable)
    text = train_toml(KINDS["lora"], values)
    assert tomllib.loads(text)["ema"]["decay"] == decay
    assert ("# the average covers about the last 45 steps" in text) == (decay < 0.98)
    smaller = KINDS["lora"].with_fair_batch([19, 1])
    assert smaller.shrunk == 4
    values = replace(values, memory=MemoryChoice(1, 1, False), affordable=None)
    assert tomllib.loads(train_toml(smaller, values))["ema"]["decay"] == pytest.approx(0.98 ** (1 / 4), abs=6e-4)
    one_by_one = replace(values, epoch_steps=40_000)
    decay = tomllib.loads(train_toml(KINDS["finetune"], one_by_one))["ema"]["decay"]
    assert decay == pytest.approx(0.999 ** (1 / 32), abs=1e-6), "as many samples as with batches of 32"


def test_gpus_share_the_batch_of_pretraining(tmp_path: Path, images: str, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr("sd3_light.cli.new_verb.visible_gpus", lambda: [])
    common = ["new", "icons", "--data", images, "--model", str(DEMO), "--gpus", "8"]
    assert run_guarded(lambda: app([*common, "--out", str(tmp_path / "none")], standalone_mode=False)) == 2
    assert "--gpus 8: no GPU is visible; give the memory of each with --gpu-memory GIB" in capfd.readouterr().err
    options = [*common, "--gpu-memory", "24", "--out", str(tmp_path / "eight")]
    assert run_guarded(lambda: app(options, standalone_mode=False)) == 0
    assert "on all 8 GPUs: torchrun" in capfd.readouterr().err
    text = (tmp_path / "eight" / "icons.toml").read_text(encoding="utf-8")
    assert "micro_batch_size_per_gpu = 128  # 1,024 samples per step on 8 GPUs" in text
    loaded = check.load(tmp_path / "eight" / "icons.toml")
    assert {row.global_batch for row in check.run(loaded, 8).data.rows} == {1024}
    monkeypatch.setattr("sd3_light.cli.new_verb.visible_gpus", lambda: [*gpu(80), *gpu(24)])
    assert new_verb._planned_gpus(3, None) == gpu(24) * 3
    assert new_verb._planned_gpus(None, None) == (*gpu(80), *gpu(24))
    assert len(new_verb._planned_gpus(None, 24)) == 1


def test_pretraining_has_a_size_that_fits(tmp_path: Path, images: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the demo's encoders, whose text is narrow, in place of SD3's."""
    text = (RECIPES / "sd3_light_256.toml").read_text(encoding="utf-8")
    kind = replace(KINDS["pretrain"], smaller_size="demo", recipe="small", resolution=64)
    shutil.copytree(RECIPES, tmp_path / "recipes")
    (tmp_path / "recipes" / "small.toml").write_text(text.replace('"sd3_light"', '"tiny3"'), encoding="utf-8")
    shutil.copy(RECIPES / "sd3_light_256_data.toml", tmp_path / "recipes" / "small_data.toml")
    monkeypatch.setattr("sd3_light.new.project_text.FOLDER", tmp_path / "recipes")
    monkeypatch.setitem(KINDS, "pretrain", kind)
    for is_roomy, size in ((True, "tiny3"), (False, "demo")):
        monkeypatch.setattr(MemoryChoice, "is_roomy", is_roomy)
        project = new.run("pretrain", images, str(DEMO), tmp_path / size, gpus=gpu(80))
        train, _ = written(project)
        assert train["model"]["size"] == size
        assert check.run(check.load(project.train_toml)).gpu.total == project.memory.needed
        assert any("40 images are too few for random weights of this size" in note for note in project.notes)


@pytest.mark.parametrize(
    ("plan", "is_roomy"),
    [
        (MemoryChoice(64, 1, False, needed=1, available=100), True),
        (MemoryChoice(64, 1, "selective", needed=1, available=100), True),
        (MemoryChoice(64, 1, True, needed=1, available=100), False),
        (MemoryChoice(4, 1, False, needed=1, available=100), False),
        (MemoryChoice(64, 1, False, needed=100, available=100), False),
    ],
)
def test_a_roomy_plan(plan: MemoryChoice, is_roomy: bool) -> None:
    assert plan.is_roomy == is_roomy


@pytest.mark.parametrize(("side", "words", "warns"), [(256, 5, True), (256, 30, False), (128, 5, False)])
def test_short_captions_are_reported_for_random_weights(side: int, words: int, warns: bool) -> None:
    caption = " ".join(f"word{number}" for number in range(words))
    assert bool(short_captions([caption, caption, "long " * 90], side)) == warns
    assert bool(short_captions(["字" * 2 * words] * 3, side)) == warns
    assert short_captions([], side) == ""


def test_icons_are_padded_for_other_programs_and_not_with_own_encoders(tmp_path: Path, images: str) -> None:
    train, _ = written(new.run("icons", images, str(DEMO), tmp_path / "sd3", gpus=gpu(24)))
    assert (train["model"]["text_tokens"], train["model"]["dtype"]) == ("padded", "bfloat16")
    assert "no padding" not in (tmp_path / "sd3" / "icons.toml").read_text(encoding="utf-8")
    parts = shutil.copytree(DEMO, tmp_path / "parts")
    (parts / "judge").mkdir()
    train, _ = written(new.run("icons", images, str(parts), tmp_path / "own", gpus=gpu(24)))
    assert (train["model"]["text_tokens"], train["model"]["dtype"]) == ("real", "float32")


def test_new_says_what_a_family_offers(tmp_path: Path, images: str) -> None:
    notes = new.run("lora", images, str(DEMO), tmp_path / "lora", resolution=64, gpus=gpu(24)).notes
    assert notes == (
        "prior preservation: available for SD3; add a [[directory]] of class images (docs/start/finetune.md)",
        "text encoders: not trained for SD3, because the cache holds their outputs",
    )
    assert new.run("icons", images, str(DEMO), tmp_path / "icons", resolution=64, gpus=gpu(24)).notes == ()
    *_, warning = new.run("lora", images, str(DEMO), tmp_path / "large", resolution=128, gpus=gpu(24)).notes
    assert warning.startswith("warning: 40 of 40 images are smaller than 128 px and are enlarged; a smaller --res")


def test_new_fits_a_model_whose_sides_are_multiples_of_32(tmp_path: Path, images: str) -> None:
    model = save_pipeline("sana", tmp_path / "model")
    deep_compression_vae(levels=6).save_pretrained(model / "vae")
    project = new.run("lora", images, str(model), tmp_path / "out", resolution=128, gpus=gpu(24))
    train, data = written(project)
    assert (data["side_step"], train["max_steps"], project.steps) == (32, 800, 800)
    check.run(check.load(project.train_toml))


def test_a_distillation_draws_samples_as_the_model_learns(tmp_path: Path, images: str) -> None:
    """The guidance of the base would guide a second time; Flux's is a number, which student and teacher share."""
    learnt = {"flux": (1.0, 3.5), "z_image": (4.0, None)}
    for family, (teacher, number) in learnt.items():
        model = save_pipeline(family, tmp_path / family)
        project = new.run("distill", images, str(model), tmp_path / f"{family}-out", resolution=64, gpus=gpu(24))
        written = tomllib.loads(project.train_toml.read_text(encoding="utf-8"))
        assert written["objective"]["distill"]["guidance"] == teacher
        assert written["model"].get("guidance") == number
        assert not {"steps", "guidance"} & set(written["sampling"])
        config = with_family_values(check.load(project.train_toml)).train
        assert (config.sampling.steps, config.sampling.guidance) == (4, 0.0 if number is None else number)
        check.run(check.load(project.train_toml))
