"""The demo as users run it: its duration, and the scores stated in the README and the recipes."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.warm import REAL_PYTHON

MINUTES = 6


@pytest.mark.timed
@pytest.mark.timeout(1800)
def test_the_full_demo_is_fast_and_reaches_its_scores(tmp_path: Path) -> None:
    out = tmp_path / "demo_run"
    started = time.monotonic()
    command = [str(Path(REAL_PYTHON).with_name("sd3-light")), "demo", "--out", str(out)]
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # set for the other tests
    environment = {name: value for name, value in os.environ.items() if name not in threads}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)
    minutes = (time.monotonic() - started) / 60

    pretrained, shipped = (_score(out / run / "score.json") for run in ("pretrain", "continue"))
    assert shipped["all"] >= 0.95
    assert pretrained["background"] >= 0.95
    assert pretrained["all"] >= 0.2
    # a few minutes are enough for the colour in prompts with one, but not for two colours or shapes
    assert min(pretrained["by_kind"][kind]["colour"] for kind in ("single", "count")) >= 0.9
    assert (out / "grid.png").stat().st_size > 10_000
    assert minutes < MINUTES


def _score(path: Path) -> dict[str, Any]:
    score: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return score
