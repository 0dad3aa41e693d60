"""The loader: micro-batches prepared by worker processes, at most ``workers x prefetch`` of them in memory."""

import atexit
import gc
import multiprocessing.util
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch.utils.data._utils.signal_handling
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from sd3_light.config.faults import UserError
from sd3_light.data.slots import AllocateTensor, InPlaceDataset, Packed, Packer, Pin, SlotPool, tensors_in
from sd3_light.data.stream import CachedBatch, new_buffer

Ticket = tuple[int, int | None]
"""A request to a worker: an item and its slot, None if no slot is free."""

OnLostWorker = Callable[[UserError], None]
"""Gets the error about a worker that ended by itself."""


@dataclass
class LoadTimes:
    """Seconds that batches took: how long the trainer waited, and the wall and CPU time of reading and preparing."""

    waited: float = 0.0
    read: float = 0.0
    read_cpu: float = 0.0
    prepare: float = 0.0
    prepare_cpu: float = 0.0

    def add(self, other: "LoadTimes") -> None:
        """Add the times of another batch."""
        for name, seconds in vars(other).items():
            setattr(self, name, getattr(self, name) + seconds)

    @contextmanager
    def measuring(self, work: Literal["read", "prepare"]) -> Iterator[None]:
        """Measure the block."""
        wall = time.perf_counter()
        cpu = time.thread_time()
        yield
        self.add(LoadTimes(**{work: time.perf_counter() - wall, f"{work}_cpu": time.thread_time() - cpu}))


class PreparesInputs(Protocol):
    """A model that can prepare its inputs in a worker process."""

    def prepare_inputs(self, batch: CachedBatch, timestep_quantile: float | None = None) -> Any:
        """Return the micro-batch for a batch of cached features: a `Batch`, or whatever the training loop takes."""


class PreparesInPlace(PreparesInputs, Protocol):
    """A model that can write large tensors into memory allocated by the caller, which saves a copy."""

    def prepare_into(self, batch: CachedBatch, empty: AllocateTensor, timestep_quantile: float | None = None) -> Any:
        """Like `prepare_inputs`; ``empty`` allocates uninitialized tensors."""


class _PreparedItems(Dataset[Any]):
    """A dataset of prepared items. Workers pack an item into the slot of its ticket."""

    def __init__(
        self,
        dataset: Dataset[Any],
        prepare: Callable[[CachedBatch], Any],
        into: Callable[[CachedBatch, AllocateTensor], Any] | None,
    ) -> None:
        self.dataset = dataset
        self.prepare = prepare
        self._into = into
        self.pool = SlotPool(0)
        self.times = LoadTimes()
        self._scratch = new_buffer(0)
        self._reads_to_slot = False  # whether prepared batches contain tensors that were read

    def __getitem__(self, ticket: Ticket) -> Any:
        item, slot = ticket
        if get_worker_info() is None:
            with self.times.measuring("read"):
                batch = self._read_in_trainer(item, slot)
            with self.times.measuring("prepare"):
                return self.prepare(batch)
        try:
            return self._prepare_in_worker(item, slot)
        except UserError as error:
            return UserError(str(error))  # as a value: torch would add the worker's traceback to what it raises

    def _read_in_trainer(self, item: int, slot: int | None) -> Any:
        if slot is not None and isinstance(self.dataset, InPlaceDataset):
            return self.dataset.fetch(item, lambda nbytes: self.pool.lease(slot, nbytes))
        if slot is not None:
            self.pool.release(slot)
        return self._read(item, new_buffer)

    def _prepare_in_worker(self, item: int, slot: int | None) -> Any:
        if slot is None:  # batches are sent in the background, so each needs its own memory
            return self.prepare(self._read(item, new_buffer))
        packer = Packer(self.pool, slot)
        times = LoadTimes()
        # data that ends up in the prepared batch is read into the slot, other data into memory that is reused
        with times.measuring("read"):
            batch = self._read(item, packer.allocate if self._reads_to_slot else self._scratch_memory)
        with times.measuring("prepare"):
            prepared = self.prepare(batch) if self._into is None else self._into(batch, packer.empty)
            packed = packer.pack(prepared)
        if self._into is None:  # with it, large tensors are in the slot already, and the rest is copied there
            self._reads_to_slot = self._reads_to_slot or _shares_memory(prepared, self._scratch)
        return replace(packed, times=times)

    def _read(self, item: int, allocate: Callable[[int], Tensor]) -> Any:
        if isinstance(self.dataset, InPlaceDataset):
            return self.dataset.fetch(item, allocate)
        return self.dataset[item]

    def _scratch_memory(self, nbytes: int) -> Tensor:
        if len(self._scratch) < nbytes:
            self._scratch = new_buffer(nbytes)
        return self._scratch[:nbytes]


class _Tickets:
    """Yields each item with a slot that is free at that moment. `remaining` yields the items that did not arrive."""

    def __init__(self, items: Iterable[int], prepared: _PreparedItems) -> None:
        self.items = items
        self.prepared = prepared

    def __iter__(self) -> Iterator[Ticket]:
        self._rest = iter(self.items)
        self._requested = deque[int]()
        return self._tickets()

    def _tickets(self) -> Iterator[Ticket]:
        for item in self._rest:
            self._requested.append(item)
            yield item, self.prepared.pool.acquire()

    def arrived(self) -> None:
        """Forget the oldest request: batches arrive in the order of their items."""
        self._requested.popleft()

    def remaining(self) -> Iterator[int]:
        """Return the items that were requested and did not arrive, then those that were not requested."""
        return chain(tuple(self._requested), self._rest)


class PipelineDataLoader:
    """Yields the prepared micro-batches of a rank, ``gradient_accumulation_steps`` per optimizer step.

    Items of ``dataset`` are micro-batches. Workers hold at most ``workers x prefetch`` of them, finished or in
    progress, so host memory is bounded by these and the step in use (law 10). Without workers they are made on demand.
    With ``pin`` a device can copy directly from the workers' memory; the copy must end before the tensors are freed.
    Workers that have a slot call ``prepare_into``, if given, instead of the model's `prepare_inputs`: see
    `PreparesInPlace`. Workers run as long as the iteration: if you leave it early, close it, or they run until the
    program exits. ``times`` sums up where the time goes. ``slot_bytes`` are those of the largest prepared batch, if
    known: slots are then pinned once, in the background. If a worker ends by itself, ``on_lost_worker`` gets the error
    and the batches are prepared without workers from there on; without it the error is raised.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        engine: object,
        gradient_accumulation_steps: int,
        model: PreparesInputs,
        num_dataloader_workers: int = 0,
        prefetch_batches_per_worker: int = 1,
        items: Iterable[int] | None = None,
        pin: Pin | None = None,
        prepare_into: Callable[[Any, AllocateTensor], Any] | None = None,
        times: LoadTimes | None = None,
        slot_bytes: int = 0,
        on_lost_worker: OnLostWorker | None = None,
    ) -> None:
        self.engine = engine
        self._pin = pin
        self._on_lost_worker = on_lost_worker
        self._slot_bytes = slot_bytes if num_dataloader_workers else 0  # otherwise slots hold what was read
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._items = _PreparedItems(dataset, model.prepare_inputs, prepare_into)
        self.times = self._items.times = LoadTimes() if times is None else times
        self._num_slots = num_dataloader_workers * prefetch_batches_per_worker + gradient_accumulation_steps + 1
        if items is None:
            items = range(len(dataset))  # type: ignore[arg-type]
        self._tickets = _Tickets(items, self._items)
        self.dataloader: DataLoader[Any] = DataLoader(
            self._items,
            batch_size=None,
            sampler=self._tickets,
            num_workers=num_dataloader_workers,
            prefetch_factor=prefetch_batches_per_worker if num_dataloader_workers else None,
            # forked workers share the slots, and a cache that is held in memory
            multiprocessing_context=multiprocessing.get_context("fork") if num_dataloader_workers else None,
            worker_init_fn=_start_worker,
        )

    def __iter__(self) -> Generator[Any, None, None]:
        pool = self._items.pool = SlotPool(self._num_slots, self._pin, self._slot_bytes)
        with _no_errors_from_signals():
            batches = iter(self.dataloader)  # workers start here, with this pool
        if self._pin is not None and self._slot_bytes:  # while workers prepare the first batches
            threading.Thread(target=pool.reserve, daemon=True).start()
        _WORKERS.update(dict.fromkeys(getattr(batches, "_workers", ()), os.getpid()))
        try:
            yield from self._prepared(batches, pool)
        finally:
            # the traceback of an error holds the batches: torch would wait 5 s for each worker when it is collected
            getattr(batches, "_shutdown_workers", lambda: None)()

    def _prepared(self, batches: Iterator[Any], pool: SlotPool) -> Iterator[Any]:
        while True:
            started = time.perf_counter()
            try:
                prepared = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if not (dead := [worker for worker in getattr(batches, "_workers", ()) if worker.exitcode]):
                    raise
                lost = _worker_exit_error(dead[0])
                if self._on_lost_worker is None:
                    raise lost from error
                self._on_lost_worker(lost)
                yield from (self._items[item, None] for item in self._tickets.remaining())
                return
            self._tickets.arrived()
            self.times.waited += time.perf_counter() - started
            if isinstance(prepared, UserError):
                raise prepared
            if isinstance(prepared, Packed):
                self.times.add(prepared.times)
                prepared = pool.unpack(prepared)
            yield prepared
            del prepared  # free it before waiting for the next one

    def steps(self) -> Generator[list[Any], None, None]:
        """Yield the micro-batches of each optimizer step in a list that is emptied when the next step is requested."""
        count = self.gradient_accumulation_steps
        with closing(iter(self)) as source:
            batches = list(islice(source, count))
            while batches:
                assert len(batches) == count, "the last optimizer step has too few micro-batches"
                yield batches
                batches.clear()
                batches.extend(islice(source, count))


def _start_worker(worker: int) -> None:
    """Ignore SIGTERM and Ctrl-C in a worker, which receives them too, and exclude inherited objects from collections.

    The trainer needs workers until it has saved. A full collection would visit every object of the trainer, and copy
    the memory that the worker shares with it.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()


_WORKERS: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()
"""Worker process -> pid of the process that started it."""


@atexit.register  # runs before multiprocessing's handler, which was registered earlier and would wait forever
def _end_workers() -> None:
    """Kill the workers of unclosed iterations when the program exits; they ignore SIGTERM."""
    for worker, parent in list(_WORKERS.items()):
        if parent == os.getpid() and worker.is_alive():
            worker.kill()


@contextmanager
def _no_errors_from_signals() -> Iterator[None]:
    """Remove the handler that torch installs in the block: it raises errors of dead workers inside steps.

    Without it torch notices when the next batch is waited for. All steps until then are complete and can be saved.
    """
    before = signal.getsignal(signal.SIGCHLD)
    yield
    if threading.current_thread() is threading.main_thread():  # elsewhere torch installs none
        is_torchs = getattr(before, "__module__", "") == torch.utils.data._utils.signal_handling.__name__
        signal.signal(signal.SIGCHLD, before if callable(before) and not is_torchs else signal.SIG_DFL)


def _worker_exit_error(worker: Any) -> UserError:
    """Return the error for a worker that ended by itself."""
    code = worker.exitcode
    names = {number: number.name for number in signal.Signals}
    cause = f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exited with code {code}"
    return UserError(
        f"DataLoader worker (pid {worker.pid}) {cause}: out of memory, or ended by another program; lower "
        "num_dataloader_workers (dataset_num_workers in scripts) or free memory, then resume"
    )


def _shares_memory(value: Any, memory: Tensor) -> bool:
    """Return whether any tensor of a prepared micro-batch is in ``memory``."""
    start = memory.data_ptr()
    end = memory.data_ptr() + len(memory)
    return any(start <= tensor.data_ptr() < end for tensor in tensors_in(value))
