"""A pool of worker processes that read and decode images, in order and a bounded number of batches ahead.

An image that crashes its decoder does not stop the run: the pending batch is repeated one image at a time in a new
process, and only the image that crashes again is rejected.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Generic, Protocol, Self, TypeVar

Task = TypeVar("Task")
Task_contra = TypeVar("Task_contra", contravariant=True)
Result = TypeVar("Result")


class BatchPool(Protocol[Task_contra, Result]):
    """Runs batches of tasks elsewhere."""

    def map(self, batches: Iterable[Sequence[Task_contra]]) -> Iterator[list[Result]]:
        """Yield the results of each batch, in order; batches are taken from the iterable as they are needed."""


class WorkerPool(Generic[Task, Result]):
    """Runs ``work``, which maps a batch of tasks to a list of results, in ``count`` processes (0: in this one).

    ``crashed`` is the result of a task that kills its process. At most ``ahead`` batches are pending.
    """

    def __init__(
        self, count: int, work: Callable[[Sequence[Task]], list[Result]], crashed: Result, ahead: int | None = None
    ) -> None:
        self._count = count
        self._work = work
        self._crashed = crashed
        self.ahead = ahead or count + 1
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        # start now, before the caller starts threads
        if self._count:
            self._pool = _new_pool(self._count)
            self._pool.submit(os.getpid)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the processes and drop pending batches."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def map(self, batches: Iterable[Sequence[Task]]) -> Iterator[list[Result]]:
        """Yield the results of each batch, in order; batches are taken from the iterable as they are needed."""
        if self._count == 0:
            for batch in batches:
                yield self._work(batch)
            return
        pending: deque[tuple[Sequence[Task], Future[list[Result]]]] = deque()
        for batch in batches:
            pending.append((batch, self._submit(batch)))
            if len(pending) >= self.ahead:
                yield self._next_result(pending)
        while pending:
            yield self._next_result(pending)

    def _submit(self, batch: Sequence[Task]) -> "Future[list[Result]]":
        if self._pool is None:
            self._pool = _new_pool(self._count)
        try:
            return self._pool.submit(self._work, batch)
        except BrokenProcessPool:
            self.close()
            return self._submit(batch)

    def _next_result(self, pending: deque[tuple[Sequence[Task], "Future[list[Result]]"]]) -> list[Result]:
        batch, future = pending.popleft()
        try:
            return future.result()
        except BrokenProcessPool:
            # all pending batches were lost with the process: isolate the crash in this one, resubmit the others
            results = self._one_by_one(batch)
            for number, (batch, future) in enumerate(pending):
                if future.done() and isinstance(future.exception(), BrokenProcessPool):
                    pending[number] = batch, self._submit(batch)
            return results

    def _one_by_one(self, batch: Sequence[Task]) -> list[Result]:
        results = []
        with WorkerPool(1, self._work, self._crashed) as pool:
            for task in batch:
                try:
                    results += pool._submit([task]).result()
                except BrokenProcessPool:
                    results.append(self._crashed)
        return results


def _new_pool(count: int) -> ProcessPoolExecutor:
    # forked, so that a custom script without a main guard is not run again in every worker; but a fork of a thread, as
    # that of a page, copies what other threads have in use, and may crash
    is_main = threading.current_thread() is threading.main_thread()
    context = multiprocessing.get_context("fork" if is_main else "spawn")
    return ProcessPoolExecutor(count, mp_context=context, initializer=_follow_parent)


def _follow_parent() -> None:
    """Ignore Ctrl-C, which the parent handles; start a thread that exits this worker when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
