"""Reading a run's log: repeated steps count once, spikes are kept, memory is bounded, and unusual logs work."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sd3_light.report import verb as stage
from sd3_light.report.curves import NUM_BINS, CurveBuilder
from sd3_light.report.run_charts import _ramp_color, validation_charts, x_table
from sd3_light.report.run_log import MOST_EVENTS, MOST_PARSED, EvenSample
from tests.refusals import refused

Event = dict[str, Any]
Write = Callable[..., Path]


def event(kind: str, seconds: float, **fields: Any) -> Event:
    return {"event": kind, "time": 1.8e9 + seconds, **fields}


def step(number: int, loss: float | str, **fields: Any) -> Event:
    return event("step", number, step=number, samples=64 * number, skipped=0, loss=loss, **fields)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_log(events: Iterable[Event], tail: str = "") -> Path:
        with (tmp_path / "log.jsonl").open("w") as file:
            file.writelines(json.dumps(each) + "\n" for each in events)
            file.write(tail)
        return tmp_path

    return write_log


def table_text(folder: Path) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(stage.render(stage.run(folder)))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def loss_of(folder: Path) -> list[tuple[float, float]]:
    return stage.run(folder).steps["loss"].points


def test_steps_that_a_resumed_run_repeats_count_once_as_last_logged(write: Write) -> None:
    folder = write(
        [
            event("start", 0, step=0, total=8),
            *(step(x, 1.0) for x in range(1, 7)),
            event("eval", 6, step=6, set="held", weights="ema", flow=1.0),
            event("resume", 100, step=4, total=8),
            step(5, 2.0),
            event("resume", 200, step=2, total=8),
            step(3, 3.0),
        ]
    )
    report = stage.run(folder)
    # steps after a resume point come from an abandoned part of the run
    assert report.steps["loss"].points == [(1, 1.0), (2, 1.0), (3, 3.0)]
    assert report.evals == {}
    assert report.last["step"]["step"] == 3
    assert report.resumes == [(4, 1.8e9 + 100), (2, 1.8e9 + 200)]
    assert report.seconds == pytest.approx(6 + 0 + 0)
    folder = write([event("start", 0, step=0), step(1, 1.0), step(2, 1.0), event("start", 9, step=0), step(1, 2.0)])
    assert loss_of(folder) == [(1, 2.0)]


def test_nothing_of_an_earlier_run_is_shown(write: Write) -> None:
    """After `train --restart` the log has two runs."""
    earlier = [
        event("start", 0, step=0, total=9),
        step(1, 1.0),
        event("eval", 1, step=0, set="held", weights="raw", flow=1.0),
        event("metrics", 1, step=0, set="held", weights="raw", kid={"value": 1.0}),
        event("sample", 1, step=1, weights="ema", file="samples/step-1.png"),
        event("checkpoint", 1, step=1, file="step-1"),
        event("resume", 50, step=1, total=9),
        event("stop", 60, step=1, reason="SIGTERM"),
    ]
    report = stage.run(write([*earlier, event("start", 100, step=0, total=9), step(1, 2.0)]))
    assert (report.resumes, len(report.segments)) == ([], 1)
    assert (report.samples, report.evals, report.metrics) == ({}, {}, {})
    assert set(report.events) == {"start"}
    assert set(report.last) == {"start", "step"}
    assert report.status == "at step 1; running, or killed"
    assert report.earlier_runs == 1
    text = table_text(report.folder)
    assert re.search(r"earlier runs\s+│ 1, not shown", text)
    assert "step-1" not in text
    stage.write_run_page(report.folder, report.folder / "page.html")
    page = (report.folder / "page.html").read_text(encoding="utf-8")
    assert "The log also has 1 earlier run: only the last one is shown." in page


def test_evaluations_are_separate_by_set_and_weights(write: Write) -> None:
    keys = [("held", "raw"), ("held", "ema"), ("coco", "ema")]
    losses = {"flow": 0.5, "flow@0.1": 0.25, "flow@0.9": "nan"}
    folder = write(event("eval", 1, step=x, set=name, weights=kind, **losses) for x in (0, 10) for name, kind in keys)
    evals = stage.run(folder).evals
    assert list(evals) == keys
    assert evals["held", "ema"]["flow@0.1"].points == [(0, 0.25), (10, 0.25)]
    assert evals["held", "ema"]["flow@0.9"].points == []


def test_spikes_means_and_nonfinite_values_survive_thinning() -> None:
    count = 20 * NUM_BINS
    builder = CurveBuilder(count, ["loss"], ["band"])
    for x in range(count):
        value: Any = {7001: 51.0, 7003: -49.0, 9000: "nan"}.get(x, 1.0)
        builder.add(x, {"loss": value, "band": {"a": 2.0}} if x % 2 else {"loss": value})
    loss, band = builder.curves["loss"], builder.curves["band/a"]
    assert len(loss.x) == NUM_BINS
    assert len(loss.extremes) <= 2 * NUM_BINS
    assert (7001, 51.0) in loss.extremes
    assert (7003, -49.0) in loss.extremes
    assert loss.nonfinite == [9000]
    assert sum(loss.mean) / NUM_BINS == pytest.approx(1.0)
    assert band.mean == [2.0] * NUM_BINS
    assert loss.last == 1.0


def test_smoothing_keeps_a_level_and_a_slope() -> None:
    builder = CurveBuilder(400, ["level", "slope"])
    for x in range(400):
        builder.add(x, {"level": 3.0, "slope": float(x)})
    smooth, window = builder.curves["level"].smooth()
    assert window == 11
    assert {y for _, y in smooth} == {3.0}
    slope, _ = builder.curves["slope"].smooth()
    assert slope[100:300] == [(x, x) for x in range(100, 300)]
    sample = EvenSample()
    for x in range(10 * MOST_EVENTS + 1):
        sample.add({"step": x})
    shown = [event["step"] for event in sample]
    assert MOST_EVENTS <= len(shown) <= 2 * MOST_EVENTS + 1
    assert (shown[0], shown[-1]) == (0, 10 * MOST_EVENTS)
    assert len({b - a for a, b in pairwise(shown[:-1])}) == 1
    assert sample.seen == 10 * MOST_EVENTS + 1


def test_a_long_log_is_scanned_and_keeps_its_spikes(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd3_light.report.run_log.MOST_PARSED", 100)

    def events() -> Iterable[Event]:
        yield event("start", 0, step=0)
        for x in range(1, 1001):
            loss: float | str = {501: 9.0, 701: "nan"}.get(x, 1.0)
            yield step(x, loss, grad_norm=7.0 if x == 333 else 0.5, lr=1e-4)

    report = stage.run(write(events()))
    assert (501, 9.0) in report.steps["loss"].extremes
    assert (333, 7.0) in report.steps["grad_norm"].extremes
    assert report.steps["loss"].nonfinite == [701]
    assert report.last["step"]["lr"] == 1e-4
    assert report.last["step"]["step"] == 1000
    assert set(report.steps["lr"].mean) == {1e-4}


@pytest.mark.slow
@pytest.mark.timed
def test_half_a_million_steps_take_seconds_and_little_memory(tmp_path: Path) -> None:
    line = step(1, 0.5123456789012345, lr=1e-4, grad_norm=0.31234567890123456)
    line |= dict.fromkeys(("param_norm", "samples_per_second", "data_wait", "mfu", "flow"), 0.123456789012345)
    line["band"] = {f"0.{x}": 0.123456789012345 for x in range(10)}
    text = json.dumps(line)
    assert 10 * MOST_PARSED == 500_000
    with (tmp_path / "log.jsonl").open("w") as file:
        file.write(json.dumps(event("start", 0, step=0)) + "\n")
        file.writelines(text.replace('"step": 1,', f'"step": {x},') + "\n" for x in range(1, 500_001))
    code = (
        "import resource, time; from pathlib import Path; from sd3_light.report.verb import write_run_page;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        f"write_run_page(Path({str(tmp_path)!r}), Path({str(tmp_path / 'page.html')!r}));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.process_time())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kilobytes, cpu_seconds = map(float, ended.stdout.split())
    assert cpu_seconds < 10
    assert kilobytes < 50 * 1024
    assert (tmp_path / "page.html").stat().st_size < 2_000_000


def test_the_table_shows_status_losses_and_speed(write: Write) -> None:
    folder = write(
        [
            event("start", 0, step=0, total=100),
            *(step(x, 1 / x, samples_per_second=103.26, data_wait=0.125, mfu=0.41) for x in range(1, 101)),
            event("eval", 100, step=100, set="held", weights="ema", flow=0.25),
            event("checkpoint", 101, step=100, file="step-00000100"),
            event("checkpoint_failed", 102, step=100, reason="disk full"),
            event("stop", 103, step=100, reason="finished"),
        ]
    )
    text = table_text(folder)
    for part in ("finished at step 100", "loss near step 1 ", "0.4567", "validation loss (held, ema)", "0.25"):
        assert part in text
    for part in ("6,400", "103.3 samples/s, data wait 12%", "41.0%", "step-00000100", "at step 100: disk full"):
        assert part in text


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], "no step yet"),
        ([event("start", 0)], "no step yet"),
        ([event("start", 0, step=0, total=9), step(3, 1.0)], "at step 3; running, or killed"),
        ([event("start", 0, step=0, total=3), step(3, 1.0)], "finished at step 3"),
        ([event("start", 0, step=0), step(3, 1.0), event("stop", 4, step=3, reason="SIGTERM")], "step 3: SIGTERM"),
        ([event("stop", 4, step=3, reason="x"), event("resume", 5, step=3), step(4, 1.0)], "at step 4; running, or "),
        ([step(1, "nan"), step(2, "inf")], "at step 2"),
        ([{"event": "step", "time": 1.8e9, "step": 1}], "at step 1"),
        ([event("new", 0, step=1, thing={"a": 1})], "no step yet"),
    ],
)
def test_every_log_has_a_status(write: Write, tmp_path: Path, events: list[Event], status: str) -> None:
    folder = write(events)
    assert status in table_text(folder)
    assert stage.write_run_page(folder, tmp_path / "page.html") == []
    assert status in (tmp_path / "page.html").read_text()


def test_an_incomplete_last_line_is_ignored_and_an_invalid_one_named(write: Write, tmp_path: Path) -> None:
    assert loss_of(write([step(1, 1.0)], tail='{"event": "st')) == [(1, 1.0)]
    folder = write([step(1, 1.0)], tail="{oops\n")
    refused("line 2 is not JSON", stage.run, folder)
    refused("no such log", stage.run, tmp_path / "none")


def test_validation_losses_and_measurements_have_intervals(write: Write) -> None:
    errors: list[dict[str, Any]] = [{"flow_se": 0.1}, {}, {"flow_se": "nan"}, {"flow_se": 0.2}]
    common = {"set": "held", "weights": "ema", "flow": 1.0}
    evals = [event("eval", 1, step=10 * x, **common, **each) for x, each in enumerate(errors, start=1)]
    chart = validation_charts(stage.run(write(evals)))[0]
    assert "95% interval" in chart.hint
    assert [line.name for line in chart.lines] == ["ema"]
    ends = {10: (1 - 0.196, 1 + 0.196), 40: (1 - 0.392, 1 + 0.392)}
    assert chart.lines[0].interval == [(x, pytest.approx(low), pytest.approx(high)) for x, (low, high) in ends.items()]
    value = {"value": 2.0, "low": 1.0, "high": 3.0}
    events = [event("metrics", 1, step=x, set="held", weights="ema", kid=value, retrieval=None) for x in (10, 20)]
    report = stage.run(write(events))
    assert report.metrics["held", "ema"]["kid/low"].points == [(10, 1.0), (20, 1.0)]
    (chart,) = (chart for chart in validation_charts(report) if "KID" in chart.title)
    assert [(line.name, line.interval) for line in chart.lines] == [("KID", [(10, 1.0, 3.0), (20, 1.0, 3.0)])]
    assert "metrics" not in report.events


def test_x_values_follow_samples_and_time_also_across_a_pause(write: Write) -> None:
    start = event("start", 100, step=0, samples=0)
    steps = [event("step", 100 + 3600 * x, step=x, samples=8 * x, loss=1.0) for x in (1, 2)]
    later = [event("step", 100 + 3600 * 9 + x, step=x, samples=8 * x, loss=1.0) for x in (3, 4)]
    table = x_table(stage.run(write([start, *steps, *later])), "id")
    later = pytest.approx(9, abs=0.01)
    assert table["rows"] == [(1, 8, 1), (2, 16, 2), (3, 24, later), (4, 32, later)]
    assert (table["id"], table["reduced"]) == ("id", False)
    without = x_table(stage.run(write([event("step", 5, step=7, loss=1.0)])))
    assert without["rows"] == [(7, 7, 0)]
    assert _ramp_color("inf") == _ramp_color("no number") == _ramp_color("0.1")
