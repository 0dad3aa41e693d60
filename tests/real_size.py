"""The short form of `benchmarks/real_size.py`: one run, one image, and what the table says about them."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests import warm

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "real_size.py"
SHORT = ("--journey", "train lora", "sample", "--images", "4", "--minutes", "30")
"""A LoRA with its export and proof, and an image with it; with what they need."""
Row = dict[str, Any]


def bench(family: str, out: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run the benchmark, one journey at a time; CUDA cannot start in a fork of the tests' server."""
    command = [warm.REAL_PYTHON, str(SCRIPT), family, str(out), "--lanes", "1", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rows_of(out: Path) -> dict[str, Row]:
    """Return the rows of the table by journey."""
    table = json.loads((out / "table.json").read_text(encoding="utf-8"))
    return {row["journey"]: row for row in table["journeys"]}


def short_form(family: str, out: Path, *words: str) -> dict[str, Row]:
    """Run the short form; return its rows, all of which have passed, with host memory, disk and proof measured."""
    done = bench(family, out, *SHORT, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(out)
    assert list(rows) == ["new", "cache", "train lora", "sample"]
    assert all(row["exit_code"] == 0 and not row["failure"] and row["measured"]["host"] for row in rows.values())
    trained = rows["train lora"]
    assert trained["proof_seconds"] > 0
    assert trained["estimated_proof_seconds"] > 0
    for name in ("cache", "train lora"):
        assert rows[name]["estimated"]["disk"] > 0
        assert rows[name]["measured"]["disk"] > 0
    return rows
