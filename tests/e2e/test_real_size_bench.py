"""The benchmark of all commands at real size, with a tiny model: it runs what is asked and what that needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "real_size.py"


def bench(out: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), str(out), "--toy", "--lanes", "1", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_journey_runs_with_those_that_it_needs(tmp_path: Path) -> None:
    done = bench(tmp_path / "out", "--journey", "train lokr", "--minutes", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((tmp_path / "out" / "table.json").read_text(encoding="utf-8"))
    assert [row["journey"] for row in table["journeys"]] == ["new", "cache", "train lokr"]
    assert all(row["exit_code"] == 0 and not row["failure"] for row in table["journeys"])
    assert "proof of lokr" in done.stdout


@pytest.mark.slow
def test_journeys_without_time_are_listed(tmp_path: Path) -> None:
    done = bench(tmp_path / "out", "--journey", "check", "--minutes", "0")
    assert done.returncode == 1
    assert "| check | 0.0 |  |  |  | not run: new failed |" in done.stdout
    assert bench(tmp_path / "out", "--journey", "fly").stderr.rstrip().endswith("stop, resume, whole")
