"""Keep the frozen weights of blocks in host memory, and copy them to the device just ahead of their use.

Two buffers on the device take turns. Block k of those that are swapped always uses buffer k % 2, at the same addresses:
what autograd saved of its weights in the forward pass is valid in the backward pass once the block is copied again, and
compiled code sees parameters that never move. While a block computes, a second stream copies the next one: the block
after it in a forward pass, the one before it in a backward pass. Nothing is copied back, since frozen weights do not
change. Weights that train stay on the device.
"""

import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from sd3_light.config.faults import UserError

BUFFERS = 2
"""Buffers on the device, each as large as the largest swapped block."""
_ALIGNMENT = 512  # that of tensors with their own memory: products choose their kernels by it
_SWAP = "_block_swap"


class BlockSwap:
    """The swapped blocks of a model, in the order in which they run. `add` each of them, then call `start`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._blocks: list[nn.Module] = []
        self._host: list[Tensor] = []
        self._pinned: list[int] = []
        self._buffers: list[Tensor] = []
        self._holds: list[int | None] = []
        self._copied: list[torch.cuda.Event] = []
        self._current: int | None = None
        weakref.finalize(self, _unpin, self._pinned, device).atexit = False

    @property
    def host_bytes(self) -> int:
        """The bytes of the blocks in host memory."""
        return sum(map(len, self._host))

    @property
    def device_bytes(self) -> int:
        """The bytes of the buffers."""
        return sum(map(len, self._buffers))

    def add(self, block: nn.Module) -> None:
        """Move the frozen weights of a block to host memory of exactly their size."""
        weights = list(_frozen(block))
        end = 0
        for _, start, size in _layout(weights):
            end = start + size
        host = self._host_memory(max(end, 1))
        for weight, start, size in _layout(weights):
            place = _view(host, start, size, weight)
            place.copy_(weight.detach())
            weight.data = place
        self._blocks.append(block)
        self._host.append(host)

    def start(self) -> None:
        """Allocate the buffers; from now on the blocks' weights are parts of them."""
        largest = max(map(len, self._host))
        count = min(BUFFERS, len(self._blocks))
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(count)]
        self._holds = [None] * count
        if self._stream is not None:
            self._copied = [torch.cuda.Event() for _ in range(count)]
        for index, block in enumerate(self._blocks):
            buffer = self._buffers[index % count]
            for weight, start, size in _layout(list(_frozen(block))):
                weight.data = _view(buffer, start, size, weight)
            setattr(block, _SWAP, (self, index))
            kind: Any = type(block)
            block.__class__ = _swapped_class(kind)
        self._blocks = []  # they hold this object

    def run(self, index: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block with its weights in place; a backward pass will find them in place, too."""
        self.need(index, 1)
        output = call(*args, **kwargs)
        if torch.is_grad_enabled():
            inputs = [*_tensors(args), *_tensors(kwargs)]
            for tensor in _tensors(output):
                if tensor.requires_grad and not any(tensor is other for other in inputs):
                    tensor.register_hook(partial(self._before_backward, index))
        return output

    def _before_backward(self, index: int, gradient: Tensor) -> None:
        """Autograd calls it before the block's first operation: all operations of later blocks are queued by then."""
        self.need(index, -1)

    def need(self, index: int, step: int) -> None:
        """Put a block in place for what is queued next, and begin to copy its neighbour in the direction ``step``."""
        if index == self._current:  # also where a backward pass computes the block again
            return
        self._current = index
        self._load(index)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied[index % len(self._buffers)])
        neighbour = index + step
        if neighbour == len(self._host) and not torch.is_grad_enabled():
            neighbour = 0  # another forward pass follows
        if 0 <= neighbour < len(self._host) and (neighbour - index) % len(self._buffers):
            self._load(neighbour)

    def _load(self, index: int) -> None:
        """Copy a block into its buffer, unless it is there, once all that is queued so far is done."""
        number = index % len(self._buffers)
        if self._holds[number] == index:
            return
        self._holds[number] = index
        source = self._host[index]
        target = self._buffers[number][: len(source)]
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._copied[number].record(self._stream)

    def _host_memory(self, count: int) -> Tensor:
        """Return host memory, pinned for a GPU. torch's own pinned memory is rounded up to a power of two.

        It is shared: a process that forks would otherwise copy pinned memory for its child.
        """
        memory = torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)
        if self._stream is None:
            return memory
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), count, 0))
        if error:
            raise UserError(
                f"{self.host_bytes + count:,} bytes of host memory cannot be pinned for blocks (CUDA error {error}); "
                "free host memory, or swap fewer blocks"
            )
        self._pinned.append(memory.data_ptr())
        return memory


def is_swapped(module: nn.Module) -> bool:
    """Return whether a network has swapped blocks."""
    return any(hasattr(block, _SWAP) for block in module.modules())


def resident_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a network, except for the weights of swapped blocks."""
    swapped = {id(weight) for block in module.modules() if hasattr(block, _SWAP) for weight in _frozen(block)}
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in swapped]


def _unpin(addresses: Sequence[int], device: torch.device) -> None:
    if addresses:
        torch.cuda.synchronize(device)
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)


@cache
def _swapped_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass that runs through `BlockSwap.run`: outside of a compiled block, other than hooks."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        swap, index = getattr(self, _SWAP)
        return swap.run(index, partial(kind.__call__, self), *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _frozen(block: nn.Module) -> Iterator[nn.Parameter]:
    return (weight for weight in block.parameters() if not weight.requires_grad)


def _layout(weights: Sequence[Tensor]) -> Iterator[tuple[Tensor, int, int]]:
    """Yield each weight with its first byte in the block's memory, and its bytes."""
    start = 0
    for weight in weights:
        yield weight, start, weight.nbytes
        start += -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT


def _view(memory: Tensor, start: int, size: int, weight: Tensor) -> Tensor:
    return memory[start : start + size].view(weight.dtype).view(weight.shape)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a block's arguments or output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
