"""Count what one forward and backward pass of a denoiser costs, on fake tensors: they have sizes and no memory.

Blocks of equal shapes cost the same, so that few of each kind are run. Attention runs as the fused kernels of GPUs do:
it saves its inputs and its result, and no scores.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from sd3_light.core.batch import Batch
from sd3_light.core.cost import BlockBytes
from sd3_light.core.model import block_parents, is_block_list

Denoise = Callable[[nn.Module, Batch], Tensor]
"""(denoiser, batch) -> velocity, as in training."""

# CUDA's autocast runs norms in float32, the CPU's does not
_NORMS = (functional.layer_norm, functional.group_norm, functional.rms_norm)
_PRODUCTS = ("mm", "addmm", "bmm")


@dataclass(frozen=True)
class Counts:
    """FLOPs and bytes of one sample; ``blocks`` has an entry per counted block. See `SampleBytes` for the bytes.

    ``input_flops`` are those of the inputs' gradients; ``tensor`` is the largest tensor that a block saves.
    """

    forward_flops: int
    input_flops: int
    features: int
    target: int
    before: int
    after: int
    tensor: int | Fraction
    blocks: tuple[BlockBytes, ...]


NOTHING = Counts(0, 0, 0, 0, 0, 0, 0, (BlockBytes(0, 0, 0),))
"""Stands for a pass that cannot be counted."""


def keep_of_each(denoiser: nn.Module, most: int) -> tuple[list[nn.Module], list[int]]:
    """Reduce a denoiser to ``most`` blocks of each kind; return these blocks, and for every block the one like it.

    That is the last one of its kind. What enters the first block of a frozen denoiser needs no gradient, so that this
    block saves less than those after it.
    """
    found: list[nn.Module] = []
    signatures: list[Any] = []
    known: dict[Any, list[int]] = {}
    lists = [(parent, name) for parent in block_parents(denoiser) for name, _ in parent.named_children()]
    for parent, name in lists:
        blocks = getattr(parent, name)
        if not is_block_list(blocks):
            continue
        kept = []
        for block in blocks:
            weights = tuple((key, weight.shape, weight.requires_grad) for key, weight in block.named_parameters())
            signature = (name, type(block), weights)
            alike = known.setdefault(signature, [])
            if len(alike) < most:
                alike.append(len(found))
                found.append(block)
                kept.append(block)
            signatures.append(signature)
        setattr(parent, name, nn.ModuleList(kept))
    return found, [known[signature][-1] for signature in signatures]


class FewOfEachBlock:
    """A denoiser on the meta device, reduced to ``most`` blocks of each kind.

    ``kinds`` has for every block the position in ``blocks`` of the one that is counted for it.
    """

    def __init__(self, denoiser: nn.Module, most: int = 1) -> None:
        self.denoiser = denoiser
        self.blocks, self.kinds = keep_of_each(denoiser, most)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        denoiser.float().train()
        with self._mode:
            denoiser.to_empty(device="cpu")

    def count(self, denoise: Denoise, batch: Batch, dtype: str, backward: bool) -> Counts:
        """Run the denoiser in ``dtype`` and count, every block as often as the denoiser has it.

        Without the ``backward`` pass the inputs' gradients are unknown, and 0.
        """
        kind = getattr(torch, dtype)
        is_float32 = kind == torch.float32
        autocast = nullcontext() if is_float32 else torch.autocast("cpu", kind)
        with self._mode:
            given = batch.map_tensors(lambda value: _in_float32(self._mode.from_tensor(value)))
            counter = _Counter(self.denoiser, self.blocks)
            with counter.watching(autocast):
                output = denoise(self.denoiser, given)
            # the backward pass of a block has twice the FLOPs of its forward pass
            missing = 2 * sum(counter.flops) - _backward_flops(output) if backward else 0
            self.denoiser.zero_grad()
        features = batch.tensors()
        # under autocast the copies in float32 exist beside those that layers save
        cast = [value for value in features if value.dtype in (torch.bfloat16, torch.float16) and not is_float32]
        casts = sum(4 * value.numel() for value in cast)
        target = 4 * output.numel()
        return Counts(
            forward_flops=counter.flops[0] + counter.flops[-1] + sum(counter.flops[kind + 1] for kind in self.kinds),
            input_flops=missing,
            features=sum(value.nbytes for value in features),
            target=target,
            before=counter.saved[0] + casts,
            after=counter.saved[-1] + 2 * target,
            tensor=counter.largest,
            blocks=counter.block_bytes(),
        )


def _backward_flops(output: Tensor) -> int:
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _convolution}) as meter:
        output.float().sum().backward()
    return int(meter.get_total_flops())


def _convolution(result: list[int], inputs: list[int], weight: list[int], *rest: Any, **_: Any) -> int:
    """Return the FLOPs of a convolution's gradients; torch's own count takes every group for the whole."""
    transposed = rest[4]
    needs_gradient = rest[7]  # of inputs, weight and bias
    return int(sum(needs_gradient[:2]) * conv_flop_count(inputs, weight, result, transposed=transposed))


def _in_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


class _Counter(TorchDispatchMode):
    """Counts the forward pass in sections: what is before the blocks, every block, what is after them."""

    def __init__(self, denoiser: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = [0] * (len(blocks) + 2)
        self.saved = [0] * (len(blocks) + 2)
        self.largest = 0
        self._inputs = [0] * len(blocks)
        self._products = [0] * len(blocks)
        self._blocks = blocks
        self._section = 0
        self._meter = FlopCounterMode(display=False)
        self._functions = _GpuFunctions(self)
        self._is_paused = False
        self._counted = 0
        self._known = {_address(weight) for weight in denoiser.parameters()}
        self._alive: list[Tensor] = []  # so that no address is used twice

    @contextmanager
    def watching(self, autocast: AbstractContextManager[Any]) -> Iterator[None]:
        """Count what runs in the block."""
        hooks = []
        for number, block in enumerate(self._blocks):
            hooks.append(block.register_forward_pre_hook(self._enter(number), with_kwargs=True))
            hooks.append(block.register_forward_hook(lambda *_: self._leave()))
        packing = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        try:
            with self._meter, self, self._functions, packing, autocast:
                yield
            self._leave()
        finally:
            for hook in hooks:
                hook.remove()

    def block_bytes(self) -> tuple[BlockBytes, ...]:
        """Return the bytes of every block."""
        sizes = zip(self._inputs, self.saved[1:-1], self._products, strict=True)
        return tuple(BlockBytes(inputs, saved, inputs + products) for inputs, saved, products in sizes)

    def fused(self, function: Callable[[], Tensor]) -> Tensor:
        """Return the result of an operation whose inner tensors no kernel keeps; it counts as a product."""
        self._is_paused = True
        result = function()
        self._is_paused = False
        self._add_product(result)
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "_to_copy" and _address(args[0]) in self._known:  # autocast's copy of a weight
            self._known.add(_address(result))
            self._alive.append(result)
        elif name in _PRODUCTS and not self._is_paused:
            self._add_product(result)
        return result

    def _add_product(self, result: Tensor) -> None:
        if 0 < self._section < len(self.saved) - 1:
            self._products[self._section - 1] += result.nbytes

    def _enter(self, number: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._leave()
            self._section = number + 1
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
            self._inputs[number] = sum(tensor.nbytes for tensor in tensors)

        return enter

    def _leave(self) -> None:
        """End a section; between blocks and after them is the last one, unless no block has run yet."""
        total = self._meter.get_total_flops()
        self.flops[self._section] += total - self._counted
        self._counted = total
        self._section = len(self.saved) - 1

    def _pack(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in self._known:
            self._known.add(address)
            self._alive.append(tensor)
            count = tensor.untyped_storage().nbytes()
            self.saved[self._section] += count
            if 0 < self._section < len(self.saved) - 1:
                self.largest = max(self.largest, count)
        return tensor


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _GpuFunctions(TorchFunctionMode):
    """Runs attention and norms as a GPU does."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _NORMS and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return func(args[0].float(), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            kind = torch.get_autocast_dtype("cpu")
            query = query.to(kind)
            key = key.to(kind)
            value = value.to(kind)
        return self._counter.fused(lambda: _Attention.apply(query, key, value))  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    """The products of attention; the backward pass has twice as many."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = query.shape[-3] // key.shape[-3]  # several heads of queries may share one of keys
        scores = query @ key.repeat_interleave(heads, -3).transpose(-2, -1)
        result = scores @ value.repeat_interleave(heads, -3)
        ctx.save_for_backward(query, key, value, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _ = ctx.saved_tensors
        heads = query.shape[-3] // key.shape[-3]
        for _ in range(2):
            scores = query @ key.repeat_interleave(heads, -3).transpose(-2, -1)
            scores @ value.repeat_interleave(heads, -3)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
