"""Shared by step_parts.py and step_fp8.py: full-size shapes, operands of every operation, and a timer."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sd3_light.families.sd3.fast import reference
from sd3_light.families.sd3.fast.fp8 import E4M3, Fp8Rows, Fp8Weight
from sd3_light.families.sd3.fast.row_plan import RowPlan, Rows

WIDTH, HEADS, UNITS = 1536, 24, 64
NUM_IMAGE, NUM_TEXT, BLOCKS = 256, 333, 15


def milliseconds(function: Callable[[], Any]) -> float:
    """Return the median milliseconds of many calls."""
    import triton

    return float(triton.testing.do_bench(function, warmup=15, rep=60, return_mode="median"))


def attempt(name: str, function: Callable[[], Any]) -> Any:
    """Return the result of a part, or its error: parts are experiments."""
    try:
        return function()
    except (RuntimeError, AssertionError, TypeError, ValueError, AttributeError, ImportError) as error:
        print(f"{name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        return {"error": f"{type(error).__name__}: {str(error)[:400]}"}


def operands(
    name: str, rows: Rows, plan: RowPlan, dtype: torch.dtype, width: int, heads: int
) -> Iterator[tuple[Any, ...]]:
    """Yield arguments for an operation, in each of its forms."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=rows.sample_index.device).to(dtype)

    def pending() -> reference.PendingUpdate:
        bias = torch.randn(width, device=rows.sample_index.device)
        return normal(rows.count, width), bias, normal(rows.samples, 5 * width)[:, :width]

    modulation = normal(rows.samples, 5 * width)
    shift, scale = modulation[:, :width], modulation[:, width : 2 * width]
    norms = (torch.rand(width // heads, device=shift.device) + 0.5, torch.rand(width // heads, device=shift.device))
    match name:
        case "residual_norm":
            yield normal(rows.count, width), None, scale, shift, rows
            for form in ("fp8", "both", "plain"):
                yield normal(rows.count, width), pending(), scale, shift, rows, form
        case "residual_norm_backward":
            streams, waiting = (None, normal(rows.count, width)), (None, pending())
            for stream, added, again in itertools.product(streams, waiting, (shift, None)):
                # every form compiles another kernel, so rounding is tested only with all arguments
                is_whole = stream is not None and added is not None
                for form in ("both", "plain") if is_whole else ("plain",):
                    yield normal(rows.count, width), stream, normal(rows.count, width), added, scale, rows, again, form
        case "gelu":
            for form in ("both", "fp8", "plain"):
                yield normal(rows.count, 4 * width), form
        case "gelu_backward":
            for again, form in itertools.product((False, True), ("plain", "both")):
                yield normal(rows.count, 4 * width), normal(rows.count, 4 * width), again, form
        case "join":
            for pair in (None, norms):
                streams = (normal(plan.image.count, 3 * width), normal(plan.text.count, 3 * width))
                yield streams, (pair, pair), heads, plan
        case "join_backward":
            for pair, form in itertools.product((None, norms), ("both", "plain")):
                grads = tuple(normal(plan.capacity, heads, width // heads) for _ in range(3))
                yield grads, normal(rows.count, 3 * width), pair, heads, rows, form
        case "gather_rows":
            for form in ("both", "fp8", "plain"):
                yield normal(plan.capacity, width), rows, form
        case "round_rows":
            yield (normal(rows.count, width),)
        case "round_weight":
            yield ([normal(width, width).float() for _ in range(3)],)
        case "scatter_rows":
            yield normal(plan.image.count, width), normal(plan.text.count, width), plan


def empty_fp8_weight(outputs: int, inputs: int, device: torch.device) -> Fp8Weight:
    """Return empty storage for a rounded weight."""

    def empty_rows(count: int, width: int) -> Fp8Rows:
        return Fp8Rows(torch.zeros(count, width, device=device).to(E4M3), torch.zeros(count, 1, device=device))

    return Fp8Weight(empty_rows(outputs, inputs), empty_rows(inputs, outputs))
