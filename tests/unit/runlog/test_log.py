"""The log is valid JSON line by line, survives being killed, and keeps no secret."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sd3_light.config.faults import UserError
from sd3_light.runlog import RunLog, is_main_process, read_log, set_main_process


@pytest.fixture(autouse=True)
def _main(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.runlog.console._main_process", True)


def events(folder: Path) -> list[dict[str, Any]]:
    return list(read_log(folder / "log.jsonl"))


class Recorder:
    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.points.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


def test_an_event_is_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", tensorboard=False)
    log.event("start", world=2, path=tmp_path, nested={"a": [1, 2.5, None, True]})
    (event,) = events(tmp_path / "run")
    assert list(event)[:2] == ["event", "time"]
    assert event["event"] == "start"
    assert event["time"] > 1e9
    assert event["path"] == str(tmp_path)
    assert event["nested"] == {"a": [1, 2.5, None, True]}
    log.close()
    log.close()


def test_numbers_that_json_does_not_know_are_words(tmp_path: Path) -> None:
    with RunLog(tmp_path, tensorboard=False) as log:
        log.event("step", step=1, loss=math.nan, up=math.inf, down=-math.inf)
        log.event("step", step=2, loss=np.float32(0.5), up=torch.tensor(math.nan), down=np.int64(3))
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    read = [json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in lines]
    assert [[event[name] for name in ("loss", "up", "down")] for event in read] == [
        ["nan", "inf", "-inf"],
        [0.5, "nan", 3],
    ]


@pytest.mark.parametrize("tail", [b'{"event": "st', b"\x00" * 200_000, b""])
def test_a_killed_runs_last_line_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    with RunLog(tmp_path, tensorboard=False) as log:
        log.event("start", text="ü" * 50)
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(tail)
    assert [event["event"] for event in events(tmp_path)] == ["start"]
    with RunLog(tmp_path, tensorboard=False) as log:
        log.event("resume")
    assert [event["event"] for event in events(tmp_path)] == ["start", "resume"]


def test_a_log_that_is_one_broken_line_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b'{"event"')
    RunLog(tmp_path, tensorboard=False).close()
    assert (tmp_path / "log.jsonl").read_bytes() == b""


def test_reading_names_the_broken_line_and_the_missing_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "a"}\n{oops\n{"event": "b"}\n')
    with pytest.raises(UserError, match="line 2"):
        list(read_log(path))
    with pytest.raises(UserError, match="no such log"):
        list(read_log(tmp_path / "other.jsonl"))


def test_secrets_never_get_in(tmp_path: Path) -> None:
    with RunLog(tmp_path, tensorboard=False, secrets=("", "abc", "abcdef")) as log:
        log.event("config", text="key=abcdef!", nested=[{"abc": ("x", "abcabc")}], path=Path("abc/run"))
    text = (tmp_path / "log.jsonl").read_text()
    assert "abc" not in text
    assert "def" not in text
    assert events(tmp_path)[0]["nested"] == [{"***": ["x", "******"]}]


def test_numbers_of_steps_and_evals_reach_tensorboard_and_trackers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = Recorder()
    with RunLog(tmp_path, trackers=[tracker]) as log:
        log.event("start", step=0, ignored=1)
        log.event("step", step=10, loss=0.5, name="x", fine=True)
        log.event("eval", step=10, loss={"0.1": torch.tensor(0.25), "0.9": 1})
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert sorted(curves.Tags()["scalars"]) == ["eval/loss/0.1", "eval/loss/0.9", "train/loss"]
    assert [(point.step, point.value) for point in curves.Scalars("train/loss")] == [(10, 0.5)]
    assert tracker.points == [(10, {"train/loss": 0.5}), (10, {"eval/loss/0.1": 0.25, "eval/loss/0.9": 1})]
    assert tracker.closed == 1


def test_another_field_can_be_the_x_axis(tmp_path: Path) -> None:
    tracker = Recorder()
    with RunLog(tmp_path, tensorboard=False, trackers=[tracker], x_axis="examples") as log:
        log.event("step", step=10, examples=640, loss=0.5)
    assert tracker.points == [(640, {"train/loss": 0.5, "train/step": 10})]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    set_main_process(False)
    with RunLog(tmp_path / "run") as log:
        log.event("step", step=1, loss=1.0)
    assert not (tmp_path / "run").exists()


def test_a_launchers_rank_decides_until_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.runlog.console._main_process", None)
    monkeypatch.delenv("RANK", raising=False)
    assert is_main_process()
    monkeypatch.setenv("RANK", "3")
    assert not is_main_process()
