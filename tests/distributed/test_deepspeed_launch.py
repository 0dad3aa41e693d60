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


def start(command: list[str]) -> "subprocess.Popen[str]":
    """Start a launcher that finds this Python and no GPU."""
    environment = {**os.environ, "PATH": f"{Path(REAL_PYTHON).parent}:{os.environ['PATH']}"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def finish(*launchers: "subprocess.Popen[str]") -> str:
    """Wait for the launchers, which must succeed; return their output."""
    output = ""
    for launcher in launchers:
        out, err = launcher.communicate(timeout=240)
        output += out + err
        assert launcher.returncode == 0, output[-8000:]
    return output


def arguments(project: Project, run: str, *keys: str) -> list[str]:
    flags = ["--deepspeed", "--config", str(project.train_toml), "--trust_cache"]
    for key in (f'output_dir="{run}"', "max_steps=2", "checkpoint_every_n_steps=1", *keys):
        flags += ["--set", key]
    return [str(ROOT / "train.py"), *flags]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """A cached project with a single-process run of two steps to compare with."""
    project = cached_project.copy(tmp_path_factory.mktemp("launch") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sd3_light.export.diffusers_folder.prove", lambda *_: {})
        project.train('output_dir="one"', "max_steps=2", "checkpoint_every_n_steps=1")
    return project


def same_losses(project: Project, run: str) -> bool:
    actual, expected = project.losses(run), project.losses("one")
    return actual.keys() == expected.keys() and actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow  # test_layouts.py covers the engine, test_cli.py the launcher's arguments
def test_the_deepspeed_launcher_trains(reference: Project) -> None:
    """`deepspeed --num_gpus=2 train.py --deepspeed --config TRAIN.toml --trust_cache`, on one node; DeepSpeed's
    own messages are suppressed."""
    launcher = [sys.executable, str(Path(REAL_PYTHON).parent / "deepspeed"), "--num_gpus=2"]
    launcher += [f"--master_port={free_port()}"]
    output = finish(start([*launcher, *arguments(reference, "launched", "micro_batch_size_per_gpu=2")]))
    assert same_losses(reference, "launched")
    (event,) = reference.events("start", "launched")
    assert (event["world"], event["engine"]) == (2, "deepspeed pp1 dp2 zero1")
    ours = output.partition("the cache is trusted")[2].partition("exits successfully")[0]
    assert "SEED_LAYERS" not in ours
    assert "[INFO] [engine.py" not in ours
