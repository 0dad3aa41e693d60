"""The benchmark of step and stage runs its regimes one after another and prints a row for each, on a CPU too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--samples", "32", "--batch", "8", "--steps", "4", "--warm", "2", "--logging-steps", "1", "--workers", "0"]


@pytest.mark.slow
def test_every_regime_has_a_row(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/train_run.py"), "--regimes", "base", "padded"]
    command += ["--out", str(tmp_path / "out")]
    done = subprocess.run([*command, *SMALL, "--size", "demo"], capture_output=True, text=True, check=True)
    head, _, *rows = done.stdout.splitlines()
    assert "stage of step" in head
    assert [row.split("|")[1].strip() for row in rows] == ["base", "padded"]
    for name, row in zip(("base", "padded"), rows, strict=True):
        summary = json.loads((tmp_path / "out" / name / "summary.json").read_text(encoding="utf-8"))
        assert (summary["regime"], summary["residence"]) == (name, "auto")
        assert f"| {summary['samples_per_second']:,.1f} |" in row
    again = subprocess.run([*command, *SMALL, "--size", "demo"], capture_output=True, text=True, check=True)
    assert again.stdout == done.stdout, "a regime with a summary is not run again"


@pytest.mark.slow
def test_a_start_is_measured_twice() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/train_run.py"), "--size", "demo", "--start-only", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("start to end of first step:") == 2
    assert {"first batch", "first step"} <= {
        line.partition("CPU time)")[2].strip() for line in done.stdout.splitlines()
    }
