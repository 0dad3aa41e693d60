"""Results on their way from the device to the host, while the device goes on.

A result goes by a stream of its own into one of a few page-locked buffers; a thread waits for it there and stores it
where it belongs. So the host runs ahead of the device by as many results as there are buffers, and page-locked memory
is bounded by them, not by the size of a shard.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

BUFFERS = 4


class AsyncHostCopies:
    """Asynchronous copies from one device; on a CPU a result is stored at once."""

    def __init__(self, device: torch.device, buffers: int = BUFFERS) -> None:
        self.device = device
        self._waiting: list[Future[None]] = []
        if device.type != "cuda":
            return
        self._stream = torch.cuda.Stream(device)
        self._storing = ThreadPoolExecutor(1, thread_name_prefix="host_copies")
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(buffers):
            self._free.put(torch.empty(0, dtype=torch.uint8))

    def submit(self, result: Tensor, store: Callable[[Tensor], Any]) -> None:
        """Have ``store`` called with ``result`` on the host, which is only lent to it. Waits when all buffers are in
        use, and raises what an earlier ``store`` raised."""
        if self.device.type != "cuda":
            store(result)
            return
        self._forget_the_stored()
        buffer = self._free.get()
        if buffer.numel() < result.nbytes:
            buffer = torch.empty(result.nbytes, dtype=torch.uint8, pin_memory=True)
        lent = buffer[: result.nbytes].view(result.dtype).view(result.shape)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        # results are made in inference mode, and only there may one be marked as in use by another stream
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            lent.copy_(result, non_blocking=True)
            result.record_stream(self._stream)  # else its memory could be given away before it is read
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(self._stream)
        self._waiting.append(self._storing.submit(self._store, arrived, buffer, lent, store))

    def _forget_the_stored(self) -> None:
        while self._waiting and self._waiting[0].done():
            self._waiting.pop(0).result()

    def _store(self, arrived: torch.cuda.Event, buffer: Tensor, lent: Tensor, store: Callable[[Tensor], Any]) -> None:
        try:
            arrived.synchronize()
            store(lent)
        finally:
            self._free.put(buffer)

    def hand_over(self) -> Callable[[], None]:
        """What waits, on any thread, until everything submitted so far is stored."""
        waiting = list(self._waiting)

        def wait() -> None:
            for copy in waiting:
                copy.result()

        return wait

    def close(self) -> None:
        """Let what is under way arrive, and end the thread."""
        if self.device.type == "cuda":
            self._storing.shutdown(wait=True)
