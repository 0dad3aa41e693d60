"""Reusable shared memory for batches on their way from workers to the trainer.

Newly mapped memory costs more than reading into it, because the kernel must clear every page. The pages of a slot stay
mapped. A slot is an anonymous shared file, so it needs no space in /dev/shm and disappears with its processes. The
trainer assigns slots and workers fill them. A slot becomes free when its last tensor is freed, so memory that is still
being read is never assigned again.
"""

import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from sd3_light.core.batch import BatchRecord

AllocateBytes = Callable[[int], Tensor]
"""Number of bytes -> a flat uint8 tensor of that size."""

AllocateTensor = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Shape and dtype -> an uninitialized tensor."""

Pin = Callable[[int, int], Callable[[], Any] | None]
"""Pins memory (address, bytes) so that a device can read it directly; returns a function that unpins it."""

_ALIGN = 64
_GROWTH = 1 << 20
_HEADROOM = 8
"""A slot that grows gets this fraction of its size in addition."""


class InPlaceDataset(Dataset[Any]):
    """A dataset that can write an item into memory allocated by the caller."""

    def fetch(self, item: int, allocate: AllocateBytes) -> Any:
        """Return an item whose tensors are in the memory of a single call to ``allocate``."""
        raise NotImplementedError


@dataclass(frozen=True)
class _TensorRef:
    """A tensor in a slot."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """A value whose tensors are in a slot; ``times`` are those that its worker measured."""

    slot: int
    nbytes: int
    value: Any
    times: Any = None


class SlotPool:
    """Slots of a trainer and the workers forked from it. Only the trainer assigns; only the assigned worker writes.

    With ``pin`` the trainer's view of a slot is pinned when it is created, so that a device copies from it directly.
    Slots have ``capacity`` bytes from the beginning, in pages that are allocated when they are written or pinned.
    """

    def __init__(self, count: int, pin: Pin | None = None, capacity: int = 0) -> None:
        self._pin = pin
        self._trainer = os.getpid()
        self._files = [os.memfd_create("sd3-light-batch", os.MFD_CLOEXEC) for _ in range(count)]
        self._free: deque[int] = deque(range(count))
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self._locks = [threading.Lock() for _ in range(count)]
        for file in self._files:
            weakref.finalize(self, os.close, file)
            os.ftruncate(file, -(-capacity // _GROWTH) * _GROWTH)

    def acquire(self) -> int | None:
        """Return a free slot, the most recently released first (its pages are mapped); None if all are in use."""
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        """Release a slot that was acquired and not used."""
        self._free.append(slot)

    def reserve(self) -> None:
        """Map and pin all slots ahead of their use; another thread may call it while slots are in use."""
        for slot in reversed(range(len(self._files))):  # in the order in which they are acquired
            self._mapped(slot, 0)

    def memory(self, slot: int, nbytes: int) -> Tensor:
        """Return the first ``nbytes`` of a slot, which grows if necessary."""
        return torch.from_numpy(self._mapped(slot, nbytes)[:nbytes])

    def lease(self, slot: int, nbytes: int) -> Tensor:
        """Like `memory`; the slot is released when this tensor and all views of it are freed."""
        view = self._mapped(slot, nbytes)[:nbytes]
        weakref.finalize(view, self._free.append, slot).atexit = False
        return torch.from_numpy(view)  # the tensor keeps this array alive, and views of it keep its storage

    def unpack(self, packed: Packed) -> Any:
        """Return the packed value without a copy; the slot is released when all its tensors are freed."""
        memory = self.lease(packed.slot, packed.nbytes)
        return replace_items(packed.value, _TensorRef, lambda ref: carve(memory, ref.offset, ref.dtype, ref.shape))

    def _mapped(self, slot: int, nbytes: int) -> NDArray[np.uint8]:
        with self._locks[slot]:
            view = self._maps.get(slot)
            if view is None or len(view) < nbytes:
                view = self._maps[slot] = self._map(slot, nbytes, view is not None)
            return view

    def _map(self, slot: int, nbytes: int, grows: bool) -> NDArray[np.uint8]:
        if grows:  # batches differ: grow rarely, because pinning and unpinning stop the device
            nbytes = max(nbytes + nbytes // _HEADROOM, *map(len, list(self._maps.values())))
        size = max(old := os.fstat(self._files[slot]).st_size, -(-max(1, nbytes) // _GROWTH) * _GROWTH)
        if size > old:
            os.ftruncate(self._files[slot], size)
        view = np.frombuffer(mmap.mmap(self._files[slot], size), dtype=np.uint8)
        undo = self._pin(view.ctypes.data, size) if self._pin and os.getpid() == self._trainer else None
        if undo is not None:  # unpinned when the last user of the view is freed, before its memory is
            weakref.finalize(view, undo).atexit = False
        return view


class Packer:
    """Puts values into one slot. Tensors that `allocate` or `empty` created there are not copied."""

    def __init__(self, pool: SlotPool, slot: int) -> None:
        self._pool = pool
        self._slot = slot
        self._blocks: list[tuple[Tensor, int]] = []  # (memory, offset); held so that no address is reused
        self._end = 0

    def allocate(self, nbytes: int) -> Tensor:
        """Return memory behind all earlier allocations."""
        offset = aligned(self._end)
        self._end = offset + nbytes
        memory = self._pool.memory(self._slot, self._end)[offset:]
        self._blocks.append((memory, offset))
        return memory

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in the slot."""
        return carve(self.allocate(dtype.itemsize * math.prod(shape)), 0, dtype, shape)

    def pack(self, value: Any) -> Packed:
        """Move the tensors of a value into the slot."""
        refs: dict[int, _TensorRef] = {}
        copies: list[tuple[_TensorRef, Tensor]] = []
        end = self._end
        for tensor in tensors_in(value):
            existing = self._offset(tensor)
            offset = aligned(end) if existing is None else existing
            refs[id(tensor)] = _TensorRef(offset, tensor.dtype, tuple(tensor.shape))
            if existing is None:
                end = offset + tensor.nbytes
                copies.append((refs[id(tensor)], tensor))
        memory = self._pool.memory(self._slot, end)
        for ref, tensor in copies:
            carve(memory, ref.offset, ref.dtype, ref.shape).copy_(tensor)
        return Packed(self._slot, end, replace_items(value, Tensor, lambda tensor: refs.get(id(tensor), tensor)))

    def _offset(self, tensor: Tensor) -> int | None:
        """Return the offset of a tensor in the slot; None if it is not in the slot, or not contiguous."""
        for memory, offset in self._blocks:
            distance = tensor.data_ptr() - memory.data_ptr()
            if distance >= 0 and distance + tensor.nbytes <= len(memory) and tensor.is_contiguous():
                return offset + distance
        return None


def aligned(offset: int) -> int:
    """Return the next offset at which any tensor may start."""
    return -(-offset // _ALIGN) * _ALIGN


def carve(memory: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor at an offset of flat memory."""
    start = memory.storage_offset() + offset
    assert offset + dtype.itemsize * math.prod(shape) <= len(memory)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), start // dtype.itemsize, shape, strides)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the plain CPU tensors of a value, each once. Other tensors are left to pickle."""
    tensors: dict[int, Tensor] = {}
    replace_items(value, Tensor, lambda tensor: tensors.setdefault(id(tensor), tensor))
    return [t for t in tensors.values() if t.device.type == "cpu" and t.layout == torch.strided and not t.requires_grad]


def replace_items(value: Any, kind: type, replacement: Callable[[Any], Any]) -> Any:
    """Return the value with every item of one type in its dicts, lists, tuples and records replaced."""
    if isinstance(value, kind):
        return replacement(value)
    if type(value) is dict:
        return {key: replace_items(item, kind, replacement) for key, item in value.items()}
    if isinstance(value, BatchRecord):
        return replace(value, **replace_items(dict(vars(value)), kind, replacement))
    if type(value) in (list, tuple):
        return type(value)(replace_items(item, kind, replacement) for item in value)
    return value
