"""Wishes from outside: signals, files in the run folder, the clock; each is heard once."""

import os
import signal
from pathlib import Path

import pytest

from sd3_light.engines.processes import SharedFlags
from sd3_light.training import requests
from sd3_light.training.requests import NUM_FLAGS, RunRequests


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(requests.time, "monotonic", lambda: now[0])
    return now


def asked(watch: RunRequests) -> tuple[bool, bool]:
    watch.ask()
    return watch.save, watch.quit


def make(folder: Path | None = None, minutes: float | None = None) -> RunRequests:
    return RunRequests(folder, minutes, SharedFlags(None, NUM_FLAGS))


def test_nothing_is_wished(tmp_path: Path, clock: list[float]) -> None:
    one = make(tmp_path)
    clock[0] += 5
    assert asked(one) == (False, False)
    assert one.reason is None


def test_the_file_save_makes_one_checkpoint(tmp_path: Path, clock: list[float]) -> None:
    one = make(tmp_path)
    (tmp_path / "save").touch()
    clock[0] += 2
    assert asked(one) == (True, False)
    assert not (tmp_path / "save").exists()
    clock[0] += 2
    assert asked(one) == (False, False)


def test_the_file_save_quit_saves_and_stops(tmp_path: Path, clock: list[float]) -> None:
    one = make(tmp_path)
    (tmp_path / "save_quit").touch()
    clock[0] += 2
    assert asked(one) == (True, True)
    assert one.reason == "save_quit"
    assert list(tmp_path.iterdir()) == [], "a resumed run must not stop at once"


def test_files_are_not_looked_for_at_every_step(tmp_path: Path, clock: list[float]) -> None:
    one = make(tmp_path)
    (tmp_path / "save").touch()
    assert asked(one) == (False, False)
    clock[0] += 1.5
    assert asked(one) == (True, False)


def test_a_checkpoint_is_wished_when_the_last_is_old(tmp_path: Path, clock: list[float]) -> None:
    one = make(tmp_path, minutes=2)
    found = []
    for second in range(45, 451, 45):
        clock[0] = 1000.0 + second
        if asked(one)[0]:
            found.append(second)
            one.saved()
    assert found == [135, 270, 405]


def test_only_the_first_rank_looks_at_clock_and_files(clock: list[float]) -> None:
    one = make(None, minutes=1)
    clock[0] += 600
    assert asked(one) == (False, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_after_the_step(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with make() as one:
        os.kill(os.getpid(), number)
        assert asked(one) == (True, True)
        assert one.reason == signal.Signals(number).name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_at_once_is_the_launchers_and_a_later_one_is_impatience(clock: list[float]) -> None:
    with make() as one:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        clock[0] += 10
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert one.signal == "SIGINT"


class OneStepLate(SharedFlags):
    """Answers as it does among several ranks: a call later."""

    def __init__(self) -> None:
        super().__init__(None, NUM_FLAGS)
        self.told: tuple[bool, ...] = (False,) * NUM_FLAGS

    def ask(self, wishes: tuple[bool, ...]) -> tuple[bool, ...]:
        answer, self.told = self.told, wishes
        return answer


def test_the_clock_wishes_for_one_checkpoint_though_the_answer_comes_late(tmp_path: Path, clock: list[float]) -> None:
    one = RunRequests(tmp_path, 1, OneStepLate())
    found = []
    for step in range(1, 16):
        clock[0] += 10.0
        if asked(one)[0]:
            found.append(step)
            one.saved()
    assert found == [7, 14]


def test_a_file_and_a_signal_are_told_apart_by_every_rank(tmp_path: Path, clock: list[float]) -> None:
    """A rank that sees neither must end with the same code as the others."""

    class Told(SharedFlags):
        def __init__(self, answer: tuple[bool, ...]) -> None:
            super().__init__(None, NUM_FLAGS)
            self.answer = answer

        def ask(self, wishes: tuple[bool, ...]) -> tuple[bool, ...]:
            return self.answer

    for answer, reason in (
        ((False, True, False), "save_quit"),
        ((False, False, True), "another process was asked to stop"),
        ((False, True, True), "save_quit"),
    ):
        one = RunRequests(None, None, Told(answer))
        assert asked(one) == (True, True)
        assert one.reason == reason
