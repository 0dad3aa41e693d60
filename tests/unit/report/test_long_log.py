"""Long logs: previews, the ends that lists read, and finer curves between two steps."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config.faults import UserError
from sd3_light.report import run_log
from sd3_light.report.run_ends import LAST_LOSSES, read_ends
from sd3_light.report.run_log import RunReader, RunReport, read_preview, read_run
from tests.refusals import refused

Event = dict[str, Any]


def step(number: int, loss: float) -> Event:
    fields = {"samples": 4 * number, "loss": loss, "grad_norm": 0.5, "lr": 1e-4 * number, "band": {"a": number}}
    return {"event": "step", "time": 1.8e9 + number, "step": number, **fields}


def events(count: int) -> Iterator[Event]:
    """Yield a run that resumed at 3/4 of its steps from 1/2 of them, with another loss, and evaluated at 2/3."""
    yield {"event": "start", "time": 1.8e9, "step": 0, "samples": 0, "total": count}
    for number in range(1, 3 * count // 4):
        yield step(number, 1.0 + number)
        if number == 2 * count // 3:
            yield {"event": "eval", "time": 1.8e9, "step": number, "set": "held", "weights": "ema", "flow": 0.25}
    yield {"event": "resume", "time": 1.9e9, "step": count // 2, "samples": 0, "total": count}
    yield from (step(number, 1.5 + number) for number in range(count // 2 + 1, count + 1))


def write(folder: Path, lines: Iterator[Event]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("long"), events(20_000))


def test_a_preview_has_few_lines_of_the_kept_steps(long_run: Path) -> None:
    preview = read_preview(long_run, 100)
    loss = preview.steps["loss"]
    assert preview.is_preview
    assert sum(each.size for each in loss.bins) < 600
    assert (loss.x[0], preview.last["step"]["step"]) == (1, 20_000)
    assert preview.begin["event"] == "start"
    middle = [(x, y) for x, y in loss.points if 200 < x < 19_500]
    assert len(middle) > 80
    assert [x for x, _ in loss.points] == sorted({x for x, _ in loss.points})
    assert {round(y - x, 3) for x, y in middle} == {1.0, 1.5}, "before and after the resume"
    assert not any(x > 10_300 and round(y - x, 3) == 1.0 for x, y in middle), "the resumed run repeated these"
    ends, whole = read_ends(long_run), read_run(long_run)
    assert (ends.status, ends.begin, ends.last["step"]) == (whole.status, whole.last["start"], whole.last["step"])
    expected = sum(1.5 + number for number in range(20_001 - LAST_LOSSES, 20_001)) / LAST_LOSSES
    assert ends.steps["loss"].mean == [pytest.approx(expected)]


@pytest.mark.parametrize("count", [1, 2, 30, 90, 300, 400])
def test_a_preview_and_the_ends_of_a_short_log_are_all_of_it(tmp_path: Path, count: int) -> None:
    run = write(tmp_path, events(count))
    ends, whole, preview = read_ends(run), read_run(run), read_preview(run)
    assert preview.steps["loss"].last == whole.steps["loss"].last
    assert preview.steps["loss"].points[0] == whole.steps["loss"].points[0]
    assert (ends.status, ends.begin, ends.last) == (whole.status, whole.begin, whole.last)
    assert ends.evals.keys() == whole.evals.keys()
    assert ends.steps["loss"].last == whole.steps["loss"].last


@pytest.mark.parametrize("text", ["", "{", "\n", "[]\n", '{"event": "step"}\n'])
def test_the_ends_of_a_damaged_log_name_the_fault_as_the_report_does(tmp_path: Path, text: str) -> None:
    (tmp_path / "log.jsonl").write_text(text)

    def said(read: Callable[[Path], RunReport]) -> str:
        try:
            return read(tmp_path).status
        except UserError as error:
            return str(error)

    assert said(read_ends) == said(read_run)


def test_a_long_log_is_read_in_the_background_and_finer(long_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RunReader(long_run)
    assert reader.look(1000).is_preview
    assert reader.look(1000).is_preview, "until it is read"
    reader.wait()
    report = reader.look(1000)
    assert not report.is_preview
    assert report.steps["loss"].bins == read_run(long_run).steps["loss"].bins
    assert not RunReader(long_run).look(1 << 30).is_preview
    reader = RunReader(long_run)
    assert reader.window(1, 9, ["loss"]) == {}, "it was not read"
    reader.read()
    for first, last in ((1, 50), (9_980, 10_020), (14_990, 15_010), (19_990, 1e9)):
        curves = reader.window(first, last, ["loss", "band/a", "nothing"])
        numbers = range(first, min(20_000, int(last)) + 1)
        expected = [(number, (1.5 if number > 10_000 else 1.0) + number) for number in numbers]
        assert curves["loss"].points == expected
        assert curves["band/a"].points == [(number, number) for number in numbers]
        assert curves.keys() == {"loss", "band/a"}
    assert reader.window(5, 4, ["loss"]) == {}
    monkeypatch.setattr(run_log, "MOST_FINE_BYTES", 100_000)
    reader = RunReader(long_run)
    reader.read()
    assert reader.window(1, 20_000, ["loss"]) == {}
    assert reader.window(1, 50, ["loss"])["loss"].bin_size == 1


def test_a_fault_found_in_the_background_is_raised_by_the_next_look(long_run: Path, tmp_path: Path) -> None:
    text = (long_run / "log.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "log.jsonl").write_text("".join([*text[:7000], "oops\n", *text[7000:]]))
    reader = RunReader(tmp_path)
    reader.look(1000)
    reader.wait()
    refused("line 7001 is not JSON", reader.look, 1000)
