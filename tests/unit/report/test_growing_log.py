"""A `RunReader` reads only the lines that were added to a log, and notices a log that is another one."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from sd3_light.report import run_log
from sd3_light.report.curves import NUM_BINS, CurveBuilder
from sd3_light.report.run_log import RunReader, RunReport, read_run
from sd3_light.runlog.log import complete_lines
from tests.refusals import refused

Event = dict[str, Any]


def lines(events: Iterable[Event]) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


def begin(kind: str = "start", step: int = 0, time: float = 1.8e9) -> Event:
    return {"event": kind, "time": time, "step": step, "total": 5000}


def steps(first: int, last: int, loss: float = 1.0, time: float = 1.8e9) -> Iterator[Event]:
    for step in range(first, last + 1):
        fields = {"loss": loss + step % 7, "grad_norm": 0.5, "lr": 1e-4 * step, "band": {"a": step}}
        yield {"event": "step", "time": time + step, "step": step, "samples": 4 * step, **fields}


def rare(step: int) -> list[Event]:
    at = {"time": 1.8e9 + step, "step": step, "weights": "ema"}
    return [
        {"event": "eval", "set": "held", "flow": 0.5, **at},
        {"event": "metrics", "set": "held", "kid": {"value": 0.5, "low": 0.4, "high": 0.6}, **at},
        {"event": "sample", "file": f"samples/{step}.png", **at},
        {"event": "checkpoint", "file": f"step-{step}", **at},
    ]


def append(folder: Path, text: str) -> None:
    with (folder / "log.jsonl").open("a") as log:
        log.write(text)


def started(folder: Path, last: int = 9) -> RunReader:
    """Return a reader that has read a log of a start and steps."""
    append(folder, lines([begin(), *steps(1, last)]))
    reader = RunReader(folder)
    reader.read()
    return reader


def content(report: RunReport) -> dict[str, Any]:
    samples = {"events": report.events, "samples": report.samples}
    listed = {name: {kind: (each.seen, list(each)) for kind, each in value.items()} for name, value in samples.items()}
    return {**vars(report), **listed, "step_range": report.step_range}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the lines that are parsed."""
    numbers: list[int] = []
    parse = run_log.parse_line

    def counting(path: Path, number: int, line: bytes) -> Event:
        numbers.append(number)
        return parse(path, number, line)

    monkeypatch.setattr(run_log, "parse_line", counting)
    return numbers


def test_only_new_lines_are_read_and_the_report_is_that_of_the_whole_log(tmp_path: Path, parsed: list[int]) -> None:
    reader = started(tmp_path, 300)
    first = reader.read()
    assert reader.read() is first
    before = content(first)
    for last in (301, 302, 340):
        append(tmp_path, lines([*steps(last - 1 if last == 302 else last, last), *rare(last)]))
        parsed.clear()
        report = reader.read()
        assert min(parsed) > 301
        assert content(report) == content(read_run(tmp_path))
    assert content(first) == before, "a report that was returned does not change"


def test_a_long_log_stays_short_as_it_grows(tmp_path: Path) -> None:
    append(tmp_path, lines([begin()]))
    reader = RunReader(tmp_path)
    total = 0
    for size in (1, 700, 1500, 5, 3000):
        append(tmp_path, lines(steps(total + 1, total + size)))
        total += size
        loss = reader.read().steps["loss"]
        assert len(loss.x) <= 2 * NUM_BINS
        assert sum(each.size for each in loss.bins) == total
        assert sum(each.total for each in loss.bins) == sum(event["loss"] for event in steps(1, total))
    spike = {**next(steps(total + 1, total + 1)), "loss": 99.0}
    append(tmp_path, lines([spike, *steps(total + 2, total + 9)]))
    assert (total + 1, 99.0) in reader.read().steps["loss"].extremes


def test_bins_that_lack_a_field_are_joined_with_their_neighbours() -> None:
    builder = CurveBuilder(0, ["loss", "rare"])
    for x in range(4 * NUM_BINS):
        builder.add(x, {"loss": "nan" if x == 9 else 1.0, **({"rare": x} if x % 5 == 0 else {})})
    loss, few = builder.curves["loss"], builder.curves["rare"]
    assert loss.bin_size == 4
    assert (len(loss.x), loss.nonfinite) == (NUM_BINS, [9])
    assert sum(each.size for each in few.bins) == 4 * NUM_BINS / 5
    assert few.x == sorted(few.x)
    pieces = iter([b'{"event": "step"}\n', b'{"event": "st', b'ep"}\n', b""])
    file: Any = SimpleNamespace(readline=lambda _: next(pieces))
    assert list(complete_lines(file)) == [(1, b'{"event": "step"}\n')]


def test_a_scanned_log_is_scanned_in_growth(tmp_path: Path, parsed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "MOST_PARSED", 10)
    reader = started(tmp_path, 1000)
    parsed.clear()
    append(tmp_path, lines(steps(1001, 1100)))
    assert reader.read().last["step"]["step"] == 1100
    assert len(parsed) < 10


def test_a_line_without_its_newline_is_read_when_it_is_complete(tmp_path: Path) -> None:
    reader = started(tmp_path, 3)
    text = lines(steps(4, 4))
    append(tmp_path, text[:20])
    assert reader.read().last["step"]["step"] == 3
    append(tmp_path, text[20:])
    assert reader.read().last["step"]["step"] == 4
    append(tmp_path, text[:20])
    reader.read()
    # what a resumed run does: it removes the incomplete line of the killed one
    os.truncate(tmp_path / "log.jsonl", (tmp_path / "log.jsonl").stat().st_size - 20)
    append(tmp_path, lines(steps(5, 5)))
    assert content(reader.read()) == content(read_run(tmp_path))


@pytest.mark.parametrize("kind", ["start", "resume"])
def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path, kind: str) -> None:
    reader = started(tmp_path)
    append(tmp_path, lines([begin(kind, 4, 1.8e9 + 50), *steps(5, 6, 3.0)]))
    assert content(reader.read()) == content(read_run(tmp_path))
    append(tmp_path, lines(steps(7, 7, 3.0)))
    assert content(reader.read()) == content(read_run(tmp_path))


def test_another_log_in_its_place_is_read_from_the_start(tmp_path: Path) -> None:
    log, reader = tmp_path / "log.jsonl", started(tmp_path)
    other = lines([begin(time=1.9e9), *steps(1, 30, 5.0, 1.9e9)])
    log.write_text(other)  # the same file, longer than before
    assert content(reader.read()) == content(read_run(tmp_path))
    (tmp_path / "new").write_text(lines([begin(time=1.7e9), *steps(1, 40, 2.0, 1.7e9)]))
    (tmp_path / "new").rename(log)
    assert content(reader.read()) == content(read_run(tmp_path))
    log.write_text("")
    assert reader.read().steps == {}
    log.write_text(other)
    assert reader.read().last["step"]["step"] == 30
    log.unlink()
    refused("no such log", reader.read)
    log.write_text(other)
    assert reader.read().last["step"]["step"] == 30
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:5]))
    assert reader.read().last["step"]["step"] == 4


def test_a_faulty_line_is_named_until_it_is_removed(tmp_path: Path, parsed: list[int]) -> None:
    reader = started(tmp_path)
    good = (tmp_path / "log.jsonl").read_text()
    append(tmp_path, "oops\n")
    for _ in range(2):
        refused("line 11 is not JSON", reader.read)
    parsed.clear()
    refused("line 11 is not JSON", reader.read)
    assert parsed == [], "the same file is not read twice"
    (tmp_path / "log.jsonl").write_text(good)
    assert reader.read().last["step"]["step"] == 9


def test_several_threads_read_a_growing_log(tmp_path: Path) -> None:
    reader, barrier = started(tmp_path, 200), Barrier(4)
    counts: list[int] = []

    def read() -> None:
        barrier.wait()
        for _ in range(20):
            counts.append(len(reader.read().steps["loss"].x))

    threads = [Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    barrier.wait()
    for step in range(201, 240):
        append(tmp_path, lines(steps(step, step)))
    for thread in threads:
        thread.join()
    assert len(counts) == 60
    assert content(reader.read()) == content(read_run(tmp_path))
