"""The speed of a CPU by a few steps of the real layers: what is timed, and how it is extrapolated."""

import itertools
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from sd3_light.assets import DEMO
from sd3_light.check import step_time, timed_step
from sd3_light.check import verb as check
from sd3_light.cli import app
from sd3_light.config import SIZES
from sd3_light.core.columns import Bucket
from sd3_light.cost.training_flops import training_flops
from sd3_light.families.sd3.cost import SD3Cost
from sd3_light.new import verb as new
from sd3_light.system import Gpu
from tests.project import Project
from tests.stock import save_stock


@pytest.fixture
def lora(tmp_path: Path, raw_project: Project) -> Path:
    gpu = Gpu("a GPU", 24 << 30)
    return new.run("lora", str(raw_project.images), str(DEMO), tmp_path / "lora", gpus=(gpu,)).train_toml


def test_a_small_denoiser_is_timed_with_its_own_batch(lora: Path) -> None:
    loaded = check.load(lora, ["micro_batch_size_per_gpu=4"])
    estimate = check.run(loaded)
    row = max(estimate.data.rows, key=lambda row: row.samples)
    expected = (row.bucket, 4, row.step_flops.value)
    assert step_time._timed_size(loaded.train, estimate, None) == expected
    assert step_time._timed_size(loaded.train, estimate, 2) == (row.bucket, 2, row.step_flops.value // 2)


@pytest.mark.parametrize(
    ("size", "side", "bucket"),
    [("sd3_light", 64, Bucket(64, 64)), ("sd3_light", 2048, Bucket(256, 256)), ("sd3.5_medium", 1024, None)],
)
def test_large_images_are_timed_with_smaller_ones(
    lora: Path, monkeypatch: pytest.MonkeyPatch, size: str, side: int, bucket: Bucket | None
) -> None:
    """What holds too many weights is not timed."""
    monkeypatch.setattr(step_time, "available_memory", lambda: 2 << 30)
    monkeypatch.setattr(step_time, "usable_cores", lambda: 16)
    loaded = check.load(lora)
    estimate = check.run(loaded)
    cost = SD3Cost(SIZES[size], loaded.train.model)
    row = replace(estimate.data.rows[0], bucket=Bucket(side, side), micro_batch=4)
    flops = training_flops(cost, cost.tokens(row.bucket), adapter=True).value
    row = replace(row, global_batch=1, step_flops=replace(row.step_flops, value=flops))
    large = replace(estimate, setup=replace(estimate.setup, cost=cost), data=replace(estimate.data, rows=(row,)))
    timed = step_time._timed_size(loaded.train, large, None)
    assert (timed and timed[0]) == bucket
    if timed is not None and side > 1024:
        assert timed[2] < flops
        assert 1 <= timed[1] <= 4


def test_depth_is_extrapolated_from_the_blocks_times(lora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances by one whenever it is read."""
    loaded = check.load(lora)
    batch = timed_step.made_up_batch(loaded.train, Bucket(64, 64), 2)
    start = check.require(loaded)
    monkeypatch.setattr(timed_step, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    # of 4 blocks the last one has no text output: 3 are of the first kind, and one step reads the clock 8 times
    assert timed_step.step_seconds(loaded.train, start, batch, whole=False) == 7 * (1 + 2 / 5)
    assert timed_step.step_seconds(loaded.train, start, batch, whole=True) == 11


@pytest.mark.parametrize("name", ["demo", "flux", "wan"])
def test_a_step_is_timed_in_another_process(tmp_path: Path, raw_project: Project, name: str) -> None:
    model = DEMO if name == "demo" else save_stock(name, tmp_path / "model")
    gpu = Gpu("a GPU", 24 << 30)
    out = tmp_path / "out"
    project = new.run("lora", str(raw_project.images), str(model), out, 64, (gpu,))
    keys = ["optimizer.lr=1e-3"]
    loaded = check.load(project.train_toml, keys)
    speed = step_time.cpu_speed(loaded, keys, check.run(loaded))
    assert speed is not None
    assert 1e4 < speed < 1e14


@pytest.mark.parametrize("ends", ["with an error", "never"])
def test_a_step_that_cannot_run_is_not_timed(lora: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    def run(command: list[str], timeout: float, **_: Any) -> Any:
        assert json.loads(command[-1])["overrides"] == []
        if ends == "never":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=1, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    loaded = check.load(lora)
    assert step_time.cpu_speed(loaded, (), check.run(loaded)) is None


def test_check_on_a_cpu_times_steps(lora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.system.visible_gpus", lambda: [])
    monkeypatch.setattr(check, "cpu_speed", lambda *_: 1e9)
    result = CliRunner().invoke(app, ["check", str(lora)], env={"COLUMNS": "200"})
    assert "by a few steps timed here" in result.output
