"""FP8 products, and the cost of rounding to FP8: the parts `fp8` and `rounding` of step_parts.py."""

from collections.abc import Callable
from typing import Any

import torch
from step_cases import BLOCKS, HEADS, NUM_IMAGE, NUM_TEXT, WIDTH, attempt, empty_fp8_weight, milliseconds, operands
from torch import Tensor

from sd3_light.config import SIZES
from sd3_light.families.sd3.fast.fp8 import E4M3, Fp8Rows, multiply
from sd3_light.families.sd3.fast.row_plan import RowPlan, make_plan

LAYERS = (("qkv", 1, 3), ("out", 1, 1), ("up", 1, 4), ("down", 4, 1))


def products(batch: int, device: torch.device) -> dict[str, Any]:
    """Measure milliseconds and TFLOP/s of FP8 products with several kinds of scales, compared with bf16."""
    results: dict[str, Any] = {"distance": attempt("check", lambda: check(device))}
    totals: dict[str, float] = {}
    print(
        f"relative difference of FP8 products from float32 products of the same numbers: {results['distance']}",
        flush=True,
    )
    for stream, rows in (("image", batch * NUM_IMAGE), ("text", batch * NUM_TEXT)):
        for label, inner, outer in LAYERS:
            for direction in ("forward", "of input"):
                sums, outputs = (inner, outer) if direction == "forward" else (outer, inner)
                is_biased = direction == "forward" and label in ("qkv", "up")
                variants = product_variants(rows, sums * WIDTH, outputs * WIDTH, is_biased, device)
                texts = []
                for variant, function in variants.items():
                    took = attempt(f"{stream} {label} {direction} {variant}", lambda run=function: milliseconds(run))
                    if isinstance(took, float):
                        totals[variant] = totals.get(variant, 0.0) + BLOCKS * took
                        results[f"{stream} {label} {direction} {variant}"] = took
                        rate = 2.0 * rows * inner * outer * WIDTH**2 / took / 1e9
                        texts.append(f"{variant} {took:.3f} ({rate:.0f})")
                print(f"fp8 {stream} {label} {direction}, ms (TFLOP/s): {', '.join(texts)}", flush=True)
    print("fp8 all blocks, forward and of input, ms: " + ", ".join(f"{k} {v:.1f}" for k, v in totals.items()))
    return {**results, "all blocks": totals}


def product_variants(
    rows: int, inner: int, outer: int, biased: bool, device: torch.device
) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute x w^T of this size in several ways."""
    x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    w, b = torch.randn(outer, inner, device=device, dtype=torch.bfloat16), torch.randn(outer, device=device).bfloat16()
    x8, w8, one = x.to(E4M3), w.to(E4M3), torch.ones((), device=device)
    by_row, by_column = torch.ones(rows, 1, device=device), torch.ones(1, outer, device=device)
    bias = b if biased else None

    def scaled(a: Tensor, c: Tensor, fast: bool) -> Tensor:
        return torch._scaled_mm(x8, w8.t(), a, c, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return {
        "bf16": lambda: torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t()),
        "one scale": lambda: scaled(one, one, True),
        "one scale, exact sums": lambda: scaled(one, one, False),
        "scale per row": lambda: scaled(by_row, by_column, True),
        "scale per row, exact sums": lambda: scaled(by_row, by_column, False),
    }


def check(device: torch.device) -> dict[str, float]:
    """Return the relative difference of FP8 products from float32 products of the same rounded numbers."""
    from sd3_light.families.sd3.fast import kernels

    x = torch.randn(777, 4 * WIDTH, device=device) * torch.logspace(-9, 3, 777, device=device)[:, None]
    w, b = torch.randn(WIDTH, 4 * WIDTH, device=device), torch.randn(WIDTH, device=device).bfloat16()
    one, weight = kernels.round_rows(x.bfloat16()), empty_fp8_weight(WIDTH, 4 * WIDTH, device)
    kernels.round_weight([w], weight)
    assert isinstance(one, Fp8Rows)
    results = {}
    for name, bias, fast in (("fast", None, True), ("exact", None, False), ("fast, bias", b, True)):
        expected = one.dequantized().double() @ weight.forward.dequantized().double().t()
        expected += 0 if bias is None else bias.double()
        actual = multiply(one, weight.forward, bias, torch.bfloat16, fast).double()
        results[name] = float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).max())
    return results


# how many of the last forms of an operation (`step_cases.operands`) are timed
TIMED = {
    "residual_norm": 3, "residual_norm_backward": 4, "gelu": 3, "gelu_backward": 4, "join_backward": 2,
    "gather_rows": 3, "round_rows": 1,
}  # fmt: skip


def rounding(batch: int, device: torch.device) -> dict[str, Any]:
    """Measure milliseconds per step of each operation with and without FP8 output, and of the weight copies."""
    from diffusers import SD3Transformer2DModel

    from sd3_light.families.sd3.fast.weights import WeightCopies

    plan = make_plan(batch, NUM_IMAGE, NUM_TEXT, None, device)
    results = {name: timed(name, last, plan, device) for name, last in TIMED.items()}
    with torch.device(device):
        model = SD3Transformer2DModel(**SIZES["sd3_light"].transformer_config())
    for label, fp8 in (("bf16", False), ("fp8", True)):
        copies = WeightCopies(model, torch.bfloat16, fp8)
        results[f"weights {label}"] = took = attempt(label, lambda copies=copies: milliseconds(copies.refresh))
        print(f"rounding weights in {label}: {took} ms per step", flush=True)
    return results


def timed(name: str, last: int, plan: RowPlan, device: torch.device) -> dict[str, Any]:
    """Measure milliseconds of an operation in all blocks and both streams by form, once per block and stream."""
    from sd3_light.families.sd3.fast import kernels

    results: dict[str, Any] = {}
    for rows in (plan.image, plan.text):
        for case in list(operands(name, rows, plan, torch.bfloat16, WIDTH, HEADS))[-last:]:
            again = name.endswith("backward") and (case[2] is True or (len(case) == 8 and case[6] is not None))
            form = (case[-1] if isinstance(case[-1], str) else "both") + (" again" if again else "")
            took = attempt(name, lambda case=case: milliseconds(lambda: getattr(kernels, name)(*case)))
            results[form] = results.get(form, 0.0) + BLOCKS * took if isinstance(took, float) else took
    print(f"rounding {name:24} ms per step: {results}", flush=True)
    return results
