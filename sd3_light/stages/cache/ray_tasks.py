"""Batches of images that Ray tasks read and decode on any node; the interface is that of `WorkerPool`."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayTaskError, WorkerCrashedError

QUEUE_SECONDS = 60.0
"""A task that has not finished by then is repeated without reserving a CPU: perhaps no node has a free one any more."""
_RETRIES = 3  # by Ray, for a lost process or node

Task = TypeVar("Task")
Result = TypeVar("Result")


class TaskPool(Generic[Task, Result]):
    """Runs ``work``, which maps a batch of tasks to a list of results, as Ray tasks named ``name``.

    ``crashed`` is the result of a task that kills its process every time. At most ``ahead`` batches are pending.
    ``num_cpus`` is what a task reserves; 0 lets it share the CPUs that others reserved.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Task]], list[Result]],
        crashed: Result,
        ahead: int,
        num_cpus: int = 1,
    ) -> None:
        self._name, self._work, self._crashed = name, ray.remote(work), crashed
        self._ahead, self._num_cpus = ahead, num_cpus

    def map(self, batches: Iterable[Sequence[Task]]) -> Iterator[list[Result]]:
        """Yield the results of each batch, in order; batches are taken from the iterable as they are needed."""
        pending: deque[tuple[Sequence[Task], Any]] = deque()
        for batch in batches:
            pending.append((batch, self._submit(batch, self._num_cpus)))
            if len(pending) >= self._ahead:
                yield self._result(*pending.popleft())
        while pending:
            yield self._result(*pending.popleft())

    def _submit(self, batch: Sequence[Task], num_cpus: int) -> Any:
        return self._work.options(name=self._name, max_retries=_RETRIES, num_cpus=num_cpus).remote(batch)

    def _result(self, batch: Sequence[Task], task: Any) -> list[Result]:
        if self._num_cpus and not ray.wait([task], timeout=QUEUE_SECONDS)[0]:
            ray.cancel(task)
            task = self._submit(batch, 0)
        try:
            results: list[Result] = _get(task)
            return results
        except (WorkerCrashedError, OutOfMemoryError):
            if len(batch) == 1:
                return [self._crashed]
            return [result for item in batch for result in self._result([item], self._submit([item], self._num_cpus))]


def _get(task: Any) -> Any:
    try:
        return ray.get(task)
    except RayTaskError as error:
        raise error.cause from error
