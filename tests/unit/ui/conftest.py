"""Runs of `sd3-light ui` as files: logs, grids that say where their images are, a config."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sd3_light.sample.grid import make_grid
from sd3_light.sample.png import save_png

PROMPTS, SEEDS = ("a red cat", "一只蓝色的狗"), (0, 7)


def write_grid(path: Path, color: int, cells: bool = True) -> None:
    """Write a grid as training does; image number n is (color, 10 * n, 0)."""
    keys = [(prompt, seed) for prompt in PROMPTS for seed in SEEDS]
    images = [Image.new("RGB", (64, 48), (color, 10 * number, 0)) for number in range(len(keys))]
    grid = make_grid(images, [f"{prompt} (seed {seed})" for prompt, seed in keys], columns=2, title="step")
    facts: dict[str, Any] = {"prompts": list(PROMPTS), "seeds": list(SEEDS)}
    save_png(grid, path, facts | ({"cells": grid.info["cells"]} if cells else {}))


def write_run(folder: Path, steps: int = 40, total: int = 80, offset: float = 0.0, cells: bool = True) -> Path:
    """Write a run that has done ``steps`` of ``total`` steps, one per second."""
    start = {"event": "start", "step": 0, "total": total, "world": 1, "device": "CPU", "engine": "torch", "time": 1.8e9}
    events: list[dict[str, Any]] = [start]
    for step in range(1, steps + 1):
        loss = offset + 0.5 + math.exp(-step / 10)
        record = {"event": "step", "step": step, "samples": 4 * step, "loss": loss, "lr": 1e-4, "grad_norm": 0.5}
        events.append({**record, "time": 1.8e9 + step, "samples_per_second": 4.0, "skipped": 0})
        if step % 10 == 0:
            file, time = f"samples/step-{step:08d}.png", 1.8e9 + step
            common = {"step": step, "weights": "ema", "time": time}
            events.append({"event": "eval", **common, "set": "held_out", "flow": loss})
            events.append({"event": "sample", **common, "file": file})
            write_grid(folder / file, step, cells)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(f"[sampling]\nprompts = {json.dumps(PROMPTS)}\n")
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture
def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that lets a shell script run in the place of every started interpreter."""

    def replace(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "first")
    write_run(tmp_path / "deep" / "second", total=40, offset=0.1)
    return tmp_path
