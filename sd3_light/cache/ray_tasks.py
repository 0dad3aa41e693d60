"""Batches of images that Ray tasks read and decode on any node; the interface is that of `WorkerPool`."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import OutOfDiskError, OutOfMemoryError, RayTaskError, WorkerCrashedError

from sd3_light.config.base import DataLocation
from sd3_light.config.faults import UserError
from sd3_light.sources.decode import run_on_node

QUEUE_SECONDS = 20.0
"""If a task has not finished by then, it and all others share the CPUs that others reserved: perhaps none is free."""
_RETRIES = 3  # by Ray, for a lost process or node

Task = TypeVar("Task")
Result = TypeVar("Result")


class TaskPool(Generic[Task, Result]):
    """Runs ``work``, which maps a batch of tasks to a list of results, as Ray tasks named ``name``.

    ``crashed`` is the result of a task that kills its process every time. At most ``ahead`` batches are pending.
    ``num_cpus`` is what a task reserves; 0 lets it share the CPUs that others reserved. ``roots`` are the folders of
    the sources, which all nodes must have.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[Task]], list[Result]],
        crashed: Result,
        ahead: int,
        num_cpus: int = 1,
        roots: Sequence[DataLocation] = (),
    ) -> None:
        self._name, self._work, self._crashed = name, work, crashed
        self._ahead, self._num_cpus, self._roots = ahead, num_cpus, roots

    def map(self, batches: Iterable[Sequence[Task]]) -> Iterator[list[Result]]:
        """Yield the results of each batch, in order; batches are taken from the iterable as they are needed."""
        pending: deque[_Pending[Task]] = deque()
        for batch in batches:
            pending.append(self._submit(batch))
            if len(pending) >= self._ahead:
                yield self._result(pending.popleft())
        while pending:
            yield self._result(pending.popleft())

    def _submit(self, batch: Sequence[Task]) -> "_Pending[Task]":
        options = {"name": self._name, "max_retries": _RETRIES, "num_cpus": self._num_cpus}
        task = _remote_function().options(**options).remote(self._work, self._roots, batch)
        return _Pending(batch, task, self._num_cpus)

    def _result(self, pending: "_Pending[Task]") -> list[Result]:
        if pending.num_cpus and not ray.wait([pending.task], timeout=QUEUE_SECONDS if self._num_cpus else 0)[0]:
            ray.cancel(pending.task)
            self._num_cpus = 0
            pending = self._submit(pending.batch)
        try:
            results: list[Result] = _get(pending.task)
            return results
        except OutOfDiskError as error:
            problem = "the object store of Ray and the disk of a node are full"
            raise UserError(f"cannot {self._name}: {problem}; free disk space there, then start again") from error
        except (WorkerCrashedError, OutOfMemoryError):
            if len(pending.batch) == 1:
                return [self._crashed]
            return [result for item in pending.batch for result in self._result(self._submit([item]))]


@dataclass(frozen=True)
class _Pending(Generic[Task]):
    batch: Sequence[Task]
    task: Any
    num_cpus: int


@cache
def _remote_function() -> Any:
    """Return one remote function for all pools: the cluster and its processes keep each until the end."""
    return ray.remote(run_on_node)


def error_line(error: BaseException | None) -> str:
    """Return an exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _get(task: Any) -> Any:
    try:
        return ray.get(task)
    except RayTaskError as error:
        raise error.cause from error
