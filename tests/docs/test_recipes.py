"""Every shipped recipe is a valid config, and the demo recipes run."""

import json
import shutil
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from sd3_light.assets import DEMO as ASSETS
from sd3_light.check.verb import disk_faults
from sd3_light.config import LoadedConfig, load_config
from sd3_light.engines import Launch
from sd3_light.journeys import cache_then_train
from sd3_light.recipes import FOLDER
from sd3_light.runlog import read_log
from sd3_light.world import write_dataset
from tests.project import quick_caching

RECIPES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.toml"))
TRAIN = [name for name in RECIPES if "output_dir" in tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))]
DEMO = [name for name in TRAIN if name.startswith("demo/")]
EDITED = ("model.diffusers_path", "model.init", "directory[", "dataset", "reward.prompts")
"""Keys that users edit; all other keys of a recipe must be valid as shipped."""


def train_two_steps(loaded: LoadedConfig, samples: int = 4) -> None:
    """Cache, and train two steps of these samples."""
    with quick_caching():
        progress = cache_then_train(loaded, Launch())
    assert (progress.step, progress.samples, progress.skipped) == (2, samples, 0)


def test_the_recipes_are_found_and_used() -> None:
    assert {"demo/pretrain.toml", "demo/continue.toml", "demo/base.toml", "lora.toml", "finetune.toml"} <= set(TRAIN)
    assert {"sd3_light_256.toml", "sd3_light_256_seed.toml", "one_gpu_256.toml", "reward.toml"} <= set(TRAIN)
    assert {"icons_128.toml", "icons_256.toml", "distill.toml"} <= set(TRAIN)
    used = set()
    for name in TRAIN:
        loaded = load_config(FOLDER / name)
        used |= {loaded.dataset.path, *(dataset.path for dataset in loaded.eval_datasets.values())}
    assert {str(path.relative_to(FOLDER)) for path in used} | set(TRAIN) == set(RECIPES)


@pytest.mark.parametrize("name", TRAIN)
def test_a_recipe_loads_and_states_command_hardware_and_time(name: str) -> None:
    loaded = load_config(FOLDER / name)
    assert loaded.dataset.directories
    faults = disk_faults(loaded)
    assert [str(fault) for fault in faults if not fault.key.startswith(EDITED)] == []
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    header = "\n".join(takewhile(lambda line: line.startswith("#"), lines))
    for word in ("command", "hardware", "time"):
        assert word in header, f"the header of {name} does not state the {word}"


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `sd3-light demo` prepares, with fewer images."""
    folder = tmp_path_factory.mktemp("demo")
    write_dataset(folder / "data" / "train", 16, seed=1)
    write_dataset(folder / "data" / "held_out", 4, seed=2, held_out=True)
    shutil.copytree(ASSETS, folder / "model")
    for path in (FOLDER / "demo").glob("*.toml"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize("name", DEMO)
def test_a_demo_recipe_runs(demo_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two steps with few samples in this process; the batch size and workers of the GPU recipe are too large for it."""
    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})  # verified where the README runs
    overrides = ["max_steps=2", "micro_batch_size_per_gpu=4", "num_dataloader_workers=0", "caching_batch_size=8"]
    loaded = load_config(demo_folder / Path(name).name, [*overrides, "logging_steps=1"])
    train_two_steps(loaded, 8)
    events: list[dict[str, Any]] = list(read_log(loaded.train.output_dir / "log.jsonl"))
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 2
    if name == "demo/continue.toml":
        assert max(losses) < 1.0, "it starts from trained weights"
    assert list((loaded.train.output_dir / "exports").iterdir())


@pytest.mark.parametrize("name", ["sd3_light_256", pytest.param("sd3_light_256_seed", marks=pytest.mark.slow)])
def test_the_pretraining_recipe_runs_at_a_small_size(demo_folder: Path, tmp_path: Path, name: str) -> None:
    """All keys as shipped except size, paths and counts, through cache, training and verified export."""
    for data in ("sd3_light_256_data.toml", "sd3_light_256_val.toml"):
        text = (FOLDER / data).read_text(encoding="utf-8")
        (tmp_path / data).write_text(text.replace("[256]", "[128]"), encoding="utf-8")
    shutil.copy(FOLDER / f"{name}.toml", tmp_path)
    for number, folder in enumerate(("train/00000", "train/00001", "val")):
        write_dataset(tmp_path / "data" / folder, 6, seed=number)
    overrides = ["max_steps=2", "micro_batch_size_per_gpu=2", "num_dataloader_workers=1", "model.t5_max_length=16"]
    overrides += ["model.size=tiny2", f'model.diffusers_path="{demo_folder / "model"}"', "eval_every_n_steps=2"]
    overrides += ["model.num_layers=2"] if name.endswith("seed") else ["sampling.every_n_steps=2", "sampling.steps=2"]
    loaded = load_config(tmp_path / f"{name}.toml", overrides)
    train_two_steps(loaded)
    assert (loaded.train.output_dir / "exports" / "step-00000002" / "proof.json").is_file()
    events = {event["event"] for event in read_log(loaded.train.output_dir / "log.jsonl")}
    assert ({"eval", "sample"} <= events) == (name == "sd3_light_256")


@pytest.mark.parametrize(("name", "data"), [("lora", "concept"), ("finetune", "train"), ("distill", "train")])
def test_a_fine_tuning_recipe_runs(demo_folder: Path, tmp_path: Path, monkeypatch: Any, name: str, data: str) -> None:
    """All keys as shipped except paths, counts and the limits of the demo's encoders."""
    for prove in ("diffusers_folder.prove", "adapter_folder.prove_adapter"):  # verified in tests/e2e
        monkeypatch.setattr(f"sd3_light.export.{prove}", lambda *_: {})
    dataset = (FOLDER / f"{name}_data.toml").read_text(encoding="utf-8")
    dataset = dataset.replace("[512]", "[64]").replace("[1024]", "[64]")
    (tmp_path / f"{name}_data.toml").write_text(dataset, encoding="utf-8")
    shutil.copy(FOLDER / f"{name}.toml", tmp_path)
    write_dataset(tmp_path / "data" / data, 6, seed=1)
    overrides = ["max_steps=2", "micro_batch_size_per_gpu=2", "num_dataloader_workers=0", "model.t5_max_length=16"]
    loaded = load_config(tmp_path / f"{name}.toml", [*overrides, f'model.diffusers_path="{demo_folder / "model"}"'])
    train_two_steps(loaded)
    (export,) = (loaded.train.output_dir / "exports").iterdir()
    assert (export / "pytorch_lora_weights.safetensors").is_file() == (name != "finetune")
    assert (export / "model_index.json").is_file() == (name == "finetune")


def test_icons_recipes_grow_from_128_to_256(demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys as shipped except paths, counts, the denoiser's size and the limits of the demo's encoders."""
    from safetensors.torch import load_file

    monkeypatch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
    for path in FOLDER.glob("icons_*.toml"):
        shutil.copy(path, tmp_path)
    write_dataset(tmp_path / "data" / "icons", 2, seed=1)
    overrides = ["max_steps=2", "micro_batch_size_per_gpu=2", "gradient_accumulation_steps=1", "model.t5_max_length=16"]
    overrides += ["num_dataloader_workers=0", "model.shape.num_layers=2", "model.shape.num_heads=2"]
    overrides += [f'model.diffusers_path="{demo_folder / "model"}"']
    transformers = []
    for name in ("icons_128", "icons_256"):
        start = [f'model.init="{folder.parent}"' for folder in transformers] or ["cooldown_steps=1"]
        loaded = load_config(tmp_path / f"{name}.toml", [*overrides, *start])
        train_two_steps(loaded)
        transformers.append(loaded.train.output_dir / "exports" / "step-00000002" / "transformer")
    configs = [json.loads((folder / "config.json").read_text()) for folder in transformers]
    assert [config["sample_size"] for config in configs] == [16, 32]
    small, grown = (load_file(folder / "diffusion_pytorch_model.safetensors") for folder in transformers)
    assert grown["pos_embed.pos_embed"].equal(small["pos_embed.pos_embed"])
    assert not grown["proj_out.weight"].equal(small["proj_out.weight"])
