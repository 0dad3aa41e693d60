"""Distribute shards among workers that can be lost at any time: every shard is built, or fails after a number of tries.

A worker has several shards in progress, and when it is lost any of them may be the cause. So they are repeated at the
end, each alone on a worker, and only these tries count.
"""

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from typing import Protocol, TypeVar

from sd3_light.config.faults import UserError
from sd3_light.data.cache_plan import PlannedShard

DEPTH = 3
"""Shards that a worker has in progress: one is decoded, one is encoded and one is written."""
TRIES = 3
"""Times that a shard is tried alone before it fails."""
_MIN_FAILURES = 8

Worker = TypeVar("Worker", bound=Hashable)
Handle = TypeVar("Handle", bound=Hashable)


class WorkerFailed(Exception):
    """A worker was lost or raised an exception while it built a shard; the text is the cause."""


class Workers(Protocol[Worker, Handle]):
    """Workers of a cluster; their number may change at any time."""

    def ready(self, wanted: int) -> Sequence[Worker]:
        """Return the workers that accept shards now. ``wanted`` is the number that have work to do."""

    def submit(self, worker: Worker, shard: PlannedShard) -> Handle:
        """Start to build a shard."""

    def wait(self, handles: Sequence[Handle]) -> Sequence[Handle]:
        """Return handles that have finished, after a while perhaps none."""

    def finish(self, worker: Worker, handle: Handle, shard: PlannedShard) -> None:
        """Take the result of a finished handle. Raises WorkerFailed, or a UserError that stops the run."""


def dispatch(planned: Sequence[PlannedShard], workers: Workers[Worker, Handle]) -> dict[PlannedShard, str]:
    """Build shards on workers. Return those that failed in every try, with the last cause."""
    failed = _distribute(planned, workers, DEPTH)
    for _ in range(TRIES):
        failed = _distribute(list(failed), workers, depth=1)
    return failed


def _distribute(
    planned: Sequence[PlannedShard], workers: Workers[Worker, Handle], depth: int
) -> dict[PlannedShard, str]:
    """Try each shard once, with at most ``depth`` shards per worker. Return those that failed, with the cause."""
    queue = deque(planned)
    running = dict[Handle, tuple[Worker, PlannedShard]]()
    loads = Counter[Worker]()
    failed = dict[PlannedShard, str]()
    in_a_row = 0
    most_ready = 0
    while queue or running:
        ready = workers.ready(len(queue) + len(running))
        most_ready = max(most_ready, len(ready))
        for level in range(1, depth + 1):  # the first shard of every worker before the second of any
            for worker in ready:
                if queue and loads[worker] < level:
                    shard = queue.popleft()
                    running[workers.submit(worker, shard)] = worker, shard
                    loads[worker] += 1
        for handle in workers.wait(list(running)):
            worker, shard = running.pop(handle)
            loads[worker] -= 1
            try:
                workers.finish(worker, handle, shard)
                in_a_row = 0
            except WorkerFailed as error:
                failed[shard] = str(error)
                in_a_row += 1
            # one shard may be at fault, and all workers may be lost at once; more in a row have another cause
            if depth > 1 and in_a_row >= depth * max(_MIN_FAILURES, 2 * most_ready):
                hint = "fix the cause and run again: finished shards are kept"
                raise UserError(f"{in_a_row} shards in a row could not be built, the last: {failed[shard]}; {hint}")
    return failed
