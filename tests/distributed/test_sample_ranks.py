"""Two processes under torchrun write the same sample files as one, byte for byte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sd3_light.assets import DEMO


def sample(out: Path, table: Path, *launcher: str) -> str:
    """Run `sd3-light sample` with a launcher; return its stdout."""
    command = [sys.executable, *launcher, "-m", "sd3_light", "sample", str(DEMO), "a star", "--file", str(table)]
    command += ["--seed", "1", "--seed", "2", "--steps", "2", "--out", str(out)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow  # test_sample.py compares the shares of two ranks in one process
def test_two_processes_write_the_files_of_one(tmp_path: Path) -> None:
    table = tmp_path / "prompts.csv"
    table.write_text("prompt,seed,width\na large red circle,,\ntwo blue squares,7,80\n", encoding="utf-8")
    alone = sample(tmp_path / "one", table)
    together = sample(tmp_path / "two", table, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    expected = files(tmp_path / "one")
    assert sorted(expected) == [*(f"0000{number}.png" for number in range(5)), "grid.png"]
    assert files(tmp_path / "two") == expected
    assert alone.count("wrote") == together.count("wrote") == 1
