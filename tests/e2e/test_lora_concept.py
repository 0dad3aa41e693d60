"""A LoRA teaches the demo model a new word in minutes without losing other concepts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_new_concept_is_learned_and_others_are_kept(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "lora_concept.py"), "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout.strip().splitlines()[-1])
    assert scores["before"]["concept"] <= 0.1, "chance"
    assert scores["after"]["concept"] >= 0.8
    assert scores["after"]["rest"] >= scores["before"]["rest"] - 0.05
