"""Memory that batches pass through on their way from workers to the trainer: a few slots, used again and again.

Fresh memory costs more than reading into it: the kernel must find and clear every page. A slot's pages stay. It is an
anonymous shared file, so it needs no room in /dev/shm and goes away with its processes. The trainer lends slots out,
a worker fills one, and it is free again when the last tensor that lies in it is gone: nobody is handed memory that
someone still reads.
"""

import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

AllocateBytes = Callable[[int], Tensor]
"""Bytes wanted -> a flat uint8 tensor of so many."""

AllocateTensor = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Shape and type -> a tensor that is to be filled."""

Pin = Callable[[int, int], Callable[[], Any] | None]
"""(address, bytes) -> what undoes it: lets a device read the memory by itself."""

_ALIGN = 64
_GROWTH = 1 << 20


class InPlaceDataset(Dataset[Any]):
    """A data set that can write an item into memory that it is given."""

    def fetch(self, item: int, allocate: AllocateBytes) -> Any:
        """The item; its tensors lie in what ``allocate`` gave, asked for once."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Ref:
    """A tensor in a slot."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Packed:
    """A value whose tensors lie in a slot."""

    slot: int
    nbytes: int
    value: Any


class SlotPool:
    """Slots for a trainer and the workers forked from it. Only the trainer lends; only the borrower writes.

    With ``pin`` the trainer's view of a slot is pinned when it is made, so that a device copies from it directly.
    """

    def __init__(self, count: int, pin: Pin | None = None) -> None:
        self._pin, self._trainer = pin, os.getpid()
        self._files = [os.memfd_create("sd3-light-batch", os.MFD_CLOEXEC) for _ in range(count)]
        self._free: deque[int] = deque(range(count))
        self._maps: dict[int, NDArray[np.uint8]] = {}
        for file in self._files:
            weakref.finalize(self, os.close, file)

    def acquire(self) -> int | None:
        """A free slot, the last one returned first (its pages are there); None when all are in use."""
        return self._free.pop() if self._free else None

    def release(self, slot: int) -> None:
        """A slot that was lent and not used."""
        self._free.append(slot)

    def memory(self, slot: int, nbytes: int) -> Tensor:
        """The first ``nbytes`` of a slot, which grows to hold them."""
        return torch.from_numpy(self._mapped(slot, nbytes)[:nbytes])

    def lease(self, slot: int, nbytes: int) -> Tensor:
        """The same, and the slot is free again when this tensor and all views of it are gone."""
        view = self._mapped(slot, nbytes)[:nbytes]
        weakref.finalize(view, self._free.append, slot).atexit = False
        return torch.from_numpy(view)  # it keeps this very array alive, and views of it keep its storage

    def unpack(self, packed: Packed) -> Any:
        """What was packed, without a copy; the slot is free when all its tensors are gone."""
        memory = self.lease(packed.slot, packed.nbytes)
        return _replace(packed.value, _Ref, lambda ref: carve(memory, ref.offset, ref.dtype, ref.shape))

    def _mapped(self, slot: int, nbytes: int) -> NDArray[np.uint8]:
        found = self._maps.get(slot)
        if found is None or len(found) < nbytes:
            size = max(os.fstat(self._files[slot]).st_size, -(-max(1, nbytes) // _GROWTH) * _GROWTH)
            os.ftruncate(self._files[slot], size)
            found = self._maps[slot] = np.frombuffer(mmap.mmap(self._files[slot], size), dtype=np.uint8)
            self._pinned(found)
        return found

    def _pinned(self, view: NDArray[np.uint8]) -> None:
        """Pin a new view; it is let go with its last user, before its memory is."""
        undo = self._pin(view.ctypes.data, len(view)) if self._pin and os.getpid() == self._trainer else None
        if undo is not None:
            weakref.finalize(view, undo).atexit = False


class Packer:
    """Puts values into one slot. Tensors that lie there already, in what `allocate` or `empty` gave, stay where they
    are."""

    def __init__(self, pool: SlotPool, slot: int) -> None:
        self._pool, self._slot = pool, slot
        self._given: list[tuple[Tensor, int]] = []  # memory and its offset; held, so that no address comes twice
        self._end = 0

    def allocate(self, nbytes: int) -> Tensor:
        """Memory behind all that was given before."""
        offset = aligned(self._end)
        self._end = offset + nbytes
        memory = self._pool.memory(self._slot, self._end)[offset:]
        self._given.append((memory, offset))
        return memory

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor to be filled."""
        return carve(self.allocate(dtype.itemsize * math.prod(shape)), 0, dtype, shape)

    def pack(self, value: Any) -> Packed:
        """The value, its tensors in the slot."""
        refs: dict[int, _Ref] = {}
        copies: list[tuple[_Ref, Tensor]] = []
        end = self._end
        for tensor in tensors_in(value):
            place = self._offset(tensor)
            offset = aligned(end) if place is None else place
            refs[id(tensor)] = _Ref(offset, tensor.dtype, tuple(tensor.shape), tensor.nbytes)
            if place is None:
                end = offset + tensor.nbytes
                copies.append((refs[id(tensor)], tensor))
        memory = self._pool.memory(self._slot, end)
        for ref, tensor in copies:
            carve(memory, ref.offset, ref.dtype, ref.shape).copy_(tensor)
        return Packed(self._slot, end, _replace(value, Tensor, lambda tensor: refs.get(id(tensor), tensor)))

    def _offset(self, tensor: Tensor) -> int | None:
        """Where a tensor lies in the slot; None where it does not, or not in one piece."""
        for memory, offset in self._given:
            at = tensor.data_ptr() - memory.data_ptr()
            if at >= 0 and at + tensor.nbytes <= len(memory) and tensor.is_contiguous():
                return offset + at
        return None


def aligned(offset: int) -> int:
    """The next offset where any tensor may begin."""
    return -(-offset // _ALIGN) * _ALIGN


def carve(memory: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor that lies at an offset of flat memory."""
    start = memory.storage_offset() + offset
    assert offset + dtype.itemsize * math.prod(shape) <= len(memory)
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), start // dtype.itemsize, shape, _strides(shape))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


def tensors_in(value: Any) -> list[Tensor]:
    """The plain CPU tensors of a value, each once; others travel in their own way."""
    found: dict[int, Tensor] = {}
    _replace(value, Tensor, lambda tensor: found.setdefault(id(tensor), tensor))
    return [t for t in found.values() if t.device.type == "cpu" and t.layout == torch.strided and not t.requires_grad]


def _replace(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """The value with everything of one kind in its dicts, lists and tuples replaced."""
    if isinstance(value, kind):
        return by(value)
    if type(value) is dict:
        return {key: _replace(item, kind, by) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace(item, kind, by) for item in value)
    return value
