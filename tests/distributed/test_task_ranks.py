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
from sd3_light.tasks import ModelLogger, launch_training_task
from tests.unit.tasks.toy import Images, Toy

ROOT = Path(__file__).parents[2]


def numbers(out: Path) -> list[float]:
    events = [event for event in read_log(out / "log.jsonl") if event["event"] == "step"]
    return [number for event in events for number in (event["loss"], event["grad_norm"])]


def start_two(out: Path, stage: str) -> subprocess.CompletedProcess[str]:
    """Run `toy.py` on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "tests" / "unit" / "tasks" / "toy.py"), str(out), stage]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize("stage", ["process", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_two_processes_equal_one(tmp_path: Path, stage: str) -> None:
    """With accelerate on processed data, and with DeepSpeed and accumulation."""
    if stage == "deepspeed":
        pytest.importorskip("deepspeed")
    settings: dict[str, Any] = {"batch_size": 4, "max_steps": 4, "ema_decay": 0.9, "num_epochs": 9, "save_steps": 4}
    launch_training_task(
        Accelerator(cpu=True),
        Images(),
        Toy(),
        ModelLogger(tmp_path / "one"),
        1e-2,
        num_workers=0,
        **settings,
    )
    done = start_two(tmp_path / "two", stage)
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "two") == pytest.approx(numbers(tmp_path / "one"), rel=1e-5)
    one, two = (load_file(tmp_path / name / "step-4.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(one[name], two[name], atol=1e-6) for name in one)
    if stage == "deepspeed":
        return
    views = {path.parent.name: path.stem for path in (tmp_path / "two" / "processed").glob("[01]/*.json")}
    assert set(views) == {"0", "1"}, "each process writes its part"


def test_two_processes_finish_again_and_stop_together(tmp_path: Path) -> None:
    """The file of a finished task is written again; a signal to the second process ends both, with exit code 75."""
    done = start_two(tmp_path, "stop")
    assert load_file(tmp_path / "finished" / "step-2.safetensors")
    assert done.returncode == 1, "torchrun's own exit code"
    assert f"exitcode  : {RESUMABLE}" in done.stderr
    assert "toy.py" not in "".join(line for line in done.stderr.splitlines() if line.lstrip().startswith("File"))
    lines = [line for line in done.stderr.splitlines() if line.startswith("stopped: ")]
    assert len(lines) == 2
    (stop,) = [event for event in read_log(tmp_path / "stopped" / "log.jsonl") if event["event"] == "stop"]
    assert lines[1] == f"stopped: {stop['reason']} at step {stop['step']} of 36; resume=True continues from there"
    assert (tmp_path / "stopped" / "checkpoints" / f"step-{stop['step']:08d}").is_dir()
