"""Training of stock families on the CPU: all weights and a LoRA, resumed, from shards and from memory."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sd3_light.check import verb as check
from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.config import ConfigFaults
from sd3_light.core.registry import family_named, family_of
from sd3_light.data.manifest import Manifest
from sd3_light.data.reader import ShardReader
from sd3_light.data.sides import HeldOut
from sd3_light.data.stream import MicroBatches
from sd3_light.engines import Launch
from sd3_light.engines.feed import make_order, open_cache
from sd3_light.model import host_inputs
from sd3_light.tasks import launch_reward_task
from sd3_light.train import verb as train
from sd3_light.train.verb import Resume
from tests.checkpoints import same, tensors
from tests.families import TinyFolder
from tests.judge_folders import write_vision
from tests.made_up_cache import write_cache
from tests.poisoned import poison
from tests.project import Project
from tests.stock_project import BUCKETS, LORA, write_project

pytestmark = pytest.mark.usefixtures("unproven")

LAST = checkpoint_name(4)
OTHERS = ["flux2", "krea2", "prx", "qwen_image", "sana", "z_image"]
RELEASE = ("gradient_release=true", "gradient_clipping=0.0")
NARROW = (*RELEASE, 'optimizer.weight_dtype="bfloat16"', 'model.transformer_dtype="bfloat16"')
FAMILIES = ["flux", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.fixture(params=FAMILIES)
def project(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> Project:
    monkeypatch.setattr(type(family_named(request.param)), "packages", ())
    monkeypatch.setattr(type(family_named(request.param)), "loads_adapters", True)
    return write_project(tmp_path, tiny_folder(request.param))


def run(project: Project, name: str, *keys: str, resume: Resume | None = None) -> Path:
    train.run(check.load(project.train_toml, [f'output_dir="{name}"', *keys]), resume=resume)
    return project.folder / name / "checkpoints"


def require_exact_resume(project: Project, *keys: str, later: Sequence[str] = ()) -> dict[str, Tensor]:
    """Compare a whole run with one in two parts, the second with the keys ``later``; return its last checkpoint."""
    whole = tensors(run(project, "whole", *keys) / LAST)
    run(project, "parts", "max_steps=2", *keys)
    assert same(whole, tensors(run(project, "parts", *keys, *later, resume=Resume()) / LAST))
    return whole


@pytest.mark.parametrize("tables", ["", LORA], ids=["full", "lora"])
def test_a_resumed_run_equals_the_whole(project: Project, tables: str) -> None:
    project.train_toml.write_text(project.train_toml.read_text() + tables)
    whole = require_exact_resume(project)
    assert project.losses("parts") == project.losses("whole")
    (event,) = (event for event in project.events("eval", "whole") if event["weights"] == "raw")
    assert 0 < event["flow"] < 10
    start = tensors(project.folder / "parts" / "checkpoints" / checkpoint_name(2))
    trained = [name for name in whole if name.startswith("param/")]
    assert trained
    assert sum(not torch.equal(whole[name], start[name]) for name in trained) >= len(trained) / 2
    assert all(("lora_" in name) == bool(tables) for name in trained)


def test_weights_in_bfloat16_resume_exactly_and_follow_float32(project: Project) -> None:
    """With 8-bit moments and released gradients, through checkpoints, averages, evaluation and export."""
    expected = project_losses(project, "float32", "gradient_clipping=0.0")
    whole = require_exact_resume(project, *NARROW)
    assert project.losses("whole") == pytest.approx(expected, rel=0.05)
    dtypes = {tensor.dtype for name, tensor in whole.items() if name.startswith("param/") and tensor.dim() > 1}
    assert torch.bfloat16 in dtypes
    assert all(tensor.dtype == torch.float32 for name, tensor in whole.items() if name.startswith("ema/"))
    wide = tensors(run(project, "parts", "max_steps=5", resume=Resume()) / checkpoint_name(5))
    assert {tensor.dtype for name, tensor in wide.items() if name.startswith("param/")} == {torch.float32}


@pytest.mark.parametrize("tables", ["", LORA], ids=["full", "lora"])
def test_a_block_is_aligned_with_cached_features(project: Project, tables: str) -> None:
    write_vision(project.folder / "teacher")
    text = project.train_toml.read_text(encoding="utf-8").replace("[model]\n", '[model]\nteacher_path = "teacher"\n')
    project.train_toml.write_text(text + tables, encoding="utf-8")
    table = check.load(project.train_toml).train.model
    for name in ("cache", "cache-eval-eval"):
        shutil.rmtree(project.folder / name)
        write_cache(project.folder / name, family_of(table), table, BUCKETS)
    keys = ("objective.flow={}", "objective.alignment={until=0.75}")
    whole = tensors(run(project, "whole", *keys) / LAST)
    resume = Resume(project.folder / "whole" / "checkpoints" / checkpoint_name(2))  # its end depends on the whole
    assert "param/heads.alignment.weight" in whole
    assert same(whole, tensors(run(project, "again", *keys, resume=resume) / LAST))
    terms = [event["alignment"] for event in project.events("step", "whole")]
    assert all(0.5 < term < 1.5 for term in terms[:3])
    assert terms[3] == 0


def test_a_divided_cache_trains_on_one_side_and_evaluates_the_other(project: Project) -> None:
    loaded = project.load()
    folder = Path(loaded.dataset.cache_dir)
    manifest = Manifest.load(folder)
    entry = max(manifest.shards, key=lambda shard: shard.count)
    ids = ShardReader(folder / "shards" / entry.file, entry).index["sample_id"].tolist()
    replace(manifest, held_out=HeldOut({entry.file: (ids[1],)}, {entry.file: (ids[0],)})).save(folder)
    text = project.data_toml.read_text(encoding="utf-8")
    project.data(text.replace("[[directory]]", "validation = true\n\n[[directory]]", 1))
    streamed = tensors(run(project, "stream", 'cache_residence="stream"') / LAST)
    resident = tensors(run(project, "host", 'cache_residence="host"') / LAST)
    assert same(streamed, resident)
    sets = {event["set"]: event for event in project.events("eval", "stream")}
    assert 0 < sets["validation"]["flow"] < 10
    loaded = project.load()
    data = open_cache(loaded.dataset, loaded.train, Launch(), "train")
    order = make_order(data, loaded, Launch())
    seen = {
        number
        for step in range(order.steps_per_epoch)
        for number in MicroBatches(data, order, 0, 1, 1)[step]["sample_id"].tolist()
    }
    assert seen.isdisjoint(ids[:2])
    assert seen >= set(ids[2:])


def test_recomputed_activations_and_accumulation_train_alike(project: Project) -> None:
    plain = project_losses(project, "plain")
    for keys in (
        ("activation_checkpointing=true",),
        ("activation_checkpointing=0.5",),
        ('activation_checkpointing="selective"',),
        ("micro_batch_size_per_gpu=2", "gradient_accumulation_steps=2"),
    ):
        losses = project_losses(project, f"other{len(keys[0])}", *keys)
        assert losses == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("tables", ["", LORA], ids=["full", "lora"])
def test_inputs_in_host_memory_train_alike(project: Project, tables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    project.train_toml.write_text(project.train_toml.read_text() + tables)
    monkeypatch.setattr(host_inputs, "_SMALLEST", 1)
    moved = []
    load = host_inputs._HostInputs._load
    monkeypatch.setattr(host_inputs._HostInputs, "_load", lambda *given: moved.append(given) or load(*given))
    expected = tensors(run(project, "device", "activation_checkpointing=true") / LAST)
    assert not moved
    found = tensors(run(project, "host", 'activation_checkpointing="host"') / LAST)
    assert len(moved) >= 8
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def require_same_swapped(project: Project, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a run with one whose blocks are in host memory, resumed with other blocks there."""
    whole = tensors(run(project, "whole", *keys) / LAST)
    needed = poison(monkeypatch)
    run(project, "swapped", *keys, 'swap_blocks="all"', "max_steps=2")
    resumed = tensors(run(project, "swapped", *keys, "swap_blocks=3", resume=Resume()) / LAST)
    assert len(set(needed)) >= 2
    assert same(whole, resumed)


@pytest.mark.parametrize(
    "keys",
    [(), ("activation_checkpointing=true",), ('activation_checkpointing="selective"',), ("adapter.base_bits=8",)],
    ids=str,
)
def test_hosted_blocks_train_alike(project: Project, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, weights, moments and averages, with accumulation and evaluation, resumed."""
    project.train_toml.write_text(project.train_toml.read_text() + LORA)
    keys = ("micro_batch_size_per_gpu=2", "gradient_accumulation_steps=2", *keys)
    require_same_swapped(project, keys, monkeypatch)
    assert project.losses("swapped") == project.losses("whole")
    # the last step of the first part is evaluated, too
    evals = [[event for event in project.events("eval", name) if event["step"] == 4] for name in ("whole", "swapped")]
    assert evals[0]
    assert [event["flow"] for event in evals[0]] == [event["flow"] for event in evals[1]]


@pytest.mark.parametrize(
    "keys", [RELEASE, (*NARROW, 'optimizer.type="adamw8bit"', "activation_checkpointing=true")], ids=["float32", "8bit"]
)
def test_trained_blocks_in_host_memory_train_alike(
    project: Project, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms, weights, moments, averages, evaluation and exports, resumed with other blocks in host memory."""
    require_same_swapped(project, keys, monkeypatch)
    for kind, names in (("step", ("loss", "grad_norm", "param_norm")), ("eval", ("flow", "weights"))):
        logs = []
        for name in ("whole", "swapped"):
            events = [event for event in project.events(kind, name) if kind == "step" or event["step"] == 4]
            logs.append([[event[key] for key in names] for event in events])
        assert logs[0]
        assert logs[0] == logs[1]
    exports = [project.folder / name / "exports" / LAST / "transformer" for name in ("whole", "swapped")]
    files = [sorted(folder.glob("*.safetensors")) for folder in exports]
    assert files[0]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def project_losses(project: Project, name: str, *keys: str) -> dict[int, float]:
    run(project, name, "eval_every_n_steps=100", *keys)
    return project.losses(name)


@pytest.mark.parametrize(
    "project", [FAMILIES[0], FAMILIES[1], FAMILIES[-1]], indirect=True
)  # with three blocks or more
def test_features_of_blocks_are_aligned(project: Project) -> None:
    for name, table in (("spelled", "model.layer_sync"), ("listed", "objective.layer_sync")):
        flow = () if name == "spelled" else ("objective.flow.weight=1.0",)
        run(project, name, *flow, f"{table}.weight=0.5", f"{table}.early_block=1", f"{table}.late_block=2")
    steps, others = project.events("step", "spelled"), project.events("step", "listed")
    assert all(0 < event["layer_sync"] < 2 for event in steps)
    assert [event["loss"] for event in steps] == [event["loss"] for event in others]
    with pytest.raises(ConfigFaults, match=r"objective\.layer_sync: block 1 cannot be aligned with block 99"):
        run(project, "no", "objective.flow.weight=1.0", "objective.layer_sync.late_block=99")
    with pytest.raises(ConfigFaults, match=r"objective\.text_recon: .*does not know this key"):
        run(project, "no", "objective.flow.weight=1.0", "objective.text_recon.weight=1.0")


@pytest.mark.parametrize("tables", ["", LORA], ids=["full", "lora"])
def test_distillation_trains_and_resumes_exactly(project: Project, tables: str) -> None:
    table = check.load(project.train_toml).train.model
    family = family_of(table)
    project.train_toml.write_text(project.train_toml.read_text() + tables)
    takes_number = "number" in family.guidance and family.no_guidance(family.weights.start(table)) is None
    keys = ["objective.distill.guidance=2.0"]
    steps = None
    if takes_number:
        keys.append("objective.distill.most_guidance=6.0")
    if "Euler" in (table.diffusers_path / "scheduler" / "scheduler_config.json").read_text():
        steps = 2
        keys += [f"objective.distill.steps={steps}", "objective.distill.teacher_steps=4"]
    require_exact_resume(project, *keys)
    assert all(event["distill"] > 0 for event in project.events("step", "whole"))
    facts = json.loads((project.folder / "whole" / "exports" / LAST / "sd3_light.json").read_text())
    stated = facts["sampling"]
    assert stated.get("steps") == steps
    assert (2 <= stated["guidance"] <= 6) if takes_number else not family.sampling.is_guided(stated["guidance"])


@pytest.mark.parametrize("tables", ["", LORA], ids=["full", "lora"])
@pytest.mark.parametrize("residence", ["stream", "host"])
def test_preferences_train_and_resume_exactly(project: Project, tables: str, residence: str) -> None:
    shutil.rmtree(project.cache)
    table = check.load(project.train_toml).train.model
    write_cache(project.cache, family_of(table), table, BUCKETS, paired=True)
    (project.folder / "worse").mkdir()
    project.data(project.data_toml.read_text() + 'rejected = "worse"\n')
    project.train_toml.write_text(project.train_toml.read_text() + tables)
    keys = ("objective.dpo.beta=5.0", f'cache_residence="{residence}"')
    require_exact_resume(project, *keys)
    first = project.events("step", "whole")[0]
    # an adapter's dropout makes the model differ from its teacher
    assert first["dpo"] == pytest.approx(math.log(2), abs=1e-5 if not tables else 0.05)


def test_a_training_adapter_is_in_the_loss_alone(project: Project) -> None:
    """With a LoRA; it is not in checkpoints, and a resumed run equals the whole."""
    (file,) = (project.model / "transformer").glob("*.safetensors")
    shapes = {name.removesuffix(".weight"): tensor.shape for name, tensor in load_file(file).items()}
    layer = next(name for name in shapes if name.endswith(("to_v", "final_layer.linear")))  # PRX's blocks start at 0
    generator = torch.Generator().manual_seed(0)
    sides = {"lora_A": (2, shapes[layer][1]), "lora_B": (shapes[layer][0], 2)}
    factors = {name: torch.randn(side, generator=generator) for name, side in sides.items()}
    undo = {f"transformer.{layer}.{name}.weight": tensor for name, tensor in factors.items()}
    save_file(undo, project.folder / "undo.safetensors")
    project.train_toml.write_text(project.train_toml.read_text() + LORA)
    keys = ("adapter.dropout=0.0", 'model.training_adapter="undo.safetensors"')
    plain = tensors(run(project, "plain", keys[0]) / LAST)
    whole = require_exact_resume(project, *keys)
    assert project.losses("whole")[1] != pytest.approx(project.losses("plain")[1], rel=1e-5)
    assert whole.keys() == plain.keys()


# --- towards a score -----------------------------------------------------------------------------

REWARD = """
[reward]
score = "python"
prompts = "prompts.txt"
prompts_per_draw = 2
images_per_prompt = 2
every_n_steps = 3
steps = 2
"""
REWARDED = ["flux", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen_image", "sana", "z_image"))]


def reward(project: Project, tables: str = "") -> None:
    (project.folder / "prompts.txt").write_text("a cat\na dog\n", encoding="utf-8")
    project.train_toml.write_text(project.train_toml.read_text() + tables + REWARD)


def brightness(images: Any, prompts: Sequence[str]) -> Any:
    return images.mean((1, 2, 3))


@pytest.mark.parametrize("project", REWARDED, indirect=True)
@pytest.mark.parametrize("tables", ["", LORA], ids=["full", "lora"])
def test_a_rewarded_run_resumes_exactly_inside_a_window(project: Project, tables: str) -> None:
    reward(project, tables)

    def trained(name: str, resume: Resume | None = None) -> dict[str, Tensor]:
        keys = [f'output_dir="{name}"', "checkpoint_every_n_steps=1", "micro_batch_size_per_gpu=2"]
        launch_reward_task(project.train_toml, brightness, keys, resume)
        return tensors(project.folder / name / "checkpoints" / LAST)

    whole = trained("whole")
    resumed = trained("again", Resume(project.folder / "whole" / "checkpoints" / checkpoint_name(2)))
    assert same(whole, resumed)
    events = project.events("reward", "whole")
    assert [event["step"] for event in events] == [0, 3]
    assert all(event["diversity"] > 0.3 for event in events)
    assert ("distance" in events[1]) == bool(tables)
    assert [event["flow"] > 0 for event in project.events("eval", "whole")], "the evaluation set has its flow loss"


@pytest.mark.parametrize("project", REWARDED, indirect=True)
def test_check_states_what_drawing_takes(project: Project) -> None:
    plain = check.run(check.load(project.train_toml))
    reward(project)
    drawn = check.run(check.load(project.train_toml))
    assert plain.drawing is None
    assert drawn.drawing.startswith("4 images of 64x64 every 3 steps in 2 sampler steps, ")
    rows = [estimate.data.rows[0].step_flops.value for estimate in (plain, drawn)]
    assert rows[1] > rows[0], "the teacher's pass and drawing"
    assert drawn.setup.other_models > plain.setup.other_models, "the VAE is on the device while images are decoded"
