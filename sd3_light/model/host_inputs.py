"""Recompute blocks in the backward pass, with their inputs in host memory until then.

A second stream copies inputs to pinned memory while the forward pass continues, and back one block ahead of their use
in the backward pass. Inputs that the block before has too, such as embeddings of time and text, stay on the device.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from sd3_light.model.block_swap import pinned_memory

_SMALLEST = 1 << 20  # bytes: smaller inputs are not worth a copy
_ROUND = 1 << 21  # bytes: memory is reused for inputs of nearly the same size


def checkpoint_on_host(run: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Return ``run(*inputs)``, which the backward pass computes again from inputs in host memory."""
    device = next(value.device for value in inputs if isinstance(value, Tensor))
    return _of_device(device).checkpoint(run, *inputs, **options)


class _HostInputs:
    """The inputs of a process's blocks on one device, and the host memory for them, which later passes use again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: dict[int, list[Tensor]] = {}
        self._shared: list[weakref.ref[Tensor]] = []
        self._last: weakref.ref[_Input] | None = None

    def checkpoint(self, run: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """See `checkpoint_on_host`."""
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        shared = [reference() for reference in self._shared]
        own = [value for value in tensors if value.nbytes >= _SMALLEST and not any(value is other for other in shared)]
        self._shared = [weakref.ref(value) for value in tensors]
        with saved_tensors_hooks(partial(self._pack, [value.data_ptr() for value in own]), self._unpack):
            return checkpoint(run, *inputs, use_reentrant=False, **options)

    def _pack(self, own: Sequence[int], value: Tensor) -> "Tensor | _Input":
        """Begin to copy one of a block's own inputs to host memory; keep others as they are."""
        if value.data_ptr() not in own or value.nbytes < _SMALLEST or not value.is_contiguous():
            return value
        size = -(-value.nbytes // _ROUND) * _ROUND
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else pinned_memory(size, self._device)
        stored = _Input(memory[: value.nbytes].view(value.dtype).view(value.shape), self._last)
        weakref.finalize(stored, free.append, memory).atexit = False
        self._last = weakref.ref(stored)
        if self._stream is None:
            stored.host.copy_(value.detach())
            return stored
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            stored.host.copy_(value.detach(), non_blocking=True)
        value.record_stream(self._stream)
        return stored

    def _unpack(self, stored: "Tensor | _Input") -> Tensor:
        """Return an input on the device, and begin to copy that of the block before."""
        if isinstance(stored, Tensor):
            return stored
        value = self._load(stored)
        stored.device = None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            assert stored.copied is not None
            current.wait_event(stored.copied)
            value.record_stream(current)
            before = None if stored.before is None else stored.before()
            if before is not None and before.copied is None:
                before.device = self._load(before)
        return value

    def _load(self, stored: "_Input") -> Tensor:
        if stored.device is not None:
            return stored.device
        if self._stream is None:
            return stored.host.clone()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            value = torch.empty(stored.host.shape, dtype=stored.host.dtype, device=self._device)
            value.copy_(stored.host, non_blocking=True)
            stored.copied = torch.cuda.Event()
            stored.copied.record(self._stream)
        return value


class _Input:
    """An input in host memory, that of the block ``before``, and its copy on the device, if one is on its way."""

    def __init__(self, host: Tensor, before: "weakref.ref[_Input] | None") -> None:
        self.host = host
        self.before = before
        self.device: Tensor | None = None
        self.copied: torch.cuda.Event | None = None


@cache
def _of_device(device: torch.device) -> _HostInputs:
    return _HostInputs(device)
