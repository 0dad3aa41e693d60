"""A LoRA teaches the demo model a new word in minutes, and the rest of what it knows stays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_new_concept_is_learned_and_the_rest_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "lora_concept.py"), "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["before"]["concept"] <= 0.1, "chance"
    assert found["after"]["concept"] >= 0.8
    assert found["after"]["rest"] >= found["before"]["rest"] - 0.05
