"""Keep weights of blocks in host memory, and copy them to the device just ahead of their use.

Two buffers on the device take turns. Block k of those that are swapped always uses buffer k % 2, at the same addresses:
what autograd saved of its weights in the forward pass is valid in the backward pass once the block is copied again, and
compiled code sees parameters that never move. While a block computes, a second stream copies the next one: the block
after it in a forward pass, the one before it in a backward pass.

Frozen weights under an adapter do not change, so that nothing is copied back; weights that train stay on the device
then. Where all weights train, those of swapped blocks and their optimizer state are in host memory. They are updated on
the device, in the backward pass, and a third stream writes back what changed when another block takes the buffer.
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
_CHUNK = 1 << 26  # bytes: what one block leaves is written back while the part before it is filled with the next block
_SWAP = "_block_swap"

Put = Callable[[Tensor], None]
"""Puts a tensor in the place of another, with the same values or for values that follow."""


class _Streams:
    """The streams of a GPU that copy to it and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_device = torch.cuda.Stream(device)
        self.to_host = torch.cuda.Stream(device)

    def follow(self) -> None:
        """Let copies begin once all that is queued so far is done; those to the device after those to the host, too."""
        current = torch.cuda.current_stream(self.device)
        self.to_host.wait_stream(current)
        self.to_device.wait_stream(current)
        self.to_device.wait_stream(self.to_host)

    def synchronize(self) -> None:
        """Wait for all copies."""
        self.to_device.synchronize()
        self.to_host.synchronize()


class HostRing:
    """Groups of tensors in host memory, and the buffers on the device that hold some of them at a time.

    `hold` each group, then call `start`. What changes in host memory is copied again, and what `changed` names is
    written back: to host memory that `settle` completes.
    """

    def __init__(self, device: torch.device, streams: _Streams | None) -> None:
        self.device = device
        self._streams = streams
        self._host: list[Tensor] = []
        self._views: list[list[Tensor]] = []
        self._puts: list[list[Put]] = []
        self._pinned: list[int] = []
        self._buffers: list[Tensor] = []
        self._holds: list[int | None] = []
        self._versions: list[int] = []
        self._changed: set[int] = set()
        self._copied: list[torch.cuda.Event] = []
        weakref.finalize(self, _unpin, self._pinned, device).atexit = False

    @property
    def host_bytes(self) -> int:
        """The bytes in host memory."""
        return sum(map(len, self._host))

    @property
    def device_bytes(self) -> int:
        """The bytes of the buffers."""
        return sum(map(len, self._buffers))

    def hold(self, tensors: Sequence[tuple[Tensor, Put]]) -> list[Tensor]:
        """Move tensors to host memory of exactly their size, as the next group, and return them there."""
        end = 0
        for start, size in _layout([tensor for tensor, _ in tensors]):
            end = start + size
        host = pinned_memory(max(end, 1), self.device, self.host_bytes)
        if self._streams is not None:
            self._pinned.append(host.data_ptr())
        views = []
        for (tensor, put), (start, size) in zip(tensors, _layout([tensor for tensor, _ in tensors]), strict=True):
            views.append(_view(host, start, size, tensor).copy_(tensor.detach()))
            put(views[-1])
        self._host.append(host)
        self._views.append(views)
        self._puts.append([put for _, put in tensors])
        return views

    def start(self) -> None:
        """Allocate the buffers; from now on the tensors are parts of them."""
        largest = max(map(len, self._host))
        count = min(BUFFERS, len(self._host))
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in range(count)]
        self._holds = [None] * count
        self._versions = [0] * count
        if self._streams is not None:
            self._copied = [torch.cuda.Event() for _ in range(count)]
        for index, (views, puts) in enumerate(zip(self._views, self._puts, strict=True)):
            for view, put, (start, size) in zip(views, puts, _layout(views), strict=True):
                put(_view(self._buffers[index % count], start, size, view))
        self._puts = []  # they hold what holds this object

    def views(self, index: int) -> list[Tensor]:
        """Return the tensors of a group in host memory; see `settle`."""
        return self._views[index]

    def changed(self, index: int) -> None:
        """Say that a group changes in its buffer."""
        assert self._holds[index % len(self._buffers)] == index
        self._changed.add(index)

    def wait(self, index: int) -> None:
        """Let what is queued next wait for the copy of a group."""
        if self._streams is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied[index % len(self._buffers)])

    def settle(self) -> None:
        """Write back what changed, and wait: host memory is complete then, and may be changed."""
        for index in sorted(self._changed):
            number = index % len(self._buffers)
            if self._streams is not None:
                self._streams.follow()
            self._exchange(number, index, None)
            self._versions[number] = self._host[index]._version
        self._changed.clear()
        if self._streams is not None:
            self._streams.synchronize()

    def _load(self, index: int) -> None:
        """Copy a group into its buffer, unless it is there, once all that is queued so far is done."""
        number = index % len(self._buffers)
        before = self._holds[number]
        if before == index and (index in self._changed or self._versions[number] == self._host[index]._version):
            return
        self._holds[number] = index
        self._versions[number] = self._host[index]._version
        if self._streams is not None:
            self._streams.follow()
        self._exchange(number, before if before in self._changed else None, index)
        self._changed.discard(-1 if before is None else before)

    def _exchange(self, number: int, leaves: int | None, enters: int | None) -> None:
        """Copy the group that leaves a buffer to host memory, and the one that enters from there."""
        target = self._host[leaves] if leaves is not None else None
        source = self._host[enters] if enters is not None else None
        buffer = self._buffers[number]
        sizes = [len(memory) for memory in (target, source) if memory is not None]
        step = _CHUNK if len(sizes) == 2 else max(sizes)
        for start in range(0, max(sizes), step):
            if target is not None:
                self._copy(target[start : start + step], buffer[start : min(start + step, len(target))], to_host=True)
            if source is not None:
                self._copy(buffer[start : min(start + step, len(source))], source[start : start + step], to_host=False)
        if self._streams is not None and source is not None:
            self._copied[number].record(self._streams.to_device)

    def _copy(self, target: Tensor, source: Tensor, to_host: bool) -> None:
        if self._streams is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._streams.to_host if to_host else self._streams.to_device):
            target.copy_(source, non_blocking=True)
        if to_host:
            self._streams.to_device.wait_stream(self._streams.to_host)


class BlockSwap(HostRing):
    """The swapped blocks of a model, in the order in which they run. `add` each of them, then call `start`.

    The frozen weights of each block are swapped, or with ``trained`` those that train. Then `hold_state` of each block,
    and `start_state`.
    """

    def __init__(self, device: torch.device, trained: bool = False) -> None:
        super().__init__(device, _Streams(device) if device.type == "cuda" else None)
        self.trained = trained
        self._blocks: list[nn.Module] = []
        self._state: HostRing | None = None
        self._current: int | None = None

    def add(self, block: nn.Module) -> None:
        """Move the weights of a block to host memory of exactly their size."""
        weights = _swapped_weights(block, self.trained)
        self.hold([(weight.detach(), partial(setattr, weight, "data")) for weight in weights])
        self._blocks.append(block)

    def start(self) -> None:
        """Allocate the buffers; from now on the blocks' weights are parts of them."""
        super().start()
        for index, block in enumerate(self._blocks):
            setattr(block, _SWAP, (self, index))
            kind: Any = type(block)
            block.__class__ = _swapped_class(kind)
        self._blocks = []  # they hold this object

    def hold_state(self, tensors: Sequence[tuple[Tensor, Put]]) -> list[Tensor]:
        """Move the optimizer state of the next block to host memory, and return it there."""
        if self._state is None:
            self._state = HostRing(self.device, self._streams)
        return self._state.hold(tensors)

    def start_state(self) -> None:
        """Allocate the buffers of optimizer state; from now on it is part of them."""
        assert self._state is not None
        self._state.start()

    def run(self, index: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block with its weights in place; a backward pass will find them in place, too."""
        self.need(index, 1)
        output = call(*args, **kwargs)
        if self.trained:
            torch.clear_autocast_cache()  # copies in bfloat16, which it would keep until the forward pass ends
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
        state = self._state if step < 0 else None
        if index == self._current:  # also where a backward pass computes the block again
            if state is not None:
                state._load(index)
            return
        self._current = index
        self._load(index)
        self.wait(index)
        if state is not None:
            state._load(index)
        neighbour = index + step
        if neighbour == len(self._host) and not torch.is_grad_enabled():
            neighbour = 0  # another forward pass follows
        if 0 <= neighbour < len(self._host) and (neighbour - index) % len(self._buffers):
            self._load(neighbour)
            if state is not None:
                state._load(neighbour)

    def update(self, index: int) -> None:
        """Put the optimizer state of a block in place, whose weights what is queued next changes: in its backward pass.

        Gradients of a block are complete before a block ahead of it begins its backward pass.
        """
        assert self._state is not None
        assert index == self._current, f"block {index} changes while block {self._current} computes"
        self._state._load(index)
        self._state.wait(index)
        self._state.changed(index)
        self.changed(index)

    def settle(self) -> None:
        """Write back what changed, weights and optimizer state, and wait."""
        self._current = None  # host memory may change: see `_load`
        super().settle()
        if self._state is not None:
            self._state.settle()


def pinned_memory(count: int, device: torch.device, before: int = 0) -> Tensor:
    """Return host memory, pinned for a GPU. torch's own pinned memory is rounded up to a power of two.

    It is shared: a process that forks would otherwise copy pinned memory for its child. ``before`` are the bytes that
    are pinned already, for the error.
    """
    memory = torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)
    if device.type != "cuda":
        return memory
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), count, 0))
    if error:
        raise UserError(
            f"{before + count:,} bytes of host memory cannot be pinned for blocks (CUDA error {error}); free host "
            "memory, or swap fewer blocks"
        )
    return memory


def is_swapped(module: nn.Module) -> bool:
    """Return whether a network has swapped blocks."""
    return any(hasattr(block, _SWAP) for block in module.modules())


def trained_blocks(module: nn.Module) -> tuple[BlockSwap, list[nn.Module]] | None:
    """Return the swap of a network whose trained weights are swapped, and the blocks in their order; None without."""
    found = [(*getattr(block, _SWAP), block) for block in module.modules() if hasattr(block, _SWAP)]
    blocks = {index: block for swap, index, block in found if swap.trained}
    return (found[0][0], [blocks[index] for index in range(len(blocks))]) if blocks else None


def resident_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a network, except for the weights of swapped blocks."""
    swapped = {
        id(weight)
        for block in module.modules()
        if hasattr(block, _SWAP)
        for weight in _swapped_weights(block, getattr(block, _SWAP)[0].trained)
    }
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


def _swapped_weights(block: nn.Module, trained: bool) -> list[nn.Parameter]:
    return [weight for weight in block.parameters() if weight.requires_grad == trained]


def _layout(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the first byte of each tensor in the memory of its group, and its bytes."""
    start = 0
    for tensor in tensors:
        yield start, tensor.nbytes
        start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _view(memory: Tensor, start: int, size: int, like: Tensor) -> Tensor:
    return memory[start : start + size].view(like.dtype).view(like.shape)


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
