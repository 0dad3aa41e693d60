"""A run that is asked to save or to stop does so after the step, and goes on from there when it is started again.

One run is told as a story of four lives; every test looks at a part of it. What gets signals is a process of its own;
the rest runs in this one, which spares the seconds that a start takes.
"""

import io
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.cli import RESUMABLE, launch
from tests.checkpoints import read_checkpoint
from tests.e2e.live import Live, Log, arguments, descendants, is_alive, leftovers
from tests.project import Project

RESUME = "--resume_from_checkpoint"
ENDLESS = {"max_steps": 1_000_000, "checkpoint_every_n_steps": 1_000_000}


@dataclass
class Life:
    """What one process of the run did: its exit code, words and events, and what was seen while it lived."""

    code: int
    words: str
    events: list[dict[str, Any]]
    seen: dict[str, Any]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def lines(self, start: str) -> list[str]:
        return [line for line in self.words.splitlines() if line.startswith(start)]

    @property
    def steps(self) -> list[int]:
        return [event["step"] for event in self.of("step")]


def over(live: Live, **seen: Any) -> Life:
    """The record of a process that has ended."""
    return Life(live.process.returncode, live.words, live.log.all(), seen)


def here(project: Project, *flags: str, **overrides: object) -> Life:
    """The same command in this process, which is another one than those of `Live`."""
    log, words = Log(project.run / "log.jsonl"), io.StringIO()
    with redirect_stderr(words):
        code = launch(arguments(project, *flags, **overrides))
    return Life(code, words.getvalue(), log.all(), {})


def first_life(project: Project) -> Life:
    """The file `save` asks for a checkpoint, a second process wants the folder, SIGTERM ends it."""
    with Live(project, **ENDLESS) as live:
        live.reach(1)
        (live.run / "save").touch()
        asked_at = live.event("checkpoint")["step"]
        live.reach(asked_at + 2)
        file_is_gone, rival = not (live.run / "save").exists(), here(project, RESUME)
        live.reach(live.reach(1) + 1)
        live.stop(signal.SIGTERM)
        return over(live, rival=rival, file_is_gone=file_is_gone)


def second_life(project: Project) -> Life:
    """It finds what killed saves have left, has workers and a clock, and all processes of its group get the Ctrl-C."""
    folder = project.run / "checkpoints"
    broken, unfinished = folder / checkpoint_name(900_000), folder / f".{checkpoint_name(900_001)}.tmp"
    for path in (broken, unfinished):
        path.mkdir()
        (path / "rank-00000.safetensors").write_bytes(b"half of it")
    with Live(project, RESUME, **ENDLESS, checkpoint_every_n_minutes=0.01, num_dataloader_workers=2) as live:
        live.event("checkpoint", number=1)
        workers = descendants(live.process.pid)
        live.stop(signal.SIGINT, group=True)
        alive = [worker for worker in workers if is_alive(worker)]
        return over(live, workers=workers, alive=alive, broken=broken, unfinished=unfinished)


def third_life(project: Project) -> Life:
    """The file `save_quit` ends it."""
    file = project.run / "save_quit"
    with when_it_trains(project, file.touch):
        life = here(project, RESUME, **ENDLESS)
    life.seen["file_is_gone"] = not file.exists()
    return life


@contextmanager
def when_it_trains(project: Project, act: Callable[[], object]) -> Iterator[None]:
    """From a thread, as soon as two steps are logged by a run inside the block."""
    log, ended = Log(project.run / "log.jsonl"), threading.Event()

    def wait_and_act() -> None:
        while len(log.read("step")) < 2 and not ended.wait(0.01):
            pass
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    yield
    ended.set()
    thread.join()


def fourth_life(project: Project) -> Life:
    """SIGINT ends it, to the main process alone."""
    with Live(project, RESUME, **ENDLESS) as live:
        # by then the files of the folder were looked at
        live.until(lambda: live.log.read("step")[-1:] and _seconds(live) > 2.5)
        live.stop(signal.SIGINT)
        return over(live)


def _seconds(live: Live) -> float:
    events = live.log.all()
    return float(events[-1]["time"] - events[0]["time"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """The project of the story."""
    return cached_project.copy(tmp_path_factory.mktemp("signals") / "project")


@pytest.fixture(scope="module")
def lives(run: Project) -> list[Life]:
    return [life(run) for life in (first_life, second_life, third_life, fourth_life)]


# --- signals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "name"), [(0, "SIGTERM"), (1, "SIGINT"), (3, "SIGINT")], ids=["SIGTERM", "Ctrl-C", "SIGINT"]
)
def test_a_signal_ends_the_run_with_a_saved_step(run: Project, lives: list[Life], number: int, name: str) -> None:
    life = lives[number]
    assert life.code == RESUMABLE == 75, life.words
    last = life.steps[-1]
    assert [(event["reason"], event["step"]) for event in life.of("stop")] == [(name, last)]
    assert life.of("checkpoint")[-1]["step"] == last
    tensors, facts = read_checkpoint(run.run / "checkpoints" / checkpoint_name(last))  # every hash is checked
    assert facts["progress"]["step"] == last
    assert len(tensors) > 200
    assert life.lines("stopped: ") == [
        f"stopped: {name} at step {last} of 1000000; the checkpoint is saved: resume to continue"
    ]
    assert "Traceback" not in life.words


def test_each_life_goes_on_at_the_next_step(run: Project, lives: list[Life]) -> None:
    assert [event["step"] for event in lives[0].of("start")] == [0]
    for before, after in pairwise(lives):
        (resume,) = after.of("resume")
        assert resume["step"] == before.steps[-1]
        assert resume["checkpoint"] == checkpoint_name(before.steps[-1])
    steps = [step for life in lives for step in life.steps]
    assert steps == list(range(1, len(steps) + 1)), "no step twice, none left out"


def test_loader_workers_outlive_a_ctrl_c_and_end_with_the_run(lives: list[Life]) -> None:
    life = lives[1]
    assert len(life.seen["workers"]) >= 2
    assert life.seen["alive"] == []
    assert "DataLoader worker" not in life.words


def test_a_worker_that_is_killed_ends_the_run_in_one_line(project: Project) -> None:
    """As the kernel does when memory is short. Whatever the main thread does at that moment, it is told."""

    def kill_a_worker() -> None:
        os.kill(descendants(os.getpid())[-1], signal.SIGKILL)

    with when_it_trains(project, kill_a_worker):
        life = here(project, **ENDLESS, num_dataloader_workers=2)
    assert life.code == 2
    (line,) = life.lines("error: ")
    reason = life.of("stop")[0]["reason"]
    assert re.fullmatch(r"DataLoader worker \(pid.* \d+\) .*: out of memory, .*, then resume", reason)
    saved = life.of("checkpoint")[-1]["step"]
    assert saved == life.of("step")[-1]["step"], "the last complete step is saved"
    hint = "--resume (train.py: --resume_from_checkpoint) continues from there"
    assert line == f"error: {reason} (step {saved} is saved: {hint})"


# --- files and the clock -----------------------------------------------------------------------


def test_the_file_save_makes_a_checkpoint_and_the_run_goes_on(lives: list[Life]) -> None:
    life = lives[0]
    assert life.seen["file_is_gone"]
    by_file, by_signal = (event["step"] for event in life.of("checkpoint"))
    assert by_file + 2 < by_signal == life.steps[-1]


def test_the_file_save_quit_ends_the_run_well(lives: list[Life]) -> None:
    life = lives[2]
    assert (life.code, life.seen["file_is_gone"]) == (0, True), life.words
    assert [(event["reason"], event["step"]) for event in life.of("stop")] == [("save_quit", life.steps[-1])]
    assert [event["step"] for event in life.of("checkpoint")] == [life.steps[-1]]
    assert life.lines("save_quit") == ["save_quit: saving a checkpoint, then stopping"]


def test_a_run_that_quit_by_file_does_not_quit_again(lives: list[Life]) -> None:
    times = [event["time"] for event in lives[3].of("step")]
    assert times[-1] - times[0] > 2, "it went on after the folder was looked at"
    assert [event["reason"] for event in lives[3].of("stop")] == ["SIGINT"]


def test_the_clock_makes_checkpoints(lives: list[Life]) -> None:
    """Every 0.6 seconds here; the last is the signal's."""
    *by_clock, _ = (event["time"] for event in lives[1].of("checkpoint"))
    assert len(by_clock) >= 2
    assert all(after - before > 0.3 for before, after in pairwise(by_clock))


# --- one folder --------------------------------------------------------------------------------


def test_a_second_process_is_refused_in_one_line(run: Project, lives: list[Life]) -> None:
    rival = lives[0].seen["rival"]
    assert rival.code == 2
    assert rival.lines("error: ") == [
        f"error: another process is training in {run.run}; wait for it or choose another output_dir"
    ]
    assert "Traceback" not in rival.words
    assert lives[0].of("resume") == [], "it left the log alone"


def test_a_half_written_checkpoint_is_named_and_ignored(run: Project, lives: list[Life]) -> None:
    life = lives[1]
    broken, unfinished = life.seen["broken"], life.seen["unfinished"]
    assert life.lines("ignoring ") == [f"ignoring {broken}: it is incomplete (the save was interrupted)"]
    assert life.lines("cleaned up ") == [f"cleaned up {unfinished}: an interrupted save"]
    assert (run.run / "checkpoints" / f"abandoned-{broken.name}" / "rank-00000.safetensors").is_file()
    for later in lives[2:]:
        assert later.lines("ignoring ") == later.lines("cleaned up ") == []
    assert leftovers(run.run) == []


def test_nothing_else_is_in_the_folder(run: Project, lives: list[Life]) -> None:
    assert sorted(path.name for path in run.run.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.toml",
        "log.jsonl",
        "tensorboard",
    ]
    saved = {checkpoint_name(event["step"]) for life in lives for event in life.of("checkpoint")}
    abandoned = {f"abandoned-{checkpoint_name(900_000)}"}
    assert {path.name for path in Path(run.run / "checkpoints").iterdir()} == saved | abandoned
