"""The loader: micro-batches prepared by worker processes, at most ``workers x prefetch`` of them alive."""

import atexit
import multiprocessing.util
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from sd3_light.config.faults import UserError
from sd3_light.data.slots import AllocateTensor, InPlaceDataset, Packed, Packer, Pin, SlotPool, tensors_in
from sd3_light.data.stream import CachedBatch, new_buffer

PreparedBatch = tuple[tuple[Any, ...], tuple[Any, ...]]
"""(features, label): what the model takes, and what the loss compares it with."""

Ticket = tuple[int, int | None]
"""What a worker is asked for: an item, and the slot that it may use."""


class PreparesInputs(Protocol):
    """What the loader asks of a model."""

    def prepare_inputs(self, batch: CachedBatch, timestep_quantile: float | None = None) -> PreparedBatch:
        """Cached features in, (features, label) out; runs in a worker process."""


class PreparesInPlace(PreparesInputs, Protocol):
    """A model that can lay what is large where it is wanted, which saves a copy."""

    def prepare_into(
        self, batch: CachedBatch, empty: AllocateTensor, timestep_quantile: float | None = None
    ) -> PreparedBatch:
        """What `prepare_inputs` gives; ``empty`` gives tensors to be filled, with old bytes in them."""


@dataclass(frozen=True)
class _Failed:
    """A fault of the user that a worker met; raised in the trainer, without the worker's traceback."""

    text: str


class _PreparedItems(Dataset[Any]):
    """A data set whose items come prepared, in a worker packed into the slot of their ticket."""

    def __init__(
        self,
        dataset: Dataset[Any],
        prepare: Callable[[CachedBatch], PreparedBatch],
        into: Callable[[CachedBatch, AllocateTensor], PreparedBatch] | None,
    ) -> None:
        self.dataset, self.prepare, self._into = dataset, prepare, into
        self.pool = SlotPool(0)
        self._scratch = new_buffer(0)
        self._handed_on = False  # whether what was read is part of what is prepared

    def __getitem__(self, ticket: Ticket) -> Any:
        item, slot = ticket
        if get_worker_info() is None:
            return self.prepare(self._read_here(item, slot))
        try:
            return self._in_worker(item, slot)
        except UserError as fault:
            return _Failed(str(fault))

    def _read_here(self, item: int, slot: int | None) -> Any:
        if slot is None:
            return self._read(item, new_buffer)
        if isinstance(self.dataset, InPlaceDataset):
            return self._read(item, lambda nbytes: self.pool.lease(slot, nbytes))
        self.pool.release(slot)
        return self._read(item, new_buffer)

    def _in_worker(self, item: int, slot: int | None) -> Any:
        if slot is None:  # batches travel in the background, so each needs memory of its own
            return self.prepare(self._read(item, new_buffer))
        packer = Packer(self.pool, slot)
        # what is read goes to the slot where it is handed on, else to memory that is read into each time
        batch = self._read(item, packer.allocate if self._handed_on else self._take_scratch)
        prepared = self.prepare(batch) if self._into is None else self._into(batch, packer.empty)
        packed = packer.pack(prepared)
        self._handed_on = self._handed_on or _shares_memory(prepared, self._scratch)
        return packed

    def _read(self, item: int, allocate: Callable[[int], Tensor]) -> Any:
        if isinstance(self.dataset, InPlaceDataset):
            return self.dataset.fetch(item, allocate)
        return self.dataset[item]

    def _take_scratch(self, nbytes: int) -> Tensor:
        if len(self._scratch) < nbytes:
            self._scratch = new_buffer(nbytes)
        return self._scratch[:nbytes]


class _Tickets:
    """Items in their order, each with a slot that is free when it is asked for."""

    def __init__(self, items: Iterable[int], prepared: _PreparedItems) -> None:
        self.items, self.prepared = items, prepared

    def __iter__(self) -> Iterator[Ticket]:
        pool = self.prepared.pool
        return ((item, pool.acquire()) for item in self.items)


class PipelineDataLoader:
    """Yields (features, label) micro-batches of a rank, ``gradient_accumulation_steps`` to an optimizer step.

    Items of ``dataset`` are micro-batches. Workers hold at most ``workers x prefetch`` of them, finished or in the
    making, so host memory is bounded by these and the step in use (law 10). Without workers they are made on demand.
    With ``pin`` a device can copy what workers made from where it lies; it must be done before the tensors go. Workers
    that have a slot call ``prepare_into``, where it is given, in place of the model's `prepare_inputs`: see
    `PreparesInPlace`. They live as long as the iteration: whoever leaves it early closes it, or they live until the
    program ends.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        engine: object,
        gradient_accumulation_steps: int,
        model: PreparesInputs,
        num_dataloader_workers: int = 0,
        prefetch_batches_per_worker: int = 1,
        items: range | None = None,
        pin: Pin | None = None,
        prepare_into: Callable[[Any, AllocateTensor], PreparedBatch] | None = None,
    ) -> None:
        self.engine, self._pin = engine, pin
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._items = _PreparedItems(dataset, model.prepare_inputs, prepare_into)
        self._num_slots = num_dataloader_workers * prefetch_batches_per_worker + gradient_accumulation_steps + 1
        count = len(dataset) if items is None else 0  # type: ignore[arg-type]
        self.dataloader: DataLoader[Any] = DataLoader(
            self._items,
            batch_size=None,
            sampler=_Tickets(items if items is not None else range(count), self._items),
            num_workers=num_dataloader_workers,
            prefetch_factor=prefetch_batches_per_worker if num_dataloader_workers else None,
            # forked workers share the slots, and a cache that is held in memory
            multiprocessing_context=multiprocessing.get_context("fork") if num_dataloader_workers else None,
            worker_init_fn=_outlive_signals,
        )

    def __iter__(self) -> Generator[PreparedBatch, None, None]:
        pool = self._items.pool = SlotPool(self._num_slots, self._pin)
        batches = iter(self.dataloader)  # workers start here, with this pool
        _WORKERS.update(dict.fromkeys(getattr(batches, "_workers", ()), os.getpid()))
        while True:
            try:
                prepared = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if fault := worker_exit_error(error):
                    raise fault from error
                raise
            if isinstance(prepared, _Failed):
                raise UserError(prepared.text)
            if isinstance(prepared, Packed):
                prepared = pool.unpack(prepared)
            yield prepared
            del prepared  # before the next is waited for

    def steps(self) -> Generator[list[PreparedBatch], None, None]:
        """The micro-batches of one optimizer step after another.

        A step's list is emptied when the next step is asked for, so that no two are alive.
        """
        batches: list[PreparedBatch] = []
        with closing(iter(self)) as source:
            while True:
                try:
                    batches.append(next(source))
                except StopIteration:
                    break
                if len(batches) == self.gradient_accumulation_steps:
                    yield batches
                    batches.clear()
        assert not batches, "the last optimizer step lacks micro-batches"


def _outlive_signals(worker: int) -> None:
    """A scheduler's SIGTERM or a Ctrl-C reaches workers too; the trainer needs them until it has saved and ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


_WORKERS: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()
"""Worker processes, with the process that started each."""


@atexit.register  # behind the import of multiprocessing's own way to end, so before it: that one would wait for ever
def _end_workers() -> None:
    """Kill workers of iterations that nobody has closed when the program ends: they do not hear a SIGTERM."""
    left = [worker for worker, parent in _WORKERS.items() if parent == os.getpid() and worker.is_alive()]
    if left:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise an error for each
    for worker in left:
        worker.kill()


def worker_exit_error(error: RuntimeError) -> UserError | None:
    """A worker's death as a fault of the user in one line; None for other errors.

    torch tells of it wherever the main thread happens to be, so whoever trains asks too.
    """
    text = str(error).partition("\n")[0]
    if not text.startswith("DataLoader worker (pid"):
        return None
    return UserError(
        f"{text.rstrip('. ')}: out of memory, or stopped by someone; lower num_dataloader_workers or "
        "dataloader_prefetch_per_worker, or free memory, then resume"
    )


def _shares_memory(value: Any, memory: Tensor) -> bool:
    """Whether any tensor of a prepared micro-batch lies in ``memory``."""
    first, last = memory.data_ptr(), memory.data_ptr() + len(memory)
    return any(first <= tensor.data_ptr() < last for tensor in tensors_in(value))
