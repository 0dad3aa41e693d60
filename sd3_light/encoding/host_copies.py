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

from sd3_light.config.faults import UserError

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

    def submit(self, result: Tensor, store: Callable[[Tensor], Any], source: str) -> None:
        """Call ``store`` with a host copy of ``result`` that is valid during the call only.

        A result with NaN or infinity is a UserError that names its ``source``. Waits while all buffers are in use, and
        raises the error of an earlier result.
        """
        is_finite = result.isfinite().all()  # on the device, where it costs one more read
        if self.device.type != "cuda":
            require_finite(is_finite, source)
            store(result)
            return
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()
        buffer = self._free.get()
        if buffer.numel() <= result.nbytes:  # the last byte is the flag
            buffer = torch.empty(result.nbytes + 1, dtype=torch.uint8, pin_memory=True)
        flag = buffer[-1:].view(torch.bool)
        copy = buffer[: result.nbytes].view(result.dtype).view(result.shape)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        # results are inference tensors: record_stream on them is allowed in inference mode only
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            copy.copy_(result, non_blocking=True)
            flag.copy_(is_finite, non_blocking=True)
            for tensor in (result, is_finite):  # the allocator must not reuse their memory before it is read
                tensor.record_stream(self._stream)
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(self._stream)

        def finish() -> None:
            try:
                arrived.synchronize()
                require_finite(flag, source)
                store(copy)
            finally:
                self._free.put(buffer)

        self._pending.append(self._thread.submit(finish))

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


def require_finite(is_finite: Tensor, source: str) -> None:
    """Raise a UserError about the result of ``source`` that is not finite."""
    if not is_finite:
        raise UserError(
            f"{source} returned NaN or infinity; check its weights. If it overflows float16, write model.dtype = "
            "'bfloat16', which keeps finished shards, or for a VAE model.vae_dtype = 'float32', which encodes again"
        )
