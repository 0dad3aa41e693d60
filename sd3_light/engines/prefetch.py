"""Micro-batches on their way to the GPU while it computes: copied from pinned memory by a stream of their own.

Two buffers on the device take turns. A copy waits, on the device, until what the buffer held before has been used, and
the computation waits until the copy is there; the host waits for neither. So the GPU's memory for inputs is that of two
micro-batches (law 10), however far the host runs ahead.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, overload

import torch
from torch import Tensor

from sd3_light.data.slots import aligned
from sd3_light.engines.protocol import MicroBatch

NUM_BUFFERS = 2


class _Buffer:
    """Flat memory on the device, with the moments between which it may not be written."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
        self.used: torch.cuda.Event | None = None
        self.source: Any = None  # host memory that the copy reads, kept until it has

    def room(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory that holds so many bytes."""
        if self.memory is None or len(self.memory) < nbytes:
            self.memory = self.used = None  # before the larger one is asked for
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self.memory


class Sender:
    """Sends micro-batches to a CUDA device, one ahead of the computation. Counts (int64) stay on the host.

    What `send` returned may be used, by work that the caller gives to the current stream, until `send` has been called
    for the micro-batch after the next.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers = [_Buffer() for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def send(self, prepared: MicroBatch) -> MicroBatch:
        """The micro-batch on the device; what the caller computes with it waits for it there."""
        buffer = self._next_buffer()
        tensors = [tensor for part in prepared for tensor in part if _travels(tensor)]
        starts, end = [], 0
        for tensor in tensors:
            starts.append(aligned(end))
            end = starts[-1] + tensor.nbytes
        memory = buffer.room(end, self.device)
        there = {
            id(tensor): memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, start in zip(tensors, starts, strict=True)
        }
        self._copy([(there[id(tensor)], tensor) for tensor in tensors], buffer)
        buffer.source = prepared
        features, label = (tuple(there.get(id(tensor), tensor) for tensor in part) for part in prepared)
        return features, label

    def release(self) -> None:
        """Give the host memory of what was sent back to who owns it; the copies are long done, or waited for."""
        for buffer in self._buffers:
            if buffer.arrived is not None:
                buffer.arrived.synchronize()
            buffer.source = None

    def _next_buffer(self) -> _Buffer:
        """The buffer whose turn it is; the other one is used by all that was asked of the device so far."""
        current = self._buffers[self._turn]
        self._turn = (self._turn + 1) % NUM_BUFFERS
        if self._stream is not None and current.memory is not None:
            current.used = torch.cuda.Event()
            current.used.record(torch.cuda.current_stream(self.device))
        self.release()
        return self._buffers[self._turn]

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], buffer: _Buffer) -> None:
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        current = torch.cuda.current_stream(self.device)
        if buffer.used is not None:
            self._stream.wait_event(buffer.used)
        else:
            self._stream.wait_stream(current)  # the memory is new: whoever had it before must be done
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        buffer.arrived = torch.cuda.Event()
        buffer.arrived.record(self._stream)
        current.wait_event(buffer.arrived)


def to_device(prepared: MicroBatch, device: torch.device) -> MicroBatch:
    """A micro-batch on the device, by the computation's own stream; what `Sender` has sent there stays as it is."""
    features, label = (
        tuple(value.to(device, non_blocking=True) if _travels(value) else value for value in part) for part in prepared
    )
    return features, label


def _travels(value: Any) -> bool:
    """Counts stay on the host: who needs them there would have to wait for the device."""
    return isinstance(value, Tensor) and value.dtype != torch.int64


class Step(Sequence[MicroBatch]):
    """The micro-batches of an optimizer step, sent to the device one after another as they are asked for.

    It can be walked once with data; after that it shows what they were, on no device: shapes and types, and counts.
    """

    def __init__(self, source: Iterator[MicroBatch], count: int, sender: Sender) -> None:
        self._source, self._count, self._sender = source, count, sender
        self._first: MicroBatch | None = self._next()
        self._shown: list[MicroBatch] = []

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[MicroBatch]: ...

    def __getitem__(self, index: int | slice) -> MicroBatch | Sequence[MicroBatch]:
        return self._shown[index]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[MicroBatch]:
        if len(self._shown) == self._count:
            yield from self._shown
            return
        assert self._first is not None, "a step is walked once"
        for number in range(self._count):
            prepared = self._next() if self._first is None else self._first
            self._first = None
            assert number == 0 or _shapes(prepared) == _shapes(self._shown[0]), "micro-batches of a step must be equal"
            self._shown.append(_shown(prepared))
            yield prepared
            del prepared

    def _next(self) -> MicroBatch:
        self._sender.release()  # its memory may be what the next one waits for
        return self._sender.send(next(self._source))


def _shapes(prepared: MicroBatch) -> tuple[int, ...]:
    return tuple(prepared[0][0].shape)


def _shown(prepared: MicroBatch) -> MicroBatch:
    features, label = (tuple(tensor.to("meta") if _travels(tensor) else tensor for tensor in part) for part in prepared)
    return features, label


def prefetch_steps(
    source: Generator[MicroBatch, None, None], count: int, device: torch.device
) -> Generator[Step, None, None]:
    """Step after step of ``count`` micro-batches; the first of each is on its way when the step is handed out.

    Closing it closes the source, whoever still holds a step.
    """
    sender = Sender(device)
    with closing(source):
        while True:
            try:
                step = Step(source, count, sender)
            except StopIteration:
                return
            yield step


def pin_host_memory(address: int, nbytes: int) -> Callable[[], Any] | None:
    """Let the GPU read host memory by itself; gives what undoes it, or None where the driver refuses."""
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, nbytes, 0)) == 0:
        return lambda: runtime.cudaHostUnregister(address)
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # the first kernel after a refusal is told of it
    return None
