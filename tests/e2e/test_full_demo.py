"""The demo as users run it, and the scripts that make its assets, at toy size."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from diffusers import SD3Transformer2DModel
from safetensors import safe_open

from sd3_light.model.folder import check_configs, missing_parts
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


SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_chain_leaves_a_folder_to_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = ("demo_probe", "demo_parts", "demo_hashes", "demo_base")
    probe, _, hashes, base = (importlib.import_module(name) for name in names)
    monkeypatch.setattr(probe.fit, "__defaults__", (2,))
    overrides = ("max_steps=20", "micro_batch_size_per_gpu=4", "warmup_steps=1", "num_dataloader_workers=0")
    options = ("--images", "64", "--held-out", "4", "--text-steps", "2", "--text-batch", "8", "--processes", "1")
    words = [*options, "--prompts", "3", *(word for one in (*overrides, "logging_steps=1") for word in ("--set", one))]
    monkeypatch.setattr(sys, "argv", ["demo_base.py", str(tmp_path / "out"), *words])
    base.main()
    out, assets = tmp_path / "out", tmp_path / "out" / "assets"
    scores = json.loads((out / "scores.json").read_text(encoding="utf-8"))
    assert scores["export"] == "step-00000020"
    assert set(scores["seconds"]) == {"images and parts", "cache", "train", "evaluate", "assets"}
    assert missing_parts(assets, transformer=True) == ()
    check_configs(assets)
    assert hashes.differences(assets) == []
    assert not [path for path in assets.rglob("*.json*") if str(tmp_path) in path.read_text(encoding="utf-8")]
    for path in assets.rglob("*.safetensors"):
        with safe_open(path, "np") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}, path  # noqa: SIM118
    transformer = SD3Transformer2DModel.from_pretrained(assets / "transformer")
    assert transformer.config.num_layers == 4
    log = (assets / "transformer" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [event["step"] for event in map(json.loads, log) if event["event"] == "step"] == [10, 20]
