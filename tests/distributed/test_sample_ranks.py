"""Two processes under torchrun write the same sample files as one, byte for byte."""

from pathlib import Path

import pytest

from sd3_light.assets import DEMO
from tests.distributed.layouts import run_ranks


def sample(out: Path, table: Path, processes: int) -> str:
    """Run `sd3-light sample` in some processes; return its stdout."""
    command = ["-m", "sd3_light", "sample", DEMO, "a star", "--file", table, "--seed", 1, "--seed", 2]
    return run_ranks(processes, *command, "--steps", 2, "--out", out).stdout


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow  # test_sample.py compares the shares of two ranks in one process
def test_two_processes_write_the_files_of_one(tmp_path: Path) -> None:
    table = tmp_path / "prompts.csv"
    table.write_text("prompt,seed,width\na large red circle,,\ntwo blue squares,7,80\n", encoding="utf-8")
    alone = sample(tmp_path / "one", table, 1)
    together = sample(tmp_path / "two", table, 2)
    expected = files(tmp_path / "one")
    assert sorted(expected) == [*(f"0000{number}.png" for number in range(5)), "grid.png"]
    assert files(tmp_path / "two") == expected
    assert alone.count("wrote") == together.count("wrote") == 1
