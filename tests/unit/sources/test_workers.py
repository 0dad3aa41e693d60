"""Worker processes: ordered results, bounded prefetch, and isolation of tasks that kill their process."""

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sd3_light.sources.workers import WorkerPool
from tests.waiting import HANG_SECONDS, is_running, wait_until

FORK = multiprocessing.get_context("fork")
DEADLY = (7, 8, 23)
CRASHED = -1
BATCHES = [list(range(start, start + 5)) for start in range(0, 40, 5)]
DOUBLED = [[2 * number for number in batch] for batch in BATCHES]


def double(numbers: Sequence[int]) -> list[int]:
    return [2 * number for number in numbers]


def double_slowly(numbers: Sequence[int]) -> list[int]:
    """Double; the first of any three batches takes longest."""
    time.sleep(0.02 * (-numbers[0] % 3))
    return double(numbers)


def exit_on_some(numbers: Sequence[int]) -> list[int]:
    if any(number in DEADLY for number in numbers):
        os._exit(1)
    return double(numbers)


def crash_on_some(numbers: Sequence[int]) -> list[int]:
    faulthandler.disable()
    if any(number in DEADLY for number in numbers):
        os.kill(os.getpid(), signal.SIGSEGV)
    return double(numbers)


def fail_on_some(numbers: Sequence[int]) -> list[int]:
    if 7 in numbers:
        raise LookupError("seven")
    return double(numbers)


def process_of(numbers: Sequence[int]) -> list[int]:
    return [os.getpid() for _ in numbers]


class CountedBatches:
    def __init__(self, batches: Iterable[Sequence[int]] = BATCHES) -> None:
        self._batches, self.count = batches, 0

    def __iter__(self) -> Iterator[Sequence[int]]:
        for batch in self._batches:
            self.count += 1
            yield batch


@pytest.mark.parametrize("count", [0, 1, 3])
def test_results_come_in_order(count: int) -> None:
    with WorkerPool(count, double_slowly, CRASHED) as workers:
        assert list(workers.map(BATCHES)) == DOUBLED
        assert list(workers.map(BATCHES[:1])) == DOUBLED[:1], "a second time"
        assert list(workers.map([])) == []


@pytest.mark.parametrize(("count", "ahead", "most"), [(0, None, 1), (1, None, 2), (2, None, 3), (2, 5, 5), (2, 1, 1)])
def test_few_batches_are_prefetched(count: int, ahead: int | None, most: int) -> None:
    batches = CountedBatches()
    with WorkerPool(count, double, CRASHED, ahead) as workers:
        results = workers.map(batches)
        assert batches.count == 0, "nothing is read before it is needed"
        for taken, _ in enumerate(results):
            assert batches.count == min(taken + most, len(BATCHES))


def test_work_runs_in_processes_or_in_this_one() -> None:
    with WorkerPool(0, process_of, CRASHED) as workers:
        assert set(*workers.map([[1, 2]])) == {os.getpid()}
    with WorkerPool(2, process_of, CRASHED) as workers:
        used = {pid for pids in workers.map(BATCHES) for pid in pids}
        assert os.getpid() not in used
        assert 1 <= len(used) <= 2


@pytest.mark.parametrize("work", [exit_on_some, crash_on_some])
@pytest.mark.parametrize(("count", "ahead"), [(1, None), (2, 6)])
def test_a_task_that_kills_its_process_is_isolated(work: Any, count: int, ahead: int | None) -> None:
    """Two such tasks in one batch, and one in another batch that was pending at the same time."""
    with WorkerPool(count, work, CRASHED, ahead) as workers:
        results = list(workers.map(BATCHES))
    assert results == [[CRASHED if number in DEADLY else 2 * number for number in batch] for batch in BATCHES]


def batch_size_or_exit(numbers: Sequence[int]) -> list[int]:
    if 7 in numbers:
        os._exit(1)
    return [len(numbers)] * len(numbers)


def test_only_the_batch_that_crashed_is_split() -> None:
    """Batches lost with it are resubmitted whole."""
    with WorkerPool(1, batch_size_or_exit, CRASHED, ahead=8) as workers:
        results = list(workers.map(BATCHES))
    assert results == [[5] * 5, [1, 1, CRASHED, 1, 1], *([[5] * 5] * 6)]


@pytest.mark.parametrize("count", [0, 2])
def test_an_exception_in_the_work_is_raised(count: int) -> None:
    with WorkerPool(count, fail_on_some, CRASHED) as workers:
        results = workers.map(BATCHES)
        assert next(results) == DOUBLED[0]
        with pytest.raises(LookupError, match="seven"):
            next(results)
        assert list(workers.map(BATCHES[2:])) == DOUBLED[2:], "the processes still work"


_turns = FORK.Semaphore(0)


def touch_when_released(paths: Sequence[Path]) -> list[Path]:
    """Touch the files when the semaphore is released."""
    assert _turns.acquire(timeout=HANG_SECONDS)
    for path in paths:
        path.touch()
    return list(paths)


def test_closing_drops_batches_that_were_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process works on one batch and has two more in its queue that cannot be cancelled."""
    workers = WorkerPool(1, touch_when_released, tmp_path, ahead=20)
    _turns.release()
    results = workers.map([tmp_path / str(number)] for number in range(20))
    assert next(results) == [tmp_path / "0"]
    pool: Any = workers._pool
    shut_down = pool.shutdown

    def shut_down_then_release(wait: bool, cancel_futures: bool) -> None:
        manager = pool._executor_manager_thread
        shut_down(wait=False, cancel_futures=cancel_futures)
        for _ in range(20):
            _turns.release()
        manager.join()

    monkeypatch.setattr(pool, "shutdown", shut_down_then_release)
    workers.close()
    done = len(os.listdir(tmp_path))
    assert done <= 4
    workers.close()


def keep_two_busy(pids: Any) -> None:
    with WorkerPool(2, process_of, CRASHED) as workers:
        used = {pid for batch in workers.map(BATCHES) for pid in batch}
        assert workers._pool is not None
        pids.send(used | set(workers._pool._processes))
        time.sleep(600)


def test_workers_exit_with_a_killed_parent() -> None:
    ours, theirs = FORK.Pipe()
    parent = FORK.Process(target=keep_two_busy, args=(theirs,))
    parent.start()
    assert ours.poll(HANG_SECONDS)
    pids = ours.recv()
    assert len(pids) == 2
    assert all(is_running(pid) for pid in pids)
    parent.kill()
    parent.join()
    wait_until(lambda: not any(is_running(pid) for pid in pids), lambda: "orphaned workers are left")


def ignores_interrupts(numbers: Sequence[int]) -> list[bool]:
    return [signal.getsignal(signal.SIGINT) is signal.SIG_IGN for _ in numbers]


def test_workers_leave_ctrl_c_to_their_parent() -> None:
    """A terminal sends it to all processes; each worker would print a traceback."""
    with WorkerPool(2, ignores_interrupts, False) as pool:
        assert list(pool.map([[1], [2], [3]])) == [[True]] * 3


def test_a_pool_of_a_thread_is_not_forked() -> None:
    """Other threads of a server may hold what a fork would copy."""
    results: list[Any] = []

    def work() -> None:
        with WorkerPool(1, sorted, None) as pool:
            assert pool._pool is not None
            results.append(pool._pool._mp_context.get_start_method())
            results.extend(pool.map([[2, 1]]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == ["spawn", [1, 2]]
