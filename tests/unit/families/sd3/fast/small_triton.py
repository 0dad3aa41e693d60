"""A CPU emulation, in torch, of the parts of Triton that our kernels use; programs run one after another.

It checks that a kernel reads, sums and writes the right elements: a load or store out of bounds is an error, and
elements that no store writes keep their value. It does not check types, speed or what the real compiler accepts.
"""

import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_program: list[int] = []
_grid: list[int] = []


class Pointer:
    """A tensor and offsets into its memory."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + more)

    def flat(self) -> Tensor:
        """Return the memory from the tensor's first to its last element."""
        size = 1 + sum((n - 1) * stride for n, stride in zip(self.memory.shape, self.memory.stride(), strict=True))
        return self.memory.as_strided((size,), (1,))


def _offsets(pointer: Pointer, mask: Any) -> tuple[Tensor, Tensor]:
    offset = torch.as_tensor(pointer.offset)
    selected = torch.ones(offset.shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    offset, selected = torch.broadcast_tensors(offset, selected)
    used = offset[selected]
    if used.numel():
        assert int(used.min()) >= 0, "out of bounds: before the tensor"
        assert int(used.max()) < len(pointer.flat()), "out of bounds: after the tensor"
    return offset, selected


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    offset, selected = _offsets(pointer, mask)
    values = torch.full(offset.shape, other, dtype=pointer.memory.dtype)
    values[selected] = pointer.flat()[offset[selected]]
    return values


def store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    offset, selected = _offsets(pointer, mask)
    assert value.dtype == pointer.memory.dtype, "a store needs an explicit cast"
    pointer.flat()[offset[selected]] = torch.broadcast_to(value, offset.shape)[selected]


def _range(*bounds: Any, num_stages: int = 1) -> Iterator[Tensor]:
    return (torch.tensor(at, dtype=torch.int32) for at in range(*map(int, bounds)))


def _total(values: Tensor, axis: int | None = None) -> Tensor:
    return values.sum() if axis is None else values.sum(axis)


def _highest(values: Tensor, axis: int | None = None) -> Tensor:
    return values.max() if axis is None else values.amax(axis)


def _atomic_max(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    before = load(pointer, mask)
    store(pointer, torch.maximum(before, value), mask)


def _cast(values: Tensor, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
    return values.view(dtype) if bitcast else values.to(dtype)


def _upper_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the upper 64 bits of unsigned products, by Python's integers."""
    words = zip(a.tolist(), b.tolist(), strict=True)
    upper = ((one % 2**64) * (two % 2**64) >> 64 for one, two in words)
    return torch.tensor([word - 2**64 if word >> 63 else word for word in upper])


class Kernel:
    """The result of `triton.jit`: other kernels call it directly, ``kernel[grid]`` launches it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
            pointers = [Pointer(arg.detach()) if isinstance(arg, Tensor) else arg for arg in args]
            _grid[:] = [*grid]
            for program in itertools.product(*map(range, grid)):
                _program[:] = program
                self.function(*pointers, **constants)

        return launch


def modules() -> dict[str, Any]:
    """Return replacements of ``triton`` and ``triton.language`` for `sys.modules`."""
    language = types.ModuleType("triton.language")
    names = {
        "constexpr": object,
        "float32": torch.float32,
        "int16": torch.int16,
        "int32": torch.int32,
        "int64": torch.int64,
        "program_id": lambda axis: torch.tensor(_program[axis], dtype=torch.int32),
        "num_programs": lambda axis: _grid[axis],
        "arange": lambda first, end: torch.arange(first, end, dtype=torch.int32),
        "zeros": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        "load": load,
        "store": store,
        "range": _range,
        "static_range": range,
        "umulhi": _upper_product,
        "sum": _total,
        "max": _highest,
        "abs": torch.abs,
        "floor": torch.floor,
        "sqrt": torch.sqrt,
        "cast": _cast,
        "trans": torch.t,
        "atomic_max": _atomic_max,
        "maximum": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        "where": torch.where,
        "rsqrt": torch.rsqrt,
        "sigmoid": torch.sigmoid,
        "minimum": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    }
    for name, value in names.items():
        setattr(language, name, value)
    triton = types.ModuleType("triton")
    triton.jit = Kernel  # type: ignore[attr-defined]
    triton.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    return {"triton": triton, "triton.language": language}
