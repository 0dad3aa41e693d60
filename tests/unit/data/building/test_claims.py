"""Claims: one living owner a piece, a dead one's pieces are taken over, and nothing is left behind."""

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config.faults import UserError
from sd3_light.data.building import claims as module
from sd3_light.data.building.claims import Claims

FORK = multiprocessing.get_context("fork")
ELSEWHERE = "other-host-0a1b2c3d-4026531836-123-456789-abcdef"  # an owner on another machine
PATIENCE = 60.0


@pytest.fixture
def claims(tmp_path: Path) -> Iterator[Claims]:
    with Claims(tmp_path / "claims") as found:
        yield found


def start(work: Callable[..., object], *given: object) -> BaseProcess:
    process = FORK.Process(target=work, args=given)
    process.start()
    return process


def claim_of(folder: Path, name: str, owner: str) -> Path:
    path = folder / f"{name}.claim"
    path.write_text(owner, encoding="utf-8")
    return path


def sign_of(folder: Path, owner: str, seconds_ago: float) -> Path:
    path = folder / f"{owner}.alive"
    path.touch()
    age(path, seconds_ago)
    return path


def age(path: Path, seconds: float) -> None:
    now = time.time()
    os.utime(path, (now - seconds, now - seconds))


# --- one owner -----------------------------------------------------------------------------------


def test_a_piece_has_one_owner(claims: Claims) -> None:
    with Claims(claims.folder) as other:
        assert claims.take("a")
        assert not other.take("a")
        assert not claims.take("a"), "not even its owner takes it twice"
        assert other.is_taken("a")
        assert other.take("b")
        assert claims.is_taken("b")
        assert not claims.is_taken("c")


def test_what_is_released_can_be_taken(claims: Claims) -> None:
    with Claims(claims.folder) as other:
        assert claims.take("a")
        claims.release("a")
        assert not other.is_taken("a")
        assert other.take("a")


def test_leaving_releases_everything(tmp_path: Path) -> None:
    with Claims(tmp_path) as claims:
        assert all(claims.take(name) for name in "abc")
        claims.release("b")
    assert os.listdir(tmp_path) == []


def test_leaving_by_a_fault_releases_everything(tmp_path: Path) -> None:
    def work() -> None:
        with Claims(tmp_path) as claims:
            claims.take("a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert os.listdir(tmp_path) == []


def test_no_beat_comes_after_the_end(tmp_path: Path) -> None:
    """A beat that came late would leave a sign of life for ever."""
    for _ in range(100):
        with Claims(tmp_path, beat=1e-5):
            pass
        assert os.listdir(tmp_path) == []


def test_a_claim_that_was_taken_over_is_not_released(claims: Claims) -> None:
    """We seemed dead, and another has it now."""
    claims.take("a")
    path = claim_of(claims.folder, "a", ELSEWHERE)
    claims.release("a")
    assert path.read_text() == ELSEWHERE


def test_a_claim_released_and_taken_by_another_at_once_is_left_alone(
    claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there when we try to create it, gone when we look whose it is, and another's when we come again."""
    with Claims(claims.folder) as first, Claims(claims.folder) as second:
        assert first.take("a")
        looks = []

        def read(path: Path) -> str | None:
            looks.append(path)
            if len(looks) == 1:
                with monkeypatch.context() as plain:
                    plain.setattr(module, "_read", real)
                    first.release("a")
                    assert second.take("a")
                return None
            return real(path)

        real = module._read
        monkeypatch.setattr(module, "_read", read)
        assert not claims.take("a")
        assert (claims.folder / "a.claim").read_text() == second.owner
        assert len(looks) == 2


def test_a_full_disk_is_named_and_leaves_no_claim(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    real = open

    class Full:
        def __init__(self, path: Path, *given: Any, **keys: Any) -> None:
            self.file = real(path, *given, **keys)

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, _: str) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "open", Full, raising=False)
    with pytest.raises(UserError, match=r"cannot write .*a\.claim: No space left on device"):
        claims.take("a")
    assert not claims.is_taken("a")


# --- the dead ------------------------------------------------------------------------------------


def hold(folder: Path, ready: Any) -> None:
    with Claims(folder) as claims:
        claims.take("a")
        ready.send(claims.owner)
        time.sleep(600)


@pytest.fixture
def holder(claims: Claims) -> Iterator[BaseProcess]:
    """A process that has the piece "a"."""
    ours, theirs = FORK.Pipe()
    process = start(hold, claims.folder, theirs)
    assert ours.poll(60)
    yield process
    process.kill()
    process.join()


def test_a_killed_process_is_noticed_at_once(claims: Claims, holder: BaseProcess) -> None:
    assert claims.is_taken("a")
    assert not claims.take("a")
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert not claims.is_taken("a"), "dead, though its parent has not fetched it yet"
    holder.join()
    assert not claims.is_taken("a")
    assert claims.take("a")


def test_a_living_process_keeps_its_piece_however_silent(claims: Claims, holder: BaseProcess) -> None:
    """On one machine the process itself is looked at, not its sign: it may have been stopped."""
    (sign,) = (path for path in claims.folder.glob("*.alive") if not path.name.startswith(claims.owner))
    age(sign, 10 * PATIENCE)
    assert not claims.take("a")
    with Claims(claims.folder):
        assert sign.exists(), "nor is it swept"


def test_a_process_number_that_is_used_again_is_another_process(claims: Claims) -> None:
    machine, pid, started, rest = claims.owner.rsplit("-", 3)
    claim_of(claims.folder, "a", f"{machine}-{pid}-{int(started) - 1}-{rest}")
    assert not claims.is_taken("a")
    assert claims.take("a")


@pytest.mark.parametrize(("silent", "alive"), [(0, True), (PATIENCE - 5, True), (PATIENCE + 5, False), (None, False)])
def test_an_owner_elsewhere_lives_by_its_sign(claims: Claims, silent: float | None, alive: bool) -> None:
    claim_of(claims.folder, "a", ELSEWHERE)
    if silent is not None:
        sign_of(claims.folder, ELSEWHERE, silent)
    assert claims.is_taken("a") == alive
    assert claims.take("a") == (not alive)


def test_an_owner_shows_that_it_lives(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    with Claims(folder, beat=0.005) as claims:
        (sign,) = folder.glob("*.alive")
        age(sign, PATIENCE)
        wait_until(lambda: time.time() - sign.stat().st_mtime < PATIENCE / 2)
        folder.rename(tmp_path / "away")
        time.sleep(0.02)  # a few beats find no folder
        folder.mkdir()
        wait_until(sign.exists)
        assert claims.take("a")


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline, "no beat came"
        time.sleep(0.002)


def test_a_claim_without_a_name_is_believed_for_a_while(claims: Claims) -> None:
    """Its owner is about to write its name, or was killed before it could."""
    path = claim_of(claims.folder, "a", "")
    assert claims.is_taken("a")
    assert not claims.take("a")
    age(path, PATIENCE + 5)
    assert not claims.is_taken("a")
    assert claims.take("a")


def test_what_the_dead_left_is_swept_by_the_next(tmp_path: Path) -> None:
    living, dead = ELSEWHERE, ELSEWHERE.replace("123", "124")
    kept = [sign_of(tmp_path, living, 0), claim_of(tmp_path, "a", living), claim_of(tmp_path, "new", "")]
    sign_of(tmp_path, dead, PATIENCE + 5)
    claim_of(tmp_path, "b", dead)
    age(claim_of(tmp_path, "c", ""), PATIENCE + 5)
    (tmp_path / "d.claim.01234567.gone").write_text(dead)
    with Claims(tmp_path):
        pass
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_newer_means_since_we_began(claims: Claims, tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert not claims.is_newer(file)
    file.touch()
    assert claims.is_newer(file)
    os.utime(file, (claims.started - 1, claims.started - 1))
    assert not claims.is_newer(file)


def test_what_was_written_just_before_is_not_newer(tmp_path: Path) -> None:
    """Times of files move in steps, and a process may begin in the step of an earlier write."""
    file = tmp_path / "file"
    for number in range(20):
        file.write_text(str(number))
        with Claims(tmp_path / "claims") as claims:
            assert not claims.is_newer(file)
            file.write_text(str(number))
            assert claims.is_newer(file)


# --- a race --------------------------------------------------------------------------------------

PIECES = [f"piece{number}" for number in range(200)]


def race(folder: Path, barrier: Any) -> None:
    """Do every piece that is not done, in the order that all racers have."""
    with Claims(folder / "claims") as claims:
        barrier.wait(60)
        for piece in PIECES:
            done = folder / piece
            if done.exists() or not claims.take(piece):
                continue
            if not done.exists():
                with open(folder / "log", "a") as log:
                    log.write(f"{piece} {os.getpid()}\n")
                done.touch()
            claims.release(piece)


def test_racers_do_each_piece_once(tmp_path: Path) -> None:
    barrier = FORK.Barrier(3)
    racers = [start(race, tmp_path, barrier) for _ in range(3)]
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert Counter(piece for piece, _ in lines) == Counter(PIECES)
    assert os.listdir(tmp_path / "claims") == []
