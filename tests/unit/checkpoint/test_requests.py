"""Stop and save requests: signals, files in the run folder, the clock. Each is honoured once."""

import os
import signal
from pathlib import Path

import pytest

from sd3_light.checkpoint import requests as requests_module
from sd3_light.checkpoint.requests import NUM_FLAGS, RunRequests


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(requests_module.time, "monotonic", lambda: now[0])
    return now


def poll(requests: RunRequests) -> tuple[bool, bool]:
    requests.poll()
    return requests.save, requests.quit


def test_a_planned_stop_saves_and_is_not_an_interruption() -> None:
    requests = RunRequests()
    requests.stop("no gain")
    assert poll(requests) == (True, True)
    assert requests.reason == "no gain"
    assert not requests.is_interrupted
    signalled = RunRequests()
    signalled.signal = "SIGTERM"
    signalled.poll()
    assert signalled.is_interrupted


def test_a_file_requests_once_and_is_not_checked_at_every_step(tmp_path: Path, clock: list[float]) -> None:
    requests = RunRequests(tmp_path)
    (tmp_path / "save").touch()
    assert poll(requests) == (False, False)
    clock[0] += 1.5
    assert poll(requests) == (True, False)
    assert not (tmp_path / "save").exists()
    clock[0] += 2
    assert poll(requests) == (False, False)
    assert requests.reason is None
    (tmp_path / "save_quit").touch()
    clock[0] += 2
    assert poll(requests) == (True, True)
    assert requests.reason == "save_quit"
    assert list(tmp_path.iterdir()) == [], "a resumed run must not stop at once"


def test_a_checkpoint_is_requested_when_the_last_one_is_old(tmp_path: Path, clock: list[float]) -> None:
    requests = RunRequests(tmp_path, minutes=2)
    saved_at = []
    for second in range(45, 451, 45):
        clock[0] = 1000.0 + second
        if poll(requests)[0]:
            saved_at.append(second)
            requests.checkpoint_saved()
    assert saved_at == [135, 270, 405]
    other_rank = RunRequests(None, minutes=1)
    clock[0] += 600
    assert poll(other_rank) == (False, False), "only the main rank checks clock and files"


def test_a_second_interrupt_is_ignored_at_first_and_raised_later(clock: list[float]) -> None:
    """Launchers forward the first Ctrl-C, so the second one at once is theirs."""
    requests = RunRequests()
    with requests.handling_signals():
        os.kill(os.getpid(), signal.SIGINT)
        assert poll(requests) == (True, True)
        assert requests.reason == "SIGINT"
        os.kill(os.getpid(), signal.SIGINT)
        clock[0] += 10
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert requests.signal == "SIGINT"


def test_a_late_answer_repeats_no_request(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks the flags are those of the previous call."""
    requests = RunRequests(tmp_path, 1)
    sent: list[tuple[bool, ...]] = [(False,) * NUM_FLAGS]
    monkeypatch.setattr(requests.flags, "exchange", lambda flags: sent.append(flags) or sent[-2])
    saved_at = []
    for step in range(1, 16):
        clock[0] += 10.0
        if poll(requests)[0]:
            saved_at.append(step)
            requests.checkpoint_saved()
    assert saved_at == [7, 14]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((False, True, False, False), "save_quit"),
        ((False, False, True, False), "another process was asked to stop"),
        ((False, True, True, False), "save_quit"),
        ((False, False, True, True), "another process has failed"),
    ],
)
def test_ranks_tell_files_from_signals(answer: tuple[bool, ...], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that sees neither must exit with the same code as the others."""
    requests = RunRequests()
    monkeypatch.setattr(requests.flags, "exchange", lambda flags: answer)
    assert poll(requests) == (True, True)
    assert requests.reason == reason


@pytest.mark.parametrize("asked", [True, False])
def test_signals_after_a_stop_change_nothing(asked: bool) -> None:
    """A scheduler may send SIGTERM again while the process exits; a finished run restores the handlers."""
    before = [signal.getsignal(number) for number in requests_module.SIGNALS]
    requests = RunRequests()
    with requests.handling_signals():
        if asked:
            os.kill(os.getpid(), signal.SIGTERM)
            assert poll(requests) == (True, True)
    assert ([signal.getsignal(number) for number in requests_module.SIGNALS] == before) is not asked
    if asked:
        for number in requests_module.SIGNALS:
            os.kill(os.getpid(), number)
        assert requests.reason == "SIGTERM"


def test_a_lost_worker_ends_several_ranks_together() -> None:
    """One rank alone raises the error at once."""
    requests = RunRequests()
    assert requests.on_lost_worker is None
    requests.flags.group = object()  # type: ignore[assignment]
    assert requests.on_lost_worker == requests.fail
