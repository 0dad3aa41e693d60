"""Asynchronous copies of encoder results from the device to the host, so that the device never waits.

Each result is copied on a separate stream into one of a few page-locked buffers; a thread waits for the copy and stores
it. The host runs ahead of the device by at most the number of buffers, which also bounds page-locked memory.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

BUFFERS = 4


class AsyncHostCopies:
    """Copies from one device to the host; on a CPU results are stored immediately."""

    def __init__(self, device: torch.device, buffers: int = BUFFERS) -> None:
        self.device = device
        self._pending: list[Future[None]] = []
        if device.type != "cuda":
            return
        self._stream = torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host_copies")
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(buffers):
            self._free.put(torch.empty(0, dtype=torch.uint8))

    def submit(self, result: Tensor, store: Callable[[Tensor], Any]) -> None:
        """Call ``store`` with a host copy of ``result`` that is valid during the call only.

        Waits while all buffers are in use, and raises the error of an earlier ``store``.
        """
        if self.device.type != "cuda":
            store(result)
            return
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()
        buffer = self._free.get()
        if buffer.numel() < result.nbytes:
            buffer = torch.empty(result.nbytes, dtype=torch.uint8, pin_memory=True)
        copy = buffer[: result.nbytes].view(result.dtype).view(result.shape)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        # results are inference tensors: record_stream on them is allowed in inference mode only
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            copy.copy_(result, non_blocking=True)
            result.record_stream(self._stream)  # keeps the allocator from reusing its memory before it is read
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(self._stream)
        self._pending.append(self._thread.submit(self._store, arrived, buffer, copy, store))

    def _store(self, arrived: torch.cuda.Event, buffer: Tensor, copy: Tensor, store: Callable[[Tensor], Any]) -> None:
        try:
            arrived.synchronize()
            store(copy)
        finally:
            self._free.put(buffer)

    def waiter(self) -> Callable[[], None]:
        """Return a function that waits, on any thread, until everything submitted so far is stored."""
        pending = list(self._pending)

        def wait() -> None:
            for copy in pending:
                copy.result()

        return wait

    def close(self) -> None:
        """Wait for pending copies and stop the thread."""
        if self.device.type == "cuda":
            self._thread.shutdown(wait=True)
