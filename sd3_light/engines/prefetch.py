"""Copy micro-batches to the GPU ahead of the computation, from pinned memory on a separate stream.

Two device buffers alternate. A copy waits, on the device, until the previous content of its buffer has been used, and
the computation waits until the copy has arrived; the host waits for neither. The GPU memory for copies is that of two
micro-batches (law 10), however far the host runs ahead.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sd3_light.core.batch import Batch
from sd3_light.data.slots import aligned
from sd3_light.engines.protocol import MicroBatch

NUM_BUFFERS = 2

Finish = Callable[[MicroBatch], MicroBatch]


@dataclass
class _DeviceBuffer:
    """Flat device memory, and the events between which it must not be written."""

    memory: Tensor | None = None
    arrived: torch.cuda.Event | None = None
    used: torch.cuda.Event | None = None
    source: Any = None  # host memory that the copy reads, held until the copy is done

    def reserve(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory of at least ``nbytes`` bytes."""
        if self.memory is None or len(self.memory) < nbytes:
            self.memory = self.used = None  # freed before the larger one is allocated
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self.memory


class DeviceSender:
    """Sends micro-batches to a CUDA device, one ahead of the computation.

    Work on the current stream may use a sent micro-batch until `send` is called for the micro-batch after the next.
    ``finish`` turns a micro-batch that arrived into what `send` returns, on the current stream. ``capacity`` are the
    bytes of the largest micro-batch, if known: its memory is allocated once.
    """

    def __init__(self, device: torch.device, finish: Finish | None = None, capacity: int = 0) -> None:
        self.device = device
        self._finish = finish
        self._capacity = capacity
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers = [_DeviceBuffer() for _ in range(NUM_BUFFERS)]
        self._current = 0

    def send(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch on the device; later work of the current stream waits for the copy."""
        buffer = self._next_buffer()
        tensors: list[Tensor] = []
        batch.map_tensors(lambda tensor: tensors.append(tensor) if tensor.device.type == "cpu" else None)
        starts = []
        end = 0
        for tensor in tensors:
            starts.append(aligned(end))
            end = starts[-1] + tensor.nbytes
        memory = buffer.reserve(max(end, self._capacity), self.device)
        copies = {
            id(tensor): memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(tensors, starts, strict=True)
        }
        self._copy([(copies[id(tensor)], tensor) for tensor in tensors], buffer)
        buffer.source = batch
        sent = batch.map_tensors(lambda tensor: copies.get(id(tensor), tensor))
        return sent if self._finish is None else self._finish(sent)

    def release(self) -> None:
        """Drop the host memory of sent micro-batches, after waiting for copies in progress."""
        for buffer in self._buffers:
            if buffer.arrived is not None:
                buffer.arrived.synchronize()
            buffer.source = None

    def _next_buffer(self) -> _DeviceBuffer:
        """Return the buffer to fill next; the other one is in use by all work queued so far."""
        current = self._buffers[self._current]
        self._current = (self._current + 1) % NUM_BUFFERS
        if self._stream is not None and current.memory is not None:
            current.used = torch.cuda.Event()
            current.used.record(torch.cuda.current_stream(self.device))
        self.release()
        return self._buffers[self._current]

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], buffer: _DeviceBuffer) -> None:
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        current = torch.cuda.current_stream(self.device)
        if buffer.used is not None:
            self._stream.wait_event(buffer.used)
        else:
            self._stream.wait_stream(current)  # new memory: its previous users must be done
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        buffer.arrived = torch.cuda.Event()
        buffer.arrived.record(self._stream)
        current.wait_event(buffer.arrived)


class PrefetchedStep(Sequence[MicroBatch]):
    """The micro-batches of an optimizer step, sent to the device one by one as they are requested.

    The first iteration yields the data. Afterwards it yields the same tensors on the meta device: shapes and dtypes,
    and the counts.
    """

    def __init__(self, source: Iterator[MicroBatch], count: int, sender: DeviceSender) -> None:
        self._source = source
        self._count = count
        self._sender = sender
        self._first: MicroBatch | None = self._next()
        self._metadata: list[MicroBatch] = []

    def __getitem__(self, index: Any) -> Any:
        return self._metadata[index]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[MicroBatch]:
        if len(self._metadata) == self._count:
            yield from self._metadata
            return
        assert self._first is not None, "a step can be iterated only once with data"
        for _ in range(self._count):
            batch = self._next() if self._first is None else self._first
            self._first = None
            self._metadata.append(batch.map_tensors(lambda tensor: tensor.to("meta")))
            yield batch
            del batch

    def _next(self) -> MicroBatch:
        self._sender.release()  # the source may be waiting for this memory
        return self._sender.send(next(self._source))


def equal_micro_batches(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the micro-batches of a step; unequal numbers of samples or shapes of latents are an error."""
    shapes = set()
    for batch in batches:
        noisy = batch.get("noisy")
        shapes.add((batch.size, None if noisy is None else noisy.shape))
        assert len(shapes) == 1, "micro-batches of a step must be equal"
        yield batch


def prefetch_steps(
    source: Generator[MicroBatch, None, None],
    count: int,
    device: torch.device,
    finish: Finish | None = None,
    capacity: int = 0,
) -> Generator[PrefetchedStep, None, None]:
    """Yield steps of ``count`` micro-batches; the first micro-batch of each is already being copied.

    ``finish`` turns a micro-batch on the device into one of the step; ``capacity``: see `DeviceSender`.

    Closing the generator closes the source, even while a step is still referenced.
    """
    sender = DeviceSender(device, finish, capacity)
    with closing(source):
        while True:
            try:
                step = PrefetchedStep(source, count, sender)
            except StopIteration:
                return
            yield step


def pin_host_memory(address: int, nbytes: int, device: torch.device | None = None) -> Callable[[], Any] | None:
    """Pin existing host memory for the GPU; return a function that unpins it, or None if the driver refuses.

    ``device`` is the current one by default, which a new thread has not set.
    """
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        if int(runtime.cudaHostRegister(address, nbytes, 0)) == 0:
            return lambda: runtime.cudaHostUnregister(address)
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # the first kernel after the refusal raises the pending error: clear it here
    return None
