"""A run that is asked to save or stop does so after the step, and a later session resumes from there.

One run has four sessions that all tests share. Sessions that receive signals are separate processes; the others run in
this process, which saves the start-up time.
"""

import gc
import io
import multiprocessing
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
import torch

from sd3_light.checkpoint.store import checkpoint_name
from sd3_light.cli import RESUMABLE, launch
from tests.checkpoints import read_checkpoint
from tests.e2e.live import Log, TrainProcess, arguments, descendants, leftovers
from tests.project import Project
from tests.waiting import is_running

RESUME = "--resume_from_checkpoint"
ENDLESS = {"max_steps": 1_000_000, "checkpoint_every_n_steps": 1_000_000}


@dataclass
class Session:
    """One session of the run: its exit code, output, events, and observations made while it ran."""

    code: int
    output: str
    events: list[dict[str, Any]]
    observed: dict[str, Any]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    def lines(self, start: str) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith(start)]

    @property
    def steps(self) -> list[int]:
        return [event["step"] for event in self.of("step")]


def ended_session(live: TrainProcess, **observed: Any) -> Session:
    """Return the session of a process that has ended."""
    return Session(live.process.returncode, live.output, live.log.all(), observed)


def run_in_process(project: Project, *flags: str, **overrides: object) -> Session:
    """Run the same command in this process."""
    log, output = Log(project.run / "log.jsonl"), io.StringIO()
    with redirect_stderr(output):
        code = launch(arguments(project, *flags, **overrides))
    return Session(code, output.getvalue(), log.all(), {})


def save_then_sigterm(project: Project) -> Session:
    """The file `save` requests a checkpoint, a second process tries to use the folder, SIGTERM stops the run."""
    with TrainProcess(project, **ENDLESS) as live:
        live.wait_for_step(1)
        (live.run / "save").touch()
        saved_at = live.wait_for_event("checkpoint")["step"]
        live.wait_for_step(saved_at + 2)
        file_is_gone, rival = not (live.run / "save").exists(), run_in_process(project, RESUME)
        live.wait_for_step(live.wait_for_step(1) + 1)
        live.stop(signal.SIGTERM)
        return ended_session(live, rival=rival, file_is_gone=file_is_gone)


def workers_then_ctrl_c(project: Project) -> Session:
    """With leftovers of killed saves, loader workers and timed checkpoints; Ctrl-C goes to the whole process group."""
    folder = project.run / "checkpoints"
    broken, unfinished = folder / checkpoint_name(900_000), folder / f".{checkpoint_name(900_001)}.tmp"
    for path in (broken, unfinished):
        path.mkdir()
        (path / "rank-00000.safetensors").write_bytes(b"half of it")
    with TrainProcess(project, RESUME, **ENDLESS, checkpoint_every_n_minutes=0.01, num_dataloader_workers=2) as live:
        live.wait_for_event("checkpoint", number=1)
        workers = descendants(live.pid)
        live.stop(signal.SIGINT, group=True)
        alive = [worker for worker in workers if is_running(worker)]
        return ended_session(live, workers=workers, alive=alive, broken=broken, unfinished=unfinished)


def save_quit(project: Project) -> Session:
    """The file `save_quit` stops the run."""
    file = project.run / "save_quit"
    with once_training(project, file.touch):
        session = run_in_process(project, RESUME, **ENDLESS)
    session.observed["file_is_gone"] = not file.exists()
    return session


@contextmanager
def once_training(project: Project, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` from a thread as soon as a run inside the block has logged two steps."""
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


def sigint(project: Project) -> Session:
    """SIGINT to the main process only stops the run."""
    with TrainProcess(project, RESUME, **ENDLESS) as live:
        # by then the request files have been checked
        live.wait_for(lambda: _seconds_of_steps(live) > 2.5)
        live.stop(signal.SIGINT)
        return ended_session(live)


def _seconds_of_steps(live: TrainProcess) -> float:
    times = [event["time"] for event in live.log.read("step")]
    return max(times) - min(times) if times else 0.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cached_project: Project) -> Project:
    """The project of the four sessions."""
    return cached_project.copy(tmp_path_factory.mktemp("signals") / "project")


@pytest.fixture(scope="module")
def sessions(run: Project) -> list[Session]:
    return [session(run) for session in (save_then_sigterm, workers_then_ctrl_c, save_quit, sigint)]


@pytest.mark.parametrize(
    ("number", "name"), [(0, "SIGTERM"), (1, "SIGINT"), (3, "SIGINT")], ids=["SIGTERM", "Ctrl-C", "SIGINT"]
)
def test_a_signal_saves_and_stops_the_run(run: Project, sessions: list[Session], number: int, name: str) -> None:
    session = sessions[number]
    assert session.code == RESUMABLE == 75, session.output
    last = session.steps[-1]
    assert [(event["reason"], event["step"]) for event in session.of("stop")] == [(name, last)]
    assert session.of("checkpoint")[-1]["step"] == last
    tensors, facts = read_checkpoint(run.run / "checkpoints" / checkpoint_name(last))  # every hash is checked
    assert facts["progress"]["step"] == last
    assert len(tensors) > 200
    assert session.lines("stopped: ") == [
        f"stopped: {name} at step {last} of 1000000; the checkpoint is saved: resume to continue"
    ]
    assert "Traceback" not in session.output


def test_sessions_continue_at_the_next_step_and_leave_no_workers(run: Project, sessions: list[Session]) -> None:
    assert [event["step"] for event in sessions[0].of("start")] == [0]
    for before, after in pairwise(sessions):
        (resume,) = after.of("resume")
        assert resume["step"] == before.steps[-1]
        assert resume["checkpoint"] == checkpoint_name(before.steps[-1])
    steps = [step for session in sessions for step in session.steps]
    assert steps == list(range(1, len(steps) + 1)), "no step is repeated or skipped"
    session = sessions[1]
    assert len(session.observed["workers"]) >= 2
    assert session.observed["alive"] == []
    assert "DataLoader worker" not in session.output


def test_a_killed_worker_stops_the_run_with_one_line(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does when memory is short. Every step until the dead worker is missed is complete, and saved."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)

    def kill_a_worker() -> None:
        multiprocessing.active_children()[0].kill()

    with once_training(project, kill_a_worker):
        session = run_in_process(project, **ENDLESS, num_dataloader_workers=2)
    gc.collect()  # waits for the other worker: later it would take ten seconds of another test
    assert session.code == 2
    (line,) = session.lines("error: ")
    reason = session.of("stop")[0]["reason"]
    assert re.fullmatch(r"DataLoader worker \(pid \d+\) was killed by SIGKILL: out of memory, .*, then resume", reason)
    saved = session.of("checkpoint")[-1]["step"]
    assert saved == session.of("step")[-1]["step"], "the last complete step is saved"
    hint = "--resume continues from there"
    assert line == f"error: {reason} (step {saved} is saved: {hint})"


def test_checkpoints_are_written_by_files_and_by_time(sessions: list[Session]) -> None:
    session = sessions[0]
    assert session.observed["file_is_gone"]
    by_file, by_signal = (event["step"] for event in session.of("checkpoint"))
    assert by_file + 2 < by_signal == session.steps[-1]
    session = sessions[2]
    assert (session.code, session.observed["file_is_gone"]) == (0, True), session.output
    assert [(event["reason"], event["step"]) for event in session.of("stop")] == [("save_quit", session.steps[-1])]
    assert [event["step"] for event in session.of("checkpoint")] == [session.steps[-1]]
    assert session.lines("save_quit") == ["save_quit: saving a checkpoint, then stopping"]
    times = [event["time"] for event in sessions[3].of("step")]
    assert times[-1] - times[0] > 2, "it continued after the request files were checked"
    assert [event["reason"] for event in sessions[3].of("stop")] == ["SIGINT"]
    *by_clock, by_signal = (event["step"] for event in sessions[1].of("checkpoint"))
    assert len(by_clock) >= 2
    assert all(before < after for before, after in pairwise([*by_clock, by_signal]))


def test_a_second_process_is_rejected_with_one_line(run: Project, sessions: list[Session]) -> None:
    rival = sessions[0].observed["rival"]
    assert rival.code == 2
    assert rival.lines("error: ") == [
        f"error: another process is training in {run.run}; wait for it or choose another output_dir"
    ]
    assert "Traceback" not in rival.output
    assert sessions[0].of("resume") == [], "it did not write to the log"


def test_an_incomplete_checkpoint_is_reported_and_ignored(run: Project, sessions: list[Session]) -> None:
    session = sessions[1]
    broken, unfinished = session.observed["broken"], session.observed["unfinished"]
    assert session.lines("ignoring ") == [f"ignoring {broken}: it is damaged (index.json cannot be read)"]
    assert session.lines("cleaned up ") == [f"cleaned up {unfinished}: an interrupted save"]
    assert (run.run / "checkpoints" / f"abandoned-{broken.name}" / "rank-00000.safetensors").is_file()
    for later in sessions[2:]:
        assert later.lines("ignoring ") == later.lines("cleaned up ") == []
    assert leftovers(run.run) == []
    assert sorted(path.name for path in run.run.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.toml",
        "log.jsonl",
        "tensorboard",
    ]
    saved = {checkpoint_name(event["step"]) for session in sessions for event in session.of("checkpoint")}
    abandoned = {f"abandoned-{checkpoint_name(900_000)}"}
    assert {path.name for path in Path(run.run / "checkpoints").iterdir()} == saved | abandoned
