"""Save checkpoints while training continues: the loop copies to host memory, a thread writes."""

import json
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from sd3_light.checkpoint.host_buffers import HostBuffers, copy_bytes
from sd3_light.checkpoint.store import (
    checkpoint_name,
    commit,
    has_checkpoint,
    keep_newest,
    reset_folder,
    temporary_folder,
    write_part,
)
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import TensorPiece
from sd3_light.files import disk_remedy


@dataclass(frozen=True)
class JobResult:
    """The result of a finished job: what it returned or raised, and its duration."""

    name: str
    result: Any
    error: BaseException | None
    seconds: float


class BackgroundWorker:
    """A thread that runs jobs in submission order.

    A process that exits without `close` does not wait for them: after an error other ranks may be gone, and a job that
    waits for them would keep this process alive.
    """

    def __init__(self, name: str = "background") -> None:
        self._jobs: queue.Queue[tuple[str, Callable[[], Any]] | None] = queue.Queue()
        self._done: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, name: str, job: Callable[[], Any]) -> None:
        """Queue a job."""
        assert self._thread.is_alive(), "closed"
        self._jobs.put((name, job))

    def poll(self) -> list[Any]:
        """Return the results since the last call, without waiting: a `JobResult` per job."""
        results = []
        while not self._done.empty():
            results.append(self._done.get())
        return results

    def is_idle(self, seconds: float = 0.0) -> bool:
        """Whether all jobs are finished, now or within ``seconds``."""
        with self._jobs.all_tasks_done:
            return self._jobs.all_tasks_done.wait_for(lambda: not self._jobs.unfinished_tasks, seconds)

    def wait(self) -> list[Any]:
        """Wait for all jobs and return the results since the last call."""
        self._jobs.join()
        return self.poll()

    def close(self) -> None:
        """Wait for all jobs and end the thread; `poll` still returns their results."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (queued := self._jobs.get()) is not None:
            name, job = queued
            started = time.perf_counter()
            result = None
            raised = None
            try:
                result = job()
            except BaseException as error:  # passed on to the caller's thread
                raised = error
            self._done.put(JobResult(name, result, raised, time.perf_counter() - started))
            del queued, job, result, raised  # they may hold much memory, and the next job may be hours away
            self._jobs.task_done()


@dataclass(frozen=True)
class CheckpointSaved:
    """A complete checkpoint: its size, the seconds in the background, and the seconds that training was paused.

    ``warning`` is one line if older checkpoints could not be deleted.
    """

    step: int
    facts: dict[str, Any]
    path: Path
    bytes: int
    seconds: float
    stall_seconds: float
    warning: str = ""


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint that could not be written; ``reason`` is one line with the rank.

    ``remedy`` is what to do about it, if the disk is the cause.
    """

    step: int
    reason: str
    remedy: str = ""


class _WriteFailed(Exception):
    """A rank could not write: the reason in one line and its remedy."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


class CheckpointKeeper(BackgroundWorker):
    """Writes checkpoints to ``folder`` in the background and keeps the newest ``keep_last`` (0: all).

    Ranks 0 to ``writers`` - 1 each write a part; machines that write must share the folder. The ranks synchronize, in
    their threads, over ``group``: a dedicated gloo group of the first ranks, including all writers (None: rank 0 writes
    alone). Its members call `save` for the same steps in the same order, and all of them get the results; other ranks
    do nothing and get none.
    """

    def __init__(
        self, folder: Path, rank: int, writers: int = 1, group: dist.ProcessGroup | None = None, keep_last: int = 0
    ) -> None:
        super().__init__("checkpoints")
        self.folder = folder
        self.rank = rank
        self.writers = writers
        self.keep_last = keep_last
        self._group = group
        self._members = 1 if group is None else dist.get_world_size(group)
        assert rank >= writers or writers <= self._members, "several writers need a group"
        self._copies = HostBuffers()

    def prepare(self, pieces: Iterable[TensorPiece]) -> None:
        """Allocate pinned memory for these pieces in the background, ahead of the first save."""
        pieces = list(pieces)
        if self.rank < self.writers and any(piece.values.is_cuda for piece in pieces):
            nbytes = copy_bytes(pieces)
            self.submit("reserve host memory", lambda: self._copies.reserve(nbytes))

    def save(self, step: int, pieces: Iterable[TensorPiece], facts: Mapping[str, Any]) -> float:
        """Copy the pieces and start writing them; return the seconds this took, with the wait for an earlier save.

        Pieces in host memory are not copied, so that they are written before this returns.
        """
        if self.rank >= self._members:
            return 0.0
        started = time.perf_counter()
        self._jobs.join()  # an earlier save uses the same buffers
        copies = self._copies.copy(pieces) if self.rank < self.writers else []
        frozen = json.loads(json.dumps(dict(facts)))  # a copy: the caller may change them
        stall = time.perf_counter() - started
        self.submit(f"step {step}", lambda: self._write(step, copies, frozen, stall))
        if not any(piece.hosted for piece in copies):
            return stall
        self._jobs.join()
        return time.perf_counter() - started

    def poll(self) -> list[CheckpointSaved | CheckpointFailed]:
        """Return the saves that ended since the last call, without waiting."""
        jobs: list[JobResult] = super().poll()
        for job in jobs:
            if job.error is not None:
                raise job.error
        return [job.result for job in jobs if job.result is not None]

    def _write(
        self, step: int, pieces: list[TensorPiece], facts: dict[str, Any], stall: float
    ) -> CheckpointSaved | CheckpointFailed:
        """Write a checkpoint, in the thread: remove leftovers, let all ranks write, then commit."""
        started = time.perf_counter()
        temporary = temporary_folder(self.folder, step)
        main = self.rank == 0
        writes = self.rank < self.writers
        try:
            self._together(main, lambda: reset_folder(temporary))
            sizes = self._together(writes, lambda: write_part(temporary, self.rank, pieces))
            warning = self._together(main, lambda: self._commit(step, facts))[0]
        except _WriteFailed as failure:
            # all ranks have stopped writing; each cleans up, because the folder may not be shared after all
            shutil.rmtree(temporary, ignore_errors=True)
            intact = "; earlier checkpoints are intact" if has_checkpoint(self.folder) else ""
            return CheckpointFailed(step, f"{failure}{intact}", failure.remedy)
        path = self.folder / checkpoint_name(step)
        size = sum(sizes[: self.writers])
        return CheckpointSaved(step, facts, path, size, time.perf_counter() - started, stall, warning)

    def _commit(self, step: int, facts: dict[str, Any]) -> str:
        path = commit(self.folder, step, range(self.writers), facts)
        try:
            keep_newest(self.folder, self.keep_last, path)
        except OSError as error:
            return f"older checkpoints in {self.folder} cannot be deleted: {_reason(error)}"
        return ""

    def _together(self, has_work: bool, work: Callable[[], object]) -> list[Any]:
        """Do this rank's work, if any; return the results of all ranks, or raise the first failure on all of them."""
        result = None
        failure = ""
        remedy = ""
        try:
            result = work() if has_work else None
        except (OSError, UserError) as error:
            failure = _reason(error)
            remedy = disk_remedy(error)
        outcomes: list[Any] = [(result, failure, remedy)] * self._members
        if self._group is not None:
            try:
                dist.all_gather_object(outcomes, (result, failure, remedy), self._group)
            except RuntimeError as error:  # gloo raises only this: a rank is gone, or the group's timeout expired
                raise _WriteFailed(f"rank {self.rank} lost the other ranks: {_reason(error)}") from error
        for rank, (_, failure, remedy) in enumerate(outcomes):
            if failure:
                prefix = f"rank {rank}: " if self._members > 1 else ""
                raise _WriteFailed(f"{prefix}{failure}", remedy)
        return [result for result, _, _ in outcomes]


def _reason(error: Exception) -> str:
    """Return the error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
