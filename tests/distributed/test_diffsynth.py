"""Scripts for DiffSynth's launcher: one written from a tutorial alone, one with the package itself if installed."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file

from sd3_light.runlog import read_log
from sd3_light.tasks import ModelLogger, ProcessedDataset, launch_training_task
from tests.unit.tasks.tutorial_script import Videos, VideoTrainingModule

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "tests" / "unit" / "tasks" / "tutorial_script.py"
ACCELERATE = ("-m", "accelerate.commands.launch", "--num_machines", "1", "--mixed_precision", "no")
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def start(*command: Any, path: str = "") -> None:
    paths = os.pathsep.join(filter(None, [path, str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    whole = [sys.executable, *map(str, command)]
    done = subprocess.run(whole, env=environment, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr


def losses(out: Path) -> list[float]:
    return [event["loss"] for event in read_log(out / "log.jsonl") if event["event"] == "step"]


def test_the_script_of_the_tutorial_runs_on_two_processes(tmp_path: Path) -> None:
    """A step has four samples instead of two; `tests/unit/tasks` runs the script on one process."""
    start(*TWO, TUTORIAL, tmp_path, "one", "--num_epochs", 4)
    assert len(losses(tmp_path / "one")) == 4
    model, videos = VideoTrainingModule("one"), Videos()
    settings: dict[str, Any] = {"num_workers": 0, "batch_size": 4, "num_epochs": 4}
    launch_training_task(Accelerator(cpu=True), videos, model, ModelLogger(tmp_path / "alone"), 1e-2, **settings)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


# --- the package ---------------------------------------------------------------------------------

STUB = """\
import importlib.abc, importlib.machinery, sys, types

class Anything:
    def __getattr__(self, name): return Anything()
    def __call__(self, *args, **kwargs): return Anything()

class Stub(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return Anything()

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.startswith("torchvision.") else None
    def create_module(self, spec): return Stub(spec.name)
    def exec_module(self, module): pass

sys.meta_path.insert(0, Finder())
from torchvision import models, transforms
"""
"""A torchvision whose names can be imported; the script calls none of them."""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The script with our launcher, and a folder with stand-ins for torchvision and modelscope if they are missing."""
    folder = tmp_path_factory.mktemp("diffsynth")
    text = (ROOT / "tests" / "distributed" / "diffsynth_script.py").read_text()
    theirs = "from diffsynth.diffusion import launch_data_process_task"
    ours = "from sd3_light.tasks import launch_data_process_task"
    assert text.count(theirs) == 1
    (folder / "ours.py").write_text(text.replace(theirs, ours))
    stubs = folder / "stubs"
    stubs.mkdir()
    if importlib.util.find_spec("torchvision") is None:
        (stubs / "torchvision").mkdir()
        (stubs / "torchvision" / "__init__.py").write_text(STUB)
        (stubs / "torchvision-0.1.dist-info").mkdir()
        (stubs / "torchvision-0.1.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.1\n")
    if importlib.util.find_spec("modelscope_hub") is None:
        (stubs / "modelscope.py").write_text("snapshot_download = None\n")
    (folder / "data").mkdir()
    for number in range(6):
        Image.new("RGB", (32, 16), (40 * number, 255 - 40 * number, 90)).save(folder / "data" / f"{number}.png")
    rows = [{"video": f"{number}.png", "prompt": f"video {number}"} for number in range(6)]
    (folder / "data" / "metadata.json").write_text(json.dumps(rows))
    return folder / "ours.py", str(stubs)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("diffsynth") is None, reason="needs diffsynth")
def test_a_module_of_the_package_trains_by_our_launcher(tmp_path: Path, script: tuple[Path, str]) -> None:
    """Only the import of the launcher differs: python, and two processes of torchrun and accelerate launch."""
    file, stubs = script
    data = file.parent / "data"
    raw = ("--dataset_base_path", data, "--dataset_metadata_path", data / "metadata.json")
    options: tuple[Any, ...] = ("--lora_base_model", "dit", "--lora_target_modules", "q,k,v,o", "--lora_rank", 2)
    options += ("--num_epochs", 2, "--enable_csv_log")

    def run(*launcher: str, name: str, stages: bool = True) -> None:
        """Train in one stage and, in the same process, in two."""
        out = tmp_path / name
        cache = out / "cache"
        words = [*raw, *options, "--task", "sft", "--output_path", out / "one"]
        if stages:
            words += ["then", *raw, *options, "--task", "sft:data_process", "--output_path", cache, "then"]
            words += ["--dataset_base_path", cache, *options, "--task", "sft:train", "--output_path", out / "second"]
        start(*launcher, file, *words, path=stubs)

    run(name="python")
    one = losses(tmp_path / "python" / "one")
    assert len(one) == len(losses(tmp_path / "python" / "second")) == 12
    rows = list(csv.DictReader((tmp_path / "python" / "one" / "loss.csv").open()))
    assert [float(row["value"]) for row in rows] == pytest.approx(one), "the package's logger gets every loss"
    saved = load_file(tmp_path / "python" / "second" / "epoch-1.safetensors")
    assert len(saved) == 32
    assert "blocks.0.self_attn.q.lora_A.default.weight" in saved, "its logger exports and names the weights"
    assert all(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name)
    run(*TWO, name="torchrun")
    two = losses(tmp_path / "torchrun" / "one")
    assert two[0] == pytest.approx((one[0] + one[1]) / 2, rel=0.01)
    assert len(losses(tmp_path / "torchrun" / "second")) == 6
    caches = [ProcessedDataset(tmp_path / name / "cache") for name in ("python", "torchrun")]
    stored = [cache[4][0]["input_latents"] for cache in caches]
    assert torch.equal(*stored)
    run(*ACCELERATE, "--cpu", "--num_processes", "1", name="accelerate", stages=False)
    assert losses(tmp_path / "accelerate" / "one") == one
    # with --cpu accelerate starts one process; ACCELERATE_USE_CPU makes the two of --multi_gpu use CPUs
    run(*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", name="accelerate-2")
    for stage in ("one", "second"):
        assert losses(tmp_path / "accelerate-2" / stage) == losses(tmp_path / "torchrun" / stage)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("diffsynth") is None, reason="needs diffsynth")
@pytest.mark.parametrize("launcher", [(), TWO], ids=["python", "torchrun"])
def test_a_package_module_by_deepspeed(tmp_path: Path, script: tuple[Path, str], launcher: tuple[str, ...]) -> None:
    """With the numbers of torch's engine, which needs no Accelerator either, and files by the package's logger."""
    pytest.importorskip("deepspeed")
    file, stubs = script
    data = file.parent / "data"
    shared: list[Any] = ["--dataset_base_path", data, "--dataset_metadata_path", data / "metadata.json"]
    shared += ["--task", "sft", "--num_epochs", 9, "--ema_decay", 0.5, "--eval_steps", 2]
    lora = ("--lora_base_model", "dit", "--lora_target_modules", "q,k,v,o", "--lora_rank", 2)
    words: list[Any] = []
    for name, engine, steps, options in (
        ("torch", "torch", 5, lora),
        ("whole", "deepspeed", 5, lora),
        ("broken", "deepspeed", 2, lora),
        ("broken", "deepspeed", 5, (*lora, "--resume")),
        ("zero-1", "deepspeed", 5, (*lora, "--zero_stage", 1)),
        ("full-torch", "torch", 5, ("--trainable_models", "dit")),
        ("full", "deepspeed", 5, ("--trainable_models", "dit")),
        ("narrow-torch", "torch", 5, (*lora, "--dtype", "bfloat16")),
        ("narrow", "deepspeed", 5, (*lora, "--dtype", "bfloat16")),
    ):
        words += ["then"] if words else []
        words += [*shared, *options, "--engine", engine, "--max_steps", steps, "--output_path", tmp_path / name]
    start(*launcher, file, *words, path=stubs)

    assert len(losses(tmp_path / "torch")) == 5
    pairs = (("whole", "torch"), ("zero-1", "torch"), ("full", "full-torch"), ("narrow", "narrow-torch"))
    for name, reference in pairs:
        tolerance = 0.01 if name == "narrow" else 1e-5
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / reference), rel=tolerance)
        assert validations(tmp_path / name) == pytest.approx(validations(tmp_path / reference), rel=tolerance)
        saved, expected = (load_file(tmp_path / each / "step-5.safetensors") for each in (name, reference))
        assert saved.keys() == expected.keys()
        assert all(torch.allclose(saved[key], expected[key], atol=tolerance) for key in saved)
    assert "blocks.0.self_attn.q.lora_A.default.weight" in load_file(tmp_path / "whole" / "step-5.safetensors")
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    resumed, whole = (load_file(tmp_path / name / "step-5.safetensors") for name in ("broken", "whole"))
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)


def validations(out: Path) -> list[float]:
    return [event["flow"] for event in read_log(out / "log.jsonl") if event["event"] == "eval"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("diffsynth") is None, reason="needs diffsynth")
def test_the_loss_equals_that_of_the_package(script: tuple[Path, str]) -> None:
    folders = [script[1], str(ROOT / "tests" / "distributed")]
    start(
        "-c",
        "import torch, diffsynth_script as s, diffsynth.diffusion as theirs; from sd3_light import tasks\n"
        "pipe = s.make_pipeline('cpu', torch.float32); pipe.scheduler.set_timesteps(1000, training=True)\n"
        "inputs = {'input_latents': torch.randn(1, 4, 3, 4, 4), 'context': torch.randn(1, 5, 16)}\n"
        "for more in ({}, {'first_frame_latents': torch.randn(1, 4, 1, 4, 4)}, {'max_timestep_boundary': 0.3}):\n"
        "    both = []\n"
        "    for loss in (theirs.FlowMatchSFTLoss, tasks.FlowMatchSFTLoss):\n"
        "        torch.manual_seed(3); both.append(loss(pipe, **inputs, **more))\n"
        "    assert torch.equal(*both), both\n",
        path=os.pathsep.join(folders),
    )
