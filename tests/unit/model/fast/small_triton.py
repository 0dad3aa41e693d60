"""As much of Triton as our kernels use, run by torch on the CPU, program after program.

It shows that a kernel reads, sums and writes the right places: what no store has touched stays as it was, and a load or
store outside of its tensor is an error. It knows nothing of types, speed or what the real compiler accepts.
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
    """A tensor's memory and offsets into it."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + more)

    def flat(self) -> Tensor:
        """All that lies behind the tensor's first element, as far as its own last one."""
        size = 1 + sum((n - 1) * stride for n, stride in zip(self.memory.shape, self.memory.stride(), strict=True))
        return self.memory.as_strided((size,), (1,))


def _places(pointer: Pointer, mask: Any) -> tuple[Tensor, Tensor]:
    offset = torch.as_tensor(pointer.offset)
    wanted = torch.ones(offset.shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    offset, wanted = torch.broadcast_tensors(offset, wanted)
    reached = offset[wanted]
    if reached.numel():
        assert int(reached.min()) >= 0, "before the tensor"
        assert int(reached.max()) < len(pointer.flat()), "behind the tensor"
    return offset, wanted


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    offset, wanted = _places(pointer, mask)
    found = torch.full(offset.shape, other, dtype=pointer.memory.dtype)
    found[wanted] = pointer.flat()[offset[wanted]]
    return found


def store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    offset, wanted = _places(pointer, mask)
    assert value.dtype == pointer.memory.dtype, "a store casts by name"
    pointer.flat()[offset[wanted]] = torch.broadcast_to(value, offset.shape)[wanted]


def _range(*bounds: Any, num_stages: int = 1) -> Iterator[Tensor]:
    return (torch.tensor(at, dtype=torch.int32) for at in range(*map(int, bounds)))


def _total(values: Tensor, axis: int | None = None) -> Tensor:
    return values.sum() if axis is None else values.sum(axis)


def _highest(values: Tensor, axis: int | None = None) -> Tensor:
    return values.max() if axis is None else values.amax(axis)


def _atomic_max(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    before = load(pointer, mask)
    store(pointer, torch.maximum(before, value), mask)


class Kernel:
    """What `triton.jit` makes of a function: called from a kernel as it is, launched by ``kernel[grid]``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, num_stages: int = 3, **constants: Any) -> None:
            given = [Pointer(arg.detach()) if isinstance(arg, Tensor) else arg for arg in args]
            _grid[:] = [*grid]
            for program in itertools.product(*map(range, grid)):
                _program[:] = program
                self.function(*given, **constants)

        return launch


def modules() -> dict[str, Any]:
    """``triton`` and ``triton.language``, to stand among the modules of the process."""
    language = types.ModuleType("triton.language")
    names = {
        "constexpr": object,
        "float32": torch.float32,
        "int64": torch.int64,
        "program_id": lambda axis: torch.tensor(_program[axis], dtype=torch.int32),
        "num_programs": lambda axis: _grid[axis],
        "arange": lambda first, end: torch.arange(first, end, dtype=torch.int32),
        "zeros": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
        "load": load,
        "store": store,
        "range": _range,
        "sum": _total,
        "max": _highest,
        "abs": torch.abs,
        "trans": torch.t,
        "atomic_max": _atomic_max,
        "maximum": lambda one, other: torch.maximum(torch.as_tensor(one), torch.as_tensor(other)),
        "where": torch.where,
        "rsqrt": torch.rsqrt,
        "sigmoid": torch.sigmoid,
        "minimum": lambda one, other: torch.minimum(torch.as_tensor(one), torch.as_tensor(other)),
    }
    for name, value in names.items():
        setattr(language, name, value)
    triton = types.ModuleType("triton")
    triton.jit = Kernel  # type: ignore[attr-defined]
    triton.cdiv = lambda one, other: -(-one // other)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    return {"triton": triton, "triton.language": language}
