"""Saving while training goes on: a copy to host memory in the loop, the writing in a thread."""

import json
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sd3_light.checkpoint.host_buffers import HostBuffers, room
from sd3_light.checkpoint.store import checkpoint_name, commit, keep_newest, start_fresh, temporary_folder, write_part
from sd3_light.config.faults import UserError
from sd3_light.engines.protocol import TensorPiece

_MESSAGE_BYTES = 1024
_ROOM = "room in host memory"


@dataclass(frozen=True)
class JobResult:
    """A job that ended: what it returned or raised, and how long it took."""

    name: str
    result: Any
    error: BaseException | None
    seconds: float


class BackgroundWorker:
    """One thread, called ``name``, that does jobs in the order in which they were given.

    A process that ends without `close` does not wait for them: after a fault the other ranks may be gone, and a job
    that waits for them would keep this one alive.
    """

    def __init__(self, name: str = "background") -> None:
        self._jobs: queue.Queue[tuple[str, Callable[[], Any]] | None] = queue.Queue()
        self._done: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, name: str, job: Callable[[], Any]) -> None:
        """Do the job after those that were given before it."""
        assert self._thread.is_alive(), "closed"
        self._jobs.put((name, job))

    def has_news(self) -> bool:
        """Whether `poll` has something to give."""
        return not self._done.empty()

    def poll(self) -> list[JobResult]:
        """The jobs that ended since the last time, without waiting."""
        found = []
        while self.has_news():
            found.append(self._done.get())
        return found

    def is_idle(self, seconds: float = 0.0) -> bool:
        """Whether no job is left, now or within some seconds."""
        with self._jobs.all_tasks_done:
            return self._jobs.all_tasks_done.wait_for(lambda: not self._jobs.unfinished_tasks, seconds)

    def wait(self) -> list[JobResult]:
        """Wait until no job is left; those that ended since the last time."""
        self._jobs.join()
        return self.poll()

    def close(self) -> None:
        """Wait for all jobs and end the thread; `poll` still gives what ended."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (given := self._jobs.get()) is not None:
            name, job = given
            started = time.perf_counter()
            result, fault = None, None
            try:
                result = job()
            except BaseException as error:  # not dropped: the caller's thread gets it
                fault = error
            self._done.put(JobResult(name, result, fault, time.perf_counter() - started))
            del given, job, result, fault  # what they hold is large, and the next one may be hours away
            self._jobs.task_done()


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint that is in place: its size, the seconds in the background, the seconds that training stood still.

    ``warning`` is one line where older ones could not be deleted.
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
    """A checkpoint that could not be written; ``reason`` is one line that names the rank. Earlier ones are intact."""

    step: int
    facts: dict[str, Any]
    reason: str
    seconds: float
    stall_seconds: float


class _SaveFailed(Exception):
    """What one rank could not do, as all ranks know it."""


class CheckpointKeeper:
    """Writes checkpoints into ``folder`` in the background and keeps the newest ``keep_last`` (0: all).

    Ranks 0 to ``writers`` - 1 each write a part, and machines that write share the folder. The ranks agree, in their
    threads, over ``group``: a gloo group of ranks 0, 1, ... of the run, the writers among them, that nothing else uses
    (None: rank 0 writes alone). Those in it call `save` for the same steps in the same order, and all of them are told
    how it went; to a rank outside of it nothing happens and nothing is told.
    """

    def __init__(
        self, folder: Path, rank: int, writers: int = 1, group: dist.ProcessGroup | None = None, keep_last: int = 0
    ) -> None:
        self.folder, self.rank, self.writers, self.keep_last = folder, rank, writers, keep_last
        self._group, self._members = group, 1 if group is None else dist.get_world_size(group)
        assert rank >= writers or writers <= self._members, "writers cannot agree without a group"
        self._copies = HostBuffers()
        self._background = BackgroundWorker("checkpoints")
        self._ended: list[JobResult] = []

    def prepare(self, pieces: Iterable[TensorPiece]) -> None:
        """Make pinned room for copies of these pieces in the background, so that the first save need not."""
        held = list(pieces)
        if self.rank < self.writers and any(piece.values.is_cuda for piece in held):
            nbytes = room(held)
            self._background.submit(_ROOM, lambda: self._copies.reserve(nbytes))

    def save(self, step: int, pieces: Iterable[TensorPiece], facts: Mapping[str, Any]) -> float:
        """Copy the pieces and begin to write them; the seconds that this took, an earlier save's end included."""
        if self.rank >= self._members:
            return 0.0
        started = time.perf_counter()
        self._ended += self._background.wait()  # its copies are in the same memory
        copies = self._copies.take(pieces) if self.rank < self.writers else []
        kept = json.loads(json.dumps(dict(facts)))  # as it is now
        stall = time.perf_counter() - started
        self._background.submit(f"step {step}", lambda: self._write(step, copies, kept, stall))
        return stall

    def is_idle(self, seconds: float = 0.0) -> bool:
        """Whether nothing is being written, now or within some seconds."""
        return self._background.is_idle(seconds)

    def has_news(self) -> bool:
        """Whether `poll` has something to tell."""
        return bool(self._ended) or self._background.has_news()

    def poll(self) -> list[CheckpointSaved | CheckpointFailed]:
        """What ended since the last time, without waiting."""
        return self._take(self._background.poll())

    def wait(self) -> list[CheckpointSaved | CheckpointFailed]:
        """Wait for what is being written; what ended since the last time."""
        return self._take(self._background.wait())

    def close(self) -> None:
        """Wait for what is being written and end the thread; `poll` still tells of it."""
        self._background.close()

    def _take(self, done: list[JobResult]) -> list[CheckpointSaved | CheckpointFailed]:
        ended, self._ended = self._ended + done, []
        for one in ended:
            if one.error is not None:
                raise one.error
        return [one.result for one in ended if one.name != _ROOM]

    def _write(
        self, step: int, pieces: list[TensorPiece], facts: dict[str, Any], stall: float
    ) -> CheckpointSaved | CheckpointFailed:
        """In the thread. Nobody writes before leftovers are gone, and nobody commits before all have written."""
        started = time.perf_counter()
        temporary = temporary_folder(self.folder, step)
        main, writes = self.rank == 0, self.rank < self.writers
        try:
            self._together(main, lambda: start_fresh(temporary))
            sizes = self._together(writes, lambda: write_part(temporary, self.rank, pieces))
            warning = self._together(main, lambda: self._commit(step, facts))[0]
        except _SaveFailed as failure:
            # all have stopped writing; each clears up, for the folder may prove not to be shared
            shutil.rmtree(temporary, ignore_errors=True)
            return CheckpointFailed(step, facts, str(failure), time.perf_counter() - started, stall)
        path, size = self.folder / checkpoint_name(step), sum(map(int, sizes[: self.writers]))
        return CheckpointSaved(step, facts, path, size, time.perf_counter() - started, stall, warning)

    def _commit(self, step: int, facts: dict[str, Any]) -> str:
        path = commit(self.folder, step, range(self.writers), facts)
        try:
            keep_newest(self.folder, self.keep_last, path)
        except OSError as error:
            return f"older checkpoints in {self.folder} cannot be deleted: {_reason(error)}"
        return ""

    def _together(self, mine: bool, work: Callable[[], object]) -> list[str]:
        """Do the work if it is mine, then hear from all ranks: their results, or the first failure for everyone."""
        failed, said = 0, ""
        try:
            said = str(work()) if mine else ""
        except (OSError, UserError) as error:
            failed, said = 1, _reason(error)
        heard = self._exchange(bytes([failed]) + said.encode())
        for rank, message in enumerate(heard):
            if message[0]:
                who = f"rank {rank}: " if self._members > 1 else ""
                raise _SaveFailed(f"{who}{_text(message)}; earlier checkpoints are intact")
        return [_text(message) for message in heard]

    def _exchange(self, message: bytes) -> list[bytes]:
        if self._group is None:
            return [message]
        mine = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
        mine[: len(message)] = torch.frombuffer(bytearray(message[:_MESSAGE_BYTES]), dtype=torch.uint8)
        heard = [torch.empty_like(mine) for _ in range(self._members)]
        try:
            dist.all_gather(heard, mine, group=self._group)
        except RuntimeError as error:  # gloo has no other: a rank is gone, or late beyond the group's patience
            lost = f"rank {self.rank} lost the others: {_reason(error)}; earlier checkpoints are intact"
            raise _SaveFailed(lost) from error
        return [one.numpy().tobytes() for one in heard]


def _text(message: bytes) -> str:
    return message[1:].rstrip(b"\0").decode(errors="ignore")


def _reason(error: Exception) -> str:
    """One line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split())
