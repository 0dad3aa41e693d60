"""A task on two processes gives the results of one, with accelerate and with DeepSpeed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from sd3_light.config.faults import RESUMABLE
from sd3_light.runlog import read_log
from sd3_light.tasks import ModelLogger, launch_data_process_task, launch_training_task
from tests.distributed.custom_forward_script import AVERAGES, SETTINGS
from tests.unit.tasks.test_custom_forward import Own
from tests.unit.tasks.toy import Images, Toy

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "unit" / "tasks" / "toy.py"


def numbers(out: Path) -> list[float]:
    events = [event for event in read_log(out / "log.jsonl") if event["event"] == "step"]
    return [number for event in events for number in (event["loss"], event["grad_norm"])]


def start(script: Path, out: Path, option: str, processes: int) -> subprocess.CompletedProcess[str]:
    """Run a script by python, or on several processes by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, str(script), str(out), option]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize("stage", ["process", "fsdp2", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_two_processes_equal_one(tmp_path: Path, stage: str) -> None:
    """With accelerate on processed data, with FSDP2 and a resume, and with DeepSpeed and accumulation."""
    if stage == "deepspeed":
        pytest.importorskip("deepspeed")
    settings: dict[str, Any] = {"batch_size": 4, "max_steps": 4, "ema_decay": 0.9, "num_epochs": 9, "save_steps": 4}
    launch_training_task(
        Accelerator(cpu=True), Images(), Toy(), ModelLogger(tmp_path / "one"), 1e-2, num_workers=0, **settings
    )
    done = start(TOY, tmp_path / "two", stage, processes=2)
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "two") == pytest.approx(numbers(tmp_path / "one"), rel=1e-5)
    one, two = (load_file(tmp_path / name / "step-4.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)
    if stage == "fsdp2":
        parts = (tmp_path / "two" / "checkpoints" / "step-00000004").glob("rank-*.safetensors")
        assert len(list(parts)) == 2, "each process writes its rows"
        assert (tmp_path / "two" / "samples" / "step-00000002.png").is_file()
    if stage != "process":
        return
    launch_data_process_task(None, Images(), Toy(), ModelLogger(tmp_path / "processed"), num_workers=0, shard_size=2)
    shards = [
        {path.name: path.read_bytes() for path in (out / "shards").glob("*.safetensors")}
        for out in (tmp_path / "two" / "processed", tmp_path / "processed")
    ]
    assert len(shards[0]) == 4
    assert shards[0] == shards[1], "two processes build the shards of one"


def test_two_processes_finish_again_and_stop_together(tmp_path: Path) -> None:
    """The file of a finished task is written again; a signal to the second process ends both, with exit code 75."""
    done = start(TOY, tmp_path, "stop", processes=2)
    assert load_file(tmp_path / "finished" / "step-2.safetensors")
    wrote = sorted(line for line in done.stdout.splitlines() if line.startswith("wrote"))
    assert wrote == 2 * ["wrote ['step-2']"] + 2 * ["wrote []"], "one process writes"
    assert done.returncode == 1, "torchrun's own exit code"
    assert f"exitcode  : {RESUMABLE}" in done.stderr
    assert "toy.py" not in "".join(line for line in done.stderr.splitlines() if line.lstrip().startswith("File"))
    lines = [line for line in done.stderr.splitlines() if line.startswith("stopped: ")]
    assert len(lines) == 2
    (stop,) = [event for event in read_log(tmp_path / "stopped" / "log.jsonl") if event["event"] == "stop"]
    assert lines[1] == f"stopped: {stop['reason']} at step {stop['step']} of 36; resume=True continues from there"
    assert (tmp_path / "stopped" / "checkpoints" / f"step-{stop['step']:08d}").is_dir()


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_custom_forwards_train_by_deepspeed(tmp_path: Path, processes: int) -> None:
    """With the numbers of one process: averages, validation, ZeRO 1 and 2, accumulation, a resume; and by FSDP2."""
    pytest.importorskip("deepspeed")
    script = ROOT / "tests" / "distributed" / "custom_forward_script.py"
    done = start(script, tmp_path, str(4 // processes), processes)
    assert "no gradient reached pipe.dit.weight" in done.stderr, done.stderr
    alone = {**SETTINGS, "batch_size": 4, "engine": "torch"}
    launch_training_task(None, Images(), Own(), ModelLogger(tmp_path / "torch"), **alone)
    several = {**SETTINGS, **AVERAGES, "batch_size": 4, "engine": "torch"}
    launch_training_task(None, Images(), Own(), ModelLogger(tmp_path / "torch-averages"), **several)

    expected = load_file(tmp_path / "torch" / "step-5.safetensors")
    for name in ("whole", "broken", "zero-1", "foreign", "narrow", "fsdp2"):
        out, tolerance = tmp_path / name, 0.05 if name == "narrow" else 1e-5
        assert numbers(out) == pytest.approx(numbers(tmp_path / "torch"), rel=tolerance)
        reference = validations(tmp_path / "torch")
        found = validations(out)
        assert found.keys() - reference.keys() == ({(3, "ema")} if name == "broken" else set()), "where it stopped"
        assert {step: found[step] for step in reference} == pytest.approx(reference, rel=tolerance)
        saved = load_file(out / "step-5.safetensors")
        assert all(torch.allclose(saved[key], expected[key.removeprefix("inner.")], atol=tolerance) for key in saved)
        assert len(saved) == len(expected)
        parts = list((out / "checkpoints" / "step-00000005").glob("rank-*.safetensors"))
        assert len(parts) == processes, "each process writes its part"
    resumed, whole = (load_file(tmp_path / name / "step-5.safetensors") for name in ("broken", "whole"))
    assert all(torch.equal(resumed[key], whole[key]) for key in whole), "a resumed task continues exactly"
    assert validations(tmp_path / "averages") == pytest.approx(validations(tmp_path / "torch-averages"), rel=1e-5)
    assert len(validations(tmp_path / "averages")) == 9, "of the weights and of both averages, at steps 2, 4 and 5"
    for name in ("step-5", "step-5.long"):
        ours, reference = (load_file(tmp_path / out / f"{name}.safetensors") for out in ("averages", "torch-averages"))
        assert all(torch.allclose(ours[key], reference[key], atol=1e-5) for key in reference)
    assert (tmp_path / "averages" / "samples" / "step-00000005.png").is_file()


def validations(out: Path) -> dict[tuple[int, str], float]:
    events = [event for event in read_log(out / "log.jsonl") if event["event"] == "eval"]
    return {(event["step"], event["weights"]): event["flow"] for event in events}
