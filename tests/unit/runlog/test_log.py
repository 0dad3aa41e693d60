"""The log: valid JSON line by line, repaired after a kill, without secrets."""

import io
import json
import math
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd3_light.runlog import RunLog, info, is_main_process, read_log, set_main_process
from sd3_light.runlog.log import parse_event
from tests.refusals import refused


def events(folder: Path) -> list[dict[str, Any]]:
    return list(read_log(folder / "log.jsonl"))


class Recorder:
    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.images: list[tuple[int, str, tuple[int, int]]] = []
        self.closed = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.points.append((step, dict(values)))

    def image(self, name: str, image: Image.Image, step: int) -> None:
        self.images.append((step, name, image.size))

    def close(self) -> None:
        self.closed += 1


def test_an_event_is_written_immediately(tmp_path: Path) -> None:
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


def test_numbers_that_are_not_finite_are_strings_and_valid(tmp_path: Path) -> None:
    with RunLog(tmp_path, tensorboard=False) as log:
        log.event("step", step=1, loss=math.nan, up=math.inf, down=-math.inf)
        log.event("step", step=2, loss=np.float32(0.5), up=torch.tensor(math.nan), down=np.int64(3))
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    read = [json.loads(line, parse_constant=lambda constant: pytest.fail(constant)) for line in lines]
    values = [[event[name] for name in ("loss", "up", "down")] for event in read]
    assert values == [["nan", "inf", "-inf"], [0.5, "nan", 3]]
    line = b'{"event": "step", "loss": "nan", "band": {"0": "inf", "1": null}, "lr": 1e-4}\n'
    assert parse_event(tmp_path / "log.jsonl", 1, line)["loss"] == "nan"


@pytest.mark.parametrize("tail", [b'{"event": "st', b"\x00" * 200_000, b""])
def test_the_incomplete_last_line_of_a_killed_run_is_removed(tmp_path: Path, tail: bytes) -> None:
    with RunLog(tmp_path, tensorboard=False) as log:
        log.event("start", text="ü" * 50)
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(tail)
    assert [event["event"] for event in events(tmp_path)] == ["start"]
    with RunLog(tmp_path, tensorboard=False) as log:
        log.event("resume")
    assert [event["event"] for event in events(tmp_path)] == ["start", "resume"]
    (tmp_path / "log.jsonl").write_bytes(b'{"event"')
    RunLog(tmp_path, tensorboard=False).close()
    assert (tmp_path / "log.jsonl").read_bytes() == b""


def test_an_invalid_line_and_a_missing_log_are_user_errors(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "a"}\n{oops\n{"event": "b"}\n')
    refused("line 2", list, read_log(path))
    refused("no such log", list, read_log(tmp_path / "other.jsonl"))


def test_secrets_are_removed(tmp_path: Path) -> None:
    with RunLog(tmp_path, tensorboard=False, secrets=("", "abc", "abcdef")) as log:
        log.event("config", text="key=abcdef!", nested=[{"abc": ("x", "abcabc")}], path=Path("abc/run"))
    text = (tmp_path / "log.jsonl").read_text()
    assert "abc" not in text
    assert "def" not in text
    assert events(tmp_path)[0]["nested"] == [{"***": ["x", "******"]}]


def test_numbers_of_steps_and_evals_become_named_curves(tmp_path: Path) -> None:
    tracker = Recorder()
    with RunLog(tmp_path, tensorboard=False, trackers=[tracker]) as log:
        log.event("start", step=0, ignored=1)
        band, decay = {"0.0-0.1": torch.tensor(0.25), "0.9-1.0": 1}, {"ema": 0.99}
        log.event("step", step=10, samples=640, loss=0.5, name="x", fine=True, band=band, ema_decay=decay)
        for name, weights in (("held", "raw"), ("held", "ema"), ("coco", "ema")):
            log.event("eval", step=10, samples=640, set=name, weights=weights, flow=0.3, **{"flow@0.1": 0.2})
    step, *evals = tracker.points
    assert step == (
        10,
        {
            "train/samples": 640,
            "train/loss": 0.5,
            "train/band/0.0-0.1": 0.25,
            "train/band/0.9-1.0": 1,
            "train/ema_decay/ema": 0.99,
        },
    )
    assert [(x, list(values)) for x, values in evals] == [
        (10, ["eval/held/raw/flow", "eval/held/raw/flow@0.1"]),
        (10, ["eval/held/ema/flow", "eval/held/ema/flow@0.1"]),
        (10, ["eval/coco/ema/flow", "eval/coco/ema/flow@0.1"]),
    ]
    assert tracker.closed == 1


def test_another_field_is_the_x_axis_of_points_and_images(tmp_path: Path) -> None:
    tracker = Recorder()
    with RunLog(tmp_path, tensorboard=False, trackers=[tracker], x_axis="samples") as log:
        log.image("samples/ema", Image.new("RGB", (8, 4)), step=10, samples=640)
        assert events(tmp_path) == [], "an image adds no line"
        log.event("step", step=20, samples=1280, loss=0.5)
    assert tracker.images == [(640, "samples/ema", (8, 4))]
    assert tracker.points == [(1280, {"train/loss": 0.5, "train/step": 20})]


def test_threads_write_complete_lines(tmp_path: Path) -> None:
    with RunLog(tmp_path, tensorboard=False) as log, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda step: log.event("checkpoint", step=step, text="x" * 20_000), range(200)))
    assert sorted(event["step"] for event in events(tmp_path)) == list(range(200))


def test_a_full_disk_loses_no_line(tmp_path: Path, limit_file_size: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path, tensorboard=False) as log:
        log.event("start", text="x" * 100)
        limit_file_size((tmp_path / "log.jsonl").stat().st_size + 20)  # the next line is written in part
        for step in (1, 2, 3):
            log.event("step", step=step, loss=0.5)
        assert [event["event"] for event in events(tmp_path)] == ["start"]
        limit_file_size(1 << 20)
        log.event("step", step=4, loss=0.5)
        assert [event.get("step") for event in events(tmp_path)] == [None, 1, 2, 3, 4]
        limit_file_size(1)
        log.event("stop")
    messages = capsys.readouterr().err
    assert messages.count("log.jsonl (File too large); lines stay in memory until there is space") == 2
    assert "log.jsonl: no space for the last lines, 1 lost" in messages


def test_a_message_that_cannot_be_printed_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[str] = []

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            attempts.append(text)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    info("hello")
    monkeypatch.undo()
    assert "hello" in "".join(attempts)
    info("")  # flush what is pending, so that no other test prints it


def test_a_mirror_that_fails_is_disabled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Full(Recorder):
        def log(self, values: Mapping[str, float], step: int) -> None:
            super().log(values, step)
            raise OSError(28, "No space left on device")

    full, other = Full(), Recorder()
    with RunLog(tmp_path, tensorboard=False, trackers=[full, other]) as log:
        for step in (1, 2):
            log.event("step", step=step, loss=0.5)
    assert [step for step, _ in other.points] == [1, 2]
    assert ([step for step, _ in full.points], full.closed) == ([1], 0)
    assert capsys.readouterr().err == "Full failed and is disabled until the next start: No space left on device\n"


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    set_main_process(False)
    with RunLog(tmp_path / "run") as log:
        log.event("step", step=1, loss=1.0)
        log.image("samples/ema", Image.new("RGB", (8, 4)), step=1)
    assert not (tmp_path / "run").exists()


def test_the_launchers_rank_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.runlog.console._main_process", None)
    monkeypatch.delenv("RANK", raising=False)
    assert is_main_process()
    monkeypatch.setenv("RANK", "3")
    assert not is_main_process()


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ('"step": "x"', "step is not a whole number"),
        ('"step": true', "step is not a whole number"),
        ('"step": 0.5', "step is not a whole number"),
        ('"time": 1e15', "time is not a time in seconds since 1970"),
        ('"time": -1', "time is not a time in seconds since 1970"),
        ('"flow": [1]', "flow is not a number"),
        ('"seconds": "x"', "seconds is not a number"),
        ('"band": 3', "band is not a table of numbers"),
        ('"band": {"0": "x"}', "band is not a table of numbers"),
        ('"weights": []', "weights is not a text"),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path: Path, field: str, message: str) -> None:
    line = f'{{"event": "step", {field}}}\n'.encode()
    refused(rf"log\.jsonl: line 7: {message}; remove that line", parse_event, tmp_path / "log.jsonl", 7, line)
