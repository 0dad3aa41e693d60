"""Claims: one living owner per item, items of dead owners are taken over, and no files are left behind."""

import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config.faults import UserError
from sd3_light.sources import claims as module
from sd3_light.sources.claims import Claims
from tests.faults import Call, faulty_disk
from tests.unit.sources.catalogues import FORK, start
from tests.waiting import HANG_SECONDS, wait_until

ELSEWHERE = "other-host-0a1b2c3d-4026531836-123-456789-abcdef"  # an owner on another machine
STALE_AFTER = 60.0


@pytest.fixture
def claims(tmp_path: Path) -> Iterator[Claims]:
    with Claims(tmp_path / "claims") as claims:
        yield claims


def is_owned(claims: Claims, name: str) -> bool:
    path = claims._path(name)
    return claims._is_owned(path, module._read(path))


def write_claim(folder: Path, name: str, owner: str) -> Path:
    path = folder / f"{name}.claim"
    path.write_text(owner, encoding="utf-8")
    return path


def write_heartbeat(folder: Path, owner: str, seconds_ago: float) -> Path:
    path = folder / f"{owner}.alive"
    path.touch()
    age(path, seconds_ago)
    return path


def age(path: Path, seconds: float) -> None:
    now = time.time()
    os.utime(path, (now - seconds, now - seconds))


def test_an_item_has_one_owner(claims: Claims) -> None:
    with Claims(claims.folder) as other:
        assert claims.take("a")
        assert not other.take("a")
        assert not claims.take("a"), "not even its owner can take it twice"
        assert is_owned(other, "a")
        assert other.take("b")
        assert is_owned(claims, "b")
        assert not is_owned(claims, "c")
        claims.release("a")
        assert not is_owned(other, "a")
        assert other.take("a")


def test_claims_and_heartbeats_end_with_their_owner(tmp_path: Path) -> None:
    """A late heartbeat would leave its file behind forever."""
    with Claims(tmp_path) as claims:
        assert all(claims.take(name) for name in "abc")
        claims.release("b")
    assert os.listdir(tmp_path) == []
    for _ in range(100):
        with Claims(tmp_path, heartbeat=1e-5):
            pass
        assert os.listdir(tmp_path) == []


def test_a_claim_that_was_taken_over_is_not_released(claims: Claims) -> None:
    """This process seemed dead, and another owns the item now."""
    claims.take("a")
    path = write_claim(claims.folder, "a", ELSEWHERE)
    claims.release("a")
    assert path.read_text() == ELSEWHERE


def test_a_claim_retaken_by_another_process_is_left_alone(claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
    """It exists when we try to create it, is gone when we read its owner, and has another owner when we retry."""
    with Claims(claims.folder) as first, Claims(claims.folder) as second:
        assert first.take("a")
        reads = []

        def read(path: Path) -> str | None:
            reads.append(path)
            if len(reads) == 1:
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
        assert len(reads) == 2


def test_a_full_disk_is_reported_and_leaves_no_claim(claims: Claims, tmp_path: Path) -> None:
    fails = Call("write", "claims/a.claim", 1)
    message = r"cannot write .*a\.claim: No space left on device"
    with faulty_disk(tmp_path, fails), pytest.raises(UserError, match=message):
        claims.take("a")
    assert not is_owned(claims, "a")


def hold(folder: Path, ready: Any) -> None:
    with Claims(folder) as claims:
        claims.take("a")
        ready.send(claims.owner)
        time.sleep(600)


@pytest.fixture
def holder(claims: Claims) -> Iterator[BaseProcess]:
    """A process that owns the item "a"."""
    ours, theirs = FORK.Pipe()
    process = start(hold, claims.folder, theirs)
    assert ours.poll(HANG_SECONDS)
    yield process
    process.kill()
    process.join()


def test_a_living_owner_here_needs_no_heartbeat_and_its_end_is_noticed(claims: Claims, holder: BaseProcess) -> None:
    """The process is checked instead of its heartbeat: it may have been suspended."""
    (heartbeat,) = (path for path in claims.folder.glob("*.alive") if not path.name.startswith(claims.owner))
    age(heartbeat, 10 * STALE_AFTER)
    assert not claims.take("a")
    with Claims(claims.folder):
        assert heartbeat.exists(), "it is not swept either"
    assert is_owned(claims, "a")
    assert not claims.take("a")
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert not is_owned(claims, "a"), "a zombie counts as dead"
    holder.join()
    assert not is_owned(claims, "a")
    assert claims.take("a")


def test_a_reused_process_number_is_another_process(claims: Claims) -> None:
    machine, pid, started, rest = claims.owner.rsplit("-", 3)
    write_claim(claims.folder, "a", f"{machine}-{pid}-{int(started) - 1}-{rest}")
    assert not is_owned(claims, "a")
    assert claims.take("a")


@pytest.mark.parametrize(("silent", "alive"), [(0, True), (STALE_AFTER - 1, True), (STALE_AFTER, False), (None, False)])
def test_an_owner_elsewhere(claims: Claims, silent: float | None, alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    write_claim(claims.folder, "a", ELSEWHERE)
    if silent is not None:
        heartbeat = write_heartbeat(claims.folder, ELSEWHERE, silent).stat().st_mtime
        monkeypatch.setattr(claims, "_now", lambda: heartbeat + silent)
    assert is_owned(claims, "a") == alive
    assert claims.take("a") == (not alive)


def test_an_owner_refreshes_its_heartbeat(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    with Claims(folder, heartbeat=0.005) as claims:
        (heartbeat,) = folder.glob("*.alive")
        age(heartbeat, STALE_AFTER)
        wait_until(lambda: time.time() - heartbeat.stat().st_mtime < STALE_AFTER / 2)
        folder.rename(tmp_path / "moved")
        time.sleep(0.02)  # a few heartbeats fail
        folder.mkdir()
        wait_until(heartbeat.exists)
        assert claims.take("a")


def test_a_claim_without_an_owner_is_valid_for_a_while(claims: Claims) -> None:
    """Its owner is about to write its name, or was killed before it could do so."""
    path = write_claim(claims.folder, "a", "")
    assert is_owned(claims, "a")
    assert not claims.take("a")
    age(path, STALE_AFTER + 5)
    assert not is_owned(claims, "a")
    assert claims.take("a")


def test_files_of_dead_processes_are_swept(tmp_path: Path) -> None:
    living, dead = ELSEWHERE, ELSEWHERE.replace("123", "124")
    valid = [write_heartbeat(tmp_path, living, 0), write_claim(tmp_path, "a", living), write_claim(tmp_path, "new", "")]
    write_heartbeat(tmp_path, dead, STALE_AFTER + 5)
    write_claim(tmp_path, "b", dead)
    age(write_claim(tmp_path, "c", ""), STALE_AFTER + 5)
    (tmp_path / "d.claim.01234567.gone").write_text(dead)
    with Claims(tmp_path):
        pass
    assert sorted(tmp_path.iterdir()) == sorted(valid)


def test_a_file_written_just_before_is_not_newer(tmp_path: Path) -> None:
    """File times have a limited resolution: the claims may start in the same tick as an earlier write."""
    file = tmp_path / "file"
    for number in range(20):
        file.write_text(str(number))
        with Claims(tmp_path / "claims") as claims:
            assert not claims.is_newer(file)
            file.write_text(str(number))
            assert claims.is_newer(file)


ITEMS = [f"item{number}" for number in range(200)]


def race(folder: Path, barrier: Any) -> None:
    """Do every item that is not done, in the same order in all processes."""
    with Claims(folder / "claims") as claims:
        barrier.wait(HANG_SECONDS)
        for item in ITEMS:
            done = folder / item
            if done.exists() or not claims.take(item):
                continue
            if not done.exists():
                with open(folder / "log", "a") as log:
                    log.write(f"{item} {os.getpid()}\n")
                done.touch()
            claims.release(item)


def test_racing_processes_do_each_item_once(tmp_path: Path) -> None:
    barrier = FORK.Barrier(3)
    racers = [start(race, tmp_path, barrier) for _ in range(3)]
    for racer in racers:
        racer.join(HANG_SECONDS)
        assert racer.exitcode == 0
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert Counter(item for item, _ in lines) == Counter(ITEMS)
    assert os.listdir(tmp_path / "claims") == []


def test_work_is_done_once_although_the_clock_is_set_back(claims: Claims, tmp_path: Path) -> None:
    """What is written after the jump seems older than the start; waiting for it to be newer would never end."""
    made: list[str] = []

    def make(name: str) -> None:
        made.append(name)
        assert len(made) < 3, "done again and again"
        (tmp_path / name).touch()
        age(tmp_path / name, 3600)

    claims.divide(["a", "b"], lambda name: claims.is_newer(tmp_path / name, name), make)
    assert made == ["a", "b"]
    (tmp_path / "old").touch()
    age(tmp_path / "old", 3600)
    assert not claims.is_newer(tmp_path / "old", "old"), "it is of an earlier run"


def test_a_dead_owner_on_another_machine_is_noticed_although_the_clock_was_set_back(claims: Claims) -> None:
    """Its last heartbeat is in the future. An owner that lives writes another within seconds."""
    write_claim(claims.folder, "item", ELSEWHERE)
    write_heartbeat(claims.folder, ELSEWHERE, -3600)
    assert claims.take("item")
    write_claim(claims.folder, "other", ELSEWHERE)
    write_heartbeat(claims.folder, ELSEWHERE, -STALE_AFTER / 2)  # clocks of servers differ a little
    assert not claims.take("other")


def test_a_claim_that_cannot_be_deleted_does_not_hide_the_error(tmp_path: Path) -> None:
    fails = Call("os.remove", "claims/a.claim", 1)

    def stop() -> None:
        with Claims(tmp_path / "claims") as claims:
            claims.take("a")
            raise UserError("the first")

    with faulty_disk(tmp_path, fails, errno.EROFS, lasting=True) as disk, pytest.raises(UserError, match="the first"):
        stop()
    assert fails in disk.failed
