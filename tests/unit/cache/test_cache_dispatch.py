"""Shards are distributed among workers that come, go and fail; only a shard that fails alone is given up."""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from sd3_light.cache.dispatch import DEPTH, TRIES, WorkerFailed, dispatch
from sd3_light.config.faults import UserError
from sd3_light.data.cache_plan import PlannedShard
from sd3_light.sources.buckets import Bucket
from tests.refusals import refused


def shard(number: int) -> PlannedShard:
    return PlannedShard(number, f"{number}.safetensors", "a#0", Bucket(64, 64), (64, 64), False, "", 1)


SHARDS = [shard(number) for number in range(30)]


class FakeWorkers:
    """Workers that finish one shard per wait; one in ``poison`` ends its worker and all shards in progress there."""

    def __init__(self, count: int, poison: Sequence[int] = ()) -> None:
        self.names = list(range(count))
        self.poison = set(poison)
        self.built: list[int] = []
        self.tries: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self.on_wait: Callable[[], None] = lambda: None
        self._running: dict[str, tuple[int, PlannedShard]] = {}
        self._lost: set[str] = set()
        self._next = 0

    def ready(self, wanted: int) -> list[int]:
        return list(self.names)

    def submit(self, worker: int, shard: PlannedShard) -> str:
        self._next += 1
        self.tries[shard.number] += 1
        self._running[f"call {self._next}"] = worker, shard
        loads = Counter(name for name, _ in self._running.values())
        self.most |= loads
        return f"call {self._next}"

    def wait(self, handles: Sequence[str]) -> list[str]:
        assert set(handles) == self._running.keys()
        self.on_wait()
        if not handles:
            return []
        first = handles[0]
        worker, current = self._running[first]
        if current.number in self.poison:
            self.lose(worker)
        return [handle for handle in handles if handle in self._lost][:1] or [first]

    def lose(self, worker: int) -> None:
        """End a worker; its shards fail together."""
        self._lost |= {handle for handle, (name, _) in self._running.items() if name == worker}

    def finish(self, worker: int, handle: str, shard: PlannedShard) -> None:
        del self._running[handle]
        if handle in self._lost:
            raise WorkerFailed("the process was lost")
        self.built.append(shard.number)


def test_every_shard_is_built_once_and_few_are_spread_over_all_workers() -> None:
    workers = FakeWorkers(3)
    assert dispatch(SHARDS, workers) == {}
    assert sorted(workers.built) == list(range(30))
    assert set(workers.tries.values()) == {1}
    assert workers.most == {0: DEPTH, 1: DEPTH, 2: DEPTH}
    workers = FakeWorkers(3)
    dispatch(SHARDS[:3], workers)
    assert workers.most == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_only_the_poison_shards_fail(count: int) -> None:
    workers = FakeWorkers(count, poison=[3, 17])
    failed = dispatch(SHARDS, workers)
    assert {shard.number: cause for shard, cause in failed.items()} == dict.fromkeys((3, 17), "the process was lost")
    assert sorted(workers.built) == [number for number in range(30) if number not in (3, 17)]
    assert workers.tries[3] == workers.tries[17] == 1 + TRIES


@pytest.mark.parametrize(("count", "lost"), [(8, 8), (32, 24), (32, 32)])
def test_many_workers_may_be_lost_at_once(count: int, lost: int) -> None:
    workers = FakeWorkers(count)
    waits = iter(range(1000))

    def lose_many() -> None:
        number = next(waits)
        if number == 4:
            for worker in range(lost):
                workers.lose(worker)
            workers.names = workers.names[lost:]
        if number == 120:
            workers.names += range(count, count + lost)

    workers.on_wait = lose_many
    planned = [shard(number) for number in range(200)]
    assert dispatch(planned, workers) == {}
    assert sorted(workers.built) == list(range(200))
    assert max(workers.most) == count + lost - 1, "the new workers get shards"


def test_many_failures_in_a_row_and_a_user_error_stop_the_run() -> None:
    workers = FakeWorkers(2, poison=range(1000))
    with pytest.raises(UserError, match=r"shards in a row could not be built, the last: the process was lost; fix"):
        dispatch([shard(number) for number in range(1000)], workers)
    assert sum(workers.tries.values()) < 50

    class Refusing(FakeWorkers):
        def finish(self, worker: int, handle: str, shard: PlannedShard) -> None:
            raise UserError("the store is not writable")

    refused("the store is not writable", dispatch, SHARDS, Refusing(2))
