"""The demo as users run it: its duration, and the scores stated in the README and the recipes."""

import json
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
    subprocess.run(command, check=True, cwd=tmp_path)
    minutes = (time.monotonic() - started) / 60

    pretrained, shipped = (_score(out / run / "score.json") for run in ("pretrain", "continue"))
    assert shipped["all"] >= 0.95
    assert pretrained["background"] >= 0.95
    # two minutes are enough for the colour in prompts with one, but not for two colours or shapes
    assert min(pretrained["by_kind"][kind]["colour"] for kind in ("single", "count")) >= 0.9
    assert (out / "grid.png").stat().st_size > 10_000
    assert minutes < MINUTES


def _score(path: Path) -> dict[str, Any]:
    score: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return score
