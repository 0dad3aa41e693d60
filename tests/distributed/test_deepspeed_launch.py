"""The documented DeepSpeed commands, with real launchers and processes on the CPU."""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.project import Project
from tests.warm import REAL_PYTHON

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """Return a port below those that the kernel gives to other processes, which could take it before it is used."""
    first = 10_000 + os.getpid() % 10_000
    for port in range(first, first + 1000):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@pytest.mark.slow  # test_layouts.py covers the engine, test_cli.py the launcher's arguments
@pytest.mark.usefixtures("unproven")
def test_the_deepspeed_launcher_trains(project: Project) -> None:
    """`deepspeed --num_gpus=2 train.py --deepspeed --config TRAIN.toml --trust_cache`, on one node; DeepSpeed's
    own messages are suppressed."""
    project.train('output_dir="one"', "max_steps=2")
    # a launcher that finds this Python and no GPU
    environment = {**os.environ, "PATH": f"{Path(REAL_PYTHON).parent}:{os.environ['PATH']}"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(REAL_PYTHON).parent / "deepspeed"), "--num_gpus=2"]
    command += [f"--master_port={free_port()}", str(ROOT / "train.py"), "--deepspeed", "--trust_cache"]
    command += ["--config", str(project.train_toml)]
    for key in ('output_dir="launched"', "max_steps=2", "micro_batch_size_per_gpu=2"):
        command += ["--set", key]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240, cwd=ROOT)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-8000:]
    assert project.losses("launched") == pytest.approx(project.losses("one"), rel=1e-5)
    (event,) = project.events("start", "launched")
    assert (event["world"], event["engine"]) == (2, "deepspeed pp1 dp2 zero1")
    ours = output.partition("the cache is trusted")[2].partition("exits successfully")[0]
    assert "SEED_LAYERS" not in ours
    assert "[INFO] [engine.py" not in ours
