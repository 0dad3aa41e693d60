"""Odd numbers in a log: every page and the table show the run, or one line says which line of the log is at fault."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config.faults import UserError
from sd3_light.report import verb as stage
from sd3_light.ui.folders import Folders, folder_id
from sd3_light.ui.run_pages import compare_page, run_page, runs_page
from tests.refusals import refused

ODD: list[Any] = [1e308, -1e308, 1e-320, None, "nan", math.nan, 2**53 - 1]
NOT_DRAWN = ("nan,", ",nan", "inf,", ",inf", "nan%", "inf%")

STEP: dict[str, Any] = {"skipped": 0, "epoch": 0.1, "loss": 0.5, "flow": 0.5, "text_recon": 0.1}
STEP |= {"lr": 1e-4, "grad_norm": 0.3}
STEP |= {"param_norm": 9.0, "samples_per_second": 4.0, "data_wait": 0.1, "mfu": 0.4, "gpu_memory_gib": 1.0}
STEP |= {"host_memory_gib": 2.0, "seconds": 1.0, "band": {"0.0-0.1": 0.5, "0.1-0.2": 0.6}, "ema_decay": {"ema": 0.9}}
GROUP = {"value": 0.5, "low": 0.4, "high": 0.6}
EVENTS: list[dict[str, Any]] = [
    {"event": "start", "step": 0, "total": 9, "world": 2, "device": "CPU", "engine": "torch"},
    *({"event": "step", "step": step, "samples": 4 * step, **STEP} for step in range(5, 7)),
    {"event": "eval", "step": 6, "set": "held", "weights": "ema", "flow": 0.5, "fixed": 0.5, "flow@0.1": 0.4},
    {"event": "eval", "step": 7, "set": "held", "weights": "ema", "flow": 0.5, "fixed": 0.5, "flow@0.1": 0.4},
    {"event": "metrics", "step": 6, "set": "held", "weights": "ema", "kid": GROUP},
    {"event": "skip", "step": 6, "loss": 0.5, "grad_norm": 0.3},
    {"event": "export", "step": 6, "file": "step-6", "bytes": 9, "seconds": 2.0, "stall_seconds": 0.1},
    {"event": "resume", "step": 6, "total": 9, "world": 2},
    {"event": "stop", "step": 6, "reason": "finished"},
]
TIMED = [{"time": 1.8e9 + index, **event} for index, event in enumerate(EVENTS)]


def write(folder: Path, events: Iterable[dict[str, Any]]) -> None:
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def changed(value: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield logs in which one number, also of a nested table, is ``value``; of steps in the last."""
    for index, event in enumerate(TIMED):
        if event["event"] == "step" and event["step"] < 6:
            continue
        for name, old in event.items():
            if isinstance(old, dict):
                yield _with(index, name, {**old, next(iter(old)): value})
            elif not isinstance(old, str):
                yield _with(index, name, value)


def _with(index: int, name: str, value: Any) -> list[dict[str, Any]]:
    return [*TIMED[:index], {**TIMED[index], name: value}, *TIMED[index + 1 :]]


def show(folder: Path, run_id: str) -> None:
    """Show the run everywhere; a UserError must be the same at every place."""
    folders = Folders([folder])
    try:
        report = stage.run(folder)
    except UserError as error:
        for page in (lambda: stage.write_run_page(folder, folder / "page.html"), lambda: run_page(folders, run_id)):
            refused(f"^{re.escape(str(error))}$", page)
        assert "remove that line" in runs_page(folders)
        return
    stage.render(report)
    for page in (runs_page(folders), run_page(folders, run_id), compare_page(folders, [run_id])):
        charts = page.partition("<main")[2].partition('id="events"')[0].partition("<script")[0]
        assert not [text for text in NOT_DRAWN if text in charts]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_every_page_shows_a_log_with_an_odd_number(tmp_path: Path, value: Any) -> None:
    run_id = folder_id(tmp_path)
    for events in changed(value):
        write(tmp_path, events)
        show(tmp_path, run_id)


@pytest.mark.parametrize("group", [{"value": "x"}, {"value": [1]}, 3, "x"], ids=repr)
def test_a_measurement_that_is_not_numbers_is_named(tmp_path: Path, group: Any) -> None:
    write(tmp_path, [{"event": "metrics", "time": 1.8e9, "step": 1, "set": "a", "weights": "b", "kid": group}])
    refused("line 1: kid is not a table of numbers; remove that line", stage.run, tmp_path)


def test_huge_values_and_steps_that_are_not_whole_are_handled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [{**event, "loss": 1e300} if event.get("step") == 5 else event for event in TIMED]
    write(tmp_path, events)
    loss = stage.run(tmp_path).steps["loss"]
    assert (loss.nonfinite, [x for x, _ in loss.points]) == ([5], [6])
    steps = [{"event": "step", "time": 1.8e9, "step": step, "loss": 1e30 if step == 9 else 0.5} for step in range(200)]
    write(tmp_path, steps)
    assert stage.run(tmp_path).steps["loss"].smooth()[0][-1] == (199, 0.5)
    monkeypatch.setattr("sd3_light.report.run_log.MOST_PARSED", 1)
    common = {"event": "step", "time": 1.8e9}
    write(tmp_path, [{**common, "step": step, "loss": 0.5, "grad_norm": 0.5, "lr": 1} for step in (1, 2, 2.5, 3)])
    refused("line 3: step is not a whole number", stage.run, tmp_path)
