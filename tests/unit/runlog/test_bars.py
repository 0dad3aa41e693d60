"""Progress: bars on a terminal, lines elsewhere, nothing on other ranks."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from sd3_light.runlog import info, progress, set_main_process


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("sd3_light.runlog.bars.time", clock)
    return clock


def use_console(monkeypatch: pytest.MonkeyPatch, terminal: bool, width: int = 100) -> io.StringIO:
    screen = io.StringIO()
    options = {"legacy_windows": False, "_environ": {"TERM": "xterm"}}
    console = Console(file=screen, force_terminal=terminal, width=width, **options)
    monkeypatch.setattr("sd3_light.runlog.console.console", console)
    monkeypatch.setattr("sd3_light.runlog.bars.console", console)
    return screen


def test_info_prints_a_line_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    text = "a [bold]line[/] :smile: of 12 words " + "x" * 200
    info(text)
    assert capsys.readouterr() == ("", text + "\n")


def test_lines_are_printed_first_last_and_every_ten_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("train", 1000, "samples", done=100) as bar:
        for _ in range(25):
            clock.now += 1
            bar.advance(20, loss=0.51234567, lr=1e-5, note="ok")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "train 100/1000 · 10%",
        "train 300/1000 · 30% · 20 samples/s · 0:35 left · loss 0.5123 · lr 1e-5 · note ok",
        "train 500/1000 · 50% · 20 samples/s · 0:25 left · loss 0.5123 · lr 1e-5 · note ok",
        "train 600/1000 · 60% · 20 samples/s · took 0:25 · loss 0.5123 · lr 1e-5 · note ok",
    ]
    with progress("train", 3, line_every=0.0) as bar:
        for _ in range(3):
            bar.advance()
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["0/3", "1/3", "2/3", "3/3", "3/3"]
    with progress("train", 1000, "steps") as bar:
        clock.now += 10
        bar.advance(20, loss=0.5, samples_per_second=1234.5678)
        assert bar.status() == "20/1000 · 2% · 1235 samples/s · 8:10 left · loss 0.5"
        assert bar.status(brief=True) == "20/1000 · 1235 samples/s · 8:10 left · loss 0.5"


@pytest.mark.parametrize("width", [*range(40, 90, 5), 120])
def test_the_live_line_fits_and_cuts_no_number(clock: Clock, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    screen = use_console(monkeypatch, terminal=True, width=width)
    with progress("train", 1_000_000, "steps", done=212_345) as bar:
        clock.now += 10
        bar.advance(100, loss=0.51234567, samples_per_second=1234.5678, lr=1e-4)
        shown = Text.from_ansi(screen.getvalue()).plain
        parts = bar.status(brief=True).split(" · ")
    line = next(line for line in reversed(shown.splitlines()) if "212445" in line)
    assert len(line) <= width
    shown_parts = line.strip().split(" · ")
    shown_parts[0] = shown_parts[0].split()[-1]
    assert shown_parts == parts[: len(shown_parts)]
    if width >= 80:
        assert "212445/1000000 · 1235 samples/s · 21:52:36 left · loss 0.5123" in line
        assert "━" in line


def test_a_slow_start_does_not_count_for_the_rate(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("train", 10_000) as bar:
        clock.now += 3600
        for _ in range(70):
            clock.now += 1
            bar.advance(2)
        assert "2 it/s · 1:22:10 left" in bar.status()
    with progress("train", 1000, "steps") as bar:
        clock.now += 20
        bar.restart_rate()
        clock.now += 10
        bar.set_done(100)
        assert bar.status() == "100/1000 · 10% · 10 steps/s · 1:30 left"


def test_a_job_of_unknown_length_and_a_callback(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("scan", None, "files") as bar:
        clock.now += 2
        bar.set_done(5)
        assert bar.status() == "5 · 2.5 files/s"
        bar.set_done(10, 20)
    assert capsys.readouterr().err.splitlines() == ["scan 0", "scan 10/20 · 50% · 5 files/s · took 0:02"]


def test_an_empty_job_succeeds_and_one_that_is_done_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("nothing", 0):
        pass
    assert capsys.readouterr().err.splitlines() == ["nothing 0/0", "nothing 0/0 · took 0:00"]
    with progress("cache", 61, "images", done=61) as bar:
        assert bar is not None
    assert capsys.readouterr().err == ""


def test_a_failed_job_prints_where_it_stopped(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with progress("train", 4) as bar:
            clock.now += 1
            bar.advance()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert capsys.readouterr().err.splitlines()[-1] == "train 1/4 · 25% · 1 it/s · took 0:01 · stopped"


def test_bars_on_a_terminal_can_be_nested_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = use_console(monkeypatch, terminal=True)
    for title in ("first", "second"):
        with progress(title, 2) as outer:
            for _ in range(2):
                with progress("[inner]", 3) as inner:
                    inner.advance(3)
                    info("between")
                outer.advance(loss=0.5)
    shown = screen.getvalue()
    for text in ("first", "second", "[inner]", "between", "2/2 · 100%", "took 0:00", "loss 0.5"):
        assert text in shown


def test_a_failure_in_nested_bars_leaves_the_terminal_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = use_console(monkeypatch, terminal=True)
    with pytest.raises(KeyError), progress("outer", 2), progress("inner", 2):
        raise KeyError
    assert "stopped" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[?25h")  # the cursor is visible again
    with progress("next", 1) as bar:
        bar.advance()
    assert "next" in screen.getvalue()


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = use_console(monkeypatch, terminal=True)
    set_main_process(False)
    with progress("train", 2) as bar:
        bar.advance(2, loss=1.0)
    info("hello")
    assert bar.done == 2
    assert screen.getvalue() == ""
    assert capsys.readouterr() == ("", "")
