"""Worker processes that read and decode pictures, in order, a bounded number of batches ahead of who needs them.

A picture that brings its decoder down takes a worker with it, not the run: the batches in
hand are then done again one picture at a time, and the one that crashes again is told apart from the others.
"""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Generic, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerPool(Generic[Task, Result]):
    """``work`` maps a batch of tasks to a list of results, in ``count`` processes (in this one when 0).

    ``crashed`` gives the result of a task that kills its process. ``ahead`` batches are in hand at most. Usable as a
    context manager.
    """

    def __init__(
        self,
        count: int,
        work: Callable[[Sequence[Task]], list[Result]],
        crashed: Callable[[Task], Result],
        ahead: int | None = None,
    ) -> None:
        self._count, self._work, self._crashed = count, work, crashed
        self.ahead = ahead or count + 1
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "WorkerPool[Task, Result]":
        # forked here and now, before whoever enters starts threads of its own
        if self._count:
            self._pool = _new_pool(self._count)
            self._pool.submit(os.getpid)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the processes; what they have in hand is dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def map(self, batches: Iterable[Sequence[Task]]) -> Iterator[list[Result]]:
        """The results of each batch, in order; batches are taken from the iterable only as they are needed."""
        if self._count == 0:
            for batch in batches:
                yield self._work(batch)
            return
        waiting: deque[tuple[Sequence[Task], Future[list[Result]]]] = deque()
        for batch in batches:
            waiting.append((batch, self._submit(batch)))
            if len(waiting) >= self.ahead:
                yield self._take(waiting)
        while waiting:
            yield self._take(waiting)

    def _submit(self, batch: Sequence[Task]) -> "Future[list[Result]]":
        if self._pool is None:
            self._pool = _new_pool(self._count)
        try:
            return self._pool.submit(self._work, batch)
        except BrokenProcessPool:
            self.close()
            return self._submit(batch)

    def _take(self, waiting: deque[tuple[Sequence[Task], "Future[list[Result]]"]]) -> list[Result]:
        batch, future = waiting.popleft()
        try:
            return future.result()
        except BrokenProcessPool:
            # every batch in hand fell with the process: this one is looked at closely, the others are given out again
            results = self._one_by_one(batch)
            again = [(other, self._submit(other) if _fell(done) else done) for other, done in waiting]
            waiting.clear()
            waiting.extend(again)
            return results

    def _one_by_one(self, batch: Sequence[Task]) -> list[Result]:
        results = []
        careful = WorkerPool(1, self._work, self._crashed)
        with careful:
            for task in batch:
                try:
                    results += careful._submit([task]).result()
                except BrokenProcessPool:
                    results.append(self._crashed(task))
        return results


def _fell(future: "Future[list[Result]]") -> bool:
    """Whether a batch was lost with its process."""
    return future.done() and isinstance(future.exception(), BrokenProcessPool)


def _new_pool(count: int) -> ProcessPoolExecutor:
    # forked, so that a script of one's own without a main guard is not run again in every worker
    context = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(count, mp_context=context, initializer=_die_with_parent)


def _die_with_parent() -> None:
    """A worker of a killed run must not wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
