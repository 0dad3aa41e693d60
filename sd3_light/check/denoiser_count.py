"""Count what one forward and backward pass of a denoiser costs, on fake tensors: they have sizes and no memory.

Blocks of equal shapes cost the same, so that few of each kind are run. Attention runs as the fused kernels of GPUs do:
it saves its inputs and its result, and no scores.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
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
from torch.utils.flop_counter import flop_registry

from sd3_light.core.batch import Batch
from sd3_light.core.cost import BlockBytes
from sd3_light.core.model import block_lists, block_parents, is_block_list

Denoise = Callable[[nn.Module, Batch], Tensor]
"""(denoiser, batch) -> velocity, as in training."""

# CUDA's autocast runs norms in float32, the CPU's does not
_NORMS = (functional.layer_norm, functional.group_norm, functional.rms_norm)
_PRODUCTS = ("mm", "addmm", "bmm")
_BIASED = ("addmm", "baddbmm")  # their first argument is added to the product of the next two


@dataclass(frozen=True)
class Attention:
    """The products of attention, in all blocks like the counted one: FLOPs grow with ``queries`` times ``keys``."""

    queries: int
    keys: int
    flops: int


@dataclass(frozen=True)
class Counts:
    """FLOPs and bytes of one sample; ``blocks`` has an entry per counted block. See `SampleBytes` for the bytes.

    ``input_flops`` are those of the inputs' gradients, ``attention`` is a part of ``forward_flops``; ``tensor`` is the
    largest tensor that a block saves.
    """

    forward_flops: int
    input_flops: int
    features: int
    target: int
    before: int
    after: int
    tensor: int | Fraction
    blocks: tuple[BlockBytes, ...]
    attention: tuple[Attention, ...] = ()


NOTHING = Counts(0, 0, 0, 0, 0, 0, 0, (BlockBytes(0, 0, 0),))
"""Stands for a pass that cannot be counted."""


class LikeAnother(nn.Module):
    """Stands for a block that costs as much as an earlier one, ``number`` in the order of all blocks."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def copy_of_few(denoiser: nn.Module, most: int, targets: Collection[str] = ()) -> nn.Module:
    """Return a copy of a denoiser without weights of its own, in which `LikeAnother` replaces all blocks but ``most``
    of each kind in each list; blocks of one kind have the same layers among the ``targets``."""
    modules = dict(denoiser.named_modules())
    chosen = {id(modules[name]) for name in targets}
    kinds: dict[Any, list[int]] = {}
    left_out: dict[int, Any] = {}
    blocks = [(id(members), block) for members in block_lists(denoiser) for block in members.children()]
    for number, (members, block) in enumerate(blocks):
        weights = tuple((key, weight.shape) for key, weight in block.named_parameters())
        layers = tuple(name for name, layer in block.named_modules() if id(layer) in chosen)
        alike = kinds.setdefault((members, type(block), weights, layers), [])
        if len(alike) >= most:
            left_out[id(block)] = LikeAnother(alike[0])
        alike.append(number)
    return deepcopy(denoiser, left_out)


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
            if isinstance(block, LikeAnother):
                signatures.append(signatures[block.number])
                continue
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

    def count(self, denoise: Denoise, batch: Batch, dtype: str) -> Counts:
        """Run the denoiser in ``dtype`` and count, every block as often as the denoiser has it."""
        kind = getattr(torch, dtype)
        is_float32 = kind == torch.float32
        autocast = nullcontext() if is_float32 else torch.autocast("cpu", kind)
        with self._mode:
            given = batch.map_tensors(lambda value: _in_float32(self._mode.from_tensor(value)))
            counter = _Counter(self.denoiser, self.blocks)
            with counter.watching(autocast):
                output = denoise(self.denoiser, given)
        features = batch.tensors()
        # under autocast the copies in float32 exist beside those that layers save
        cast = [value for value in features if value.dtype in (torch.bfloat16, torch.float16) and not is_float32]
        casts = sum(4 * value.numel() for value in cast)
        target = 4 * output.numel()
        times = [1, *(self.kinds.count(number) for number in range(len(self.blocks))), 1]
        return Counts(
            forward_flops=sum(count * flops for count, flops in zip(times, counter.flops, strict=True)),
            input_flops=counter.flops_without_gradient(output),
            features=sum(value.nbytes for value in features),
            target=target,
            before=counter.saved[0] + casts,
            after=counter.saved[-1] + 2 * target,
            tensor=counter.largest,
            blocks=counter.block_bytes(),
            attention=tuple(
                Attention(queries, keys, times[section] * flops) for section, queries, keys, flops in counter.attention
            ),
        )


def _in_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


class _Counter(TorchDispatchMode):
    """Counts the forward pass in sections: what is before the blocks, every block, what is after them."""

    def __init__(self, denoiser: nn.Module, blocks: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = [0] * (len(blocks) + 2)
        self.saved = [0] * (len(blocks) + 2)
        self.attention: list[tuple[int, int, int, int]] = []  # section, queries, keys and FLOPs
        self.largest = 0
        self._inputs = [0] * len(blocks)
        self._products = [0] * len(blocks)
        self._blocks = blocks
        self._section = 0
        self._results: list[tuple[Tensor, int, int]] = []  # of products: FLOPs, factors that need a gradient
        self._functions = _GpuFunctions(self)
        self._is_paused = False
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
            with self, self._functions, packing, autocast:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def block_bytes(self) -> tuple[BlockBytes, ...]:
        """Return the bytes of every block."""
        sizes = zip(self._inputs, self.saved[1:-1], self._products, strict=True)
        return tuple(BlockBytes(inputs, saved, inputs + products) for inputs, saved, products in sizes)

    def flops_without_gradient(self, output: Tensor) -> int:
        """Return the FLOPs that the backward pass lacks: those of a product's factors that need no gradient, and of
        products that do not reach the output. The gradient of each factor has the FLOPs of the product."""
        reached = set()
        nodes = [output.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in reached:
                reached.add(node)
                nodes.extend(before for before, _ in node.next_functions)
        return sum(flops * (2 - factors * (result.grad_fn in reached)) for result, flops, factors in self._results)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the result of attention, whose inner tensors no kernel keeps; it counts as a product."""
        before = self.flops[self._section]
        self._is_paused = True
        result: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
        self._is_paused = False
        self._add_product(result)
        flops = self.flops[self._section] - before
        self._results.append((result, flops, 2))
        self.attention.append((self._section, query.numel() // query.shape[-1], key.shape[-2], flops))
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        name = packet.__name__
        if name == "_to_copy" and _address(args[0]) in self._known:  # autocast's copy of a weight
            self._known.add(_address(result))
            self._alive.append(result)
        elif packet in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
            self.flops[self._section] += flops
            if not self._is_paused:
                factors = args[1:3] if name in _BIASED else args[:2]
                self._results.append((result, flops, sum(factor.requires_grad for factor in factors)))
            if name in _PRODUCTS and not self._is_paused:
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
        return self._counter.attend(query, key, value)


class _Attention(torch.autograd.Function):
    """The products of attention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = query.shape[-3] // key.shape[-3]  # several heads of queries may share one of keys
        scores = query @ key.repeat_interleave(heads, -3).transpose(-2, -1)
        result = scores @ value.repeat_interleave(heads, -3)
        ctx.save_for_backward(query, key, value, result)
        return result
