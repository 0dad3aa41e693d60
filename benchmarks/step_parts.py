"""The parts of a training step on a GPU: the best speed each could reach, and whether our kernels are correct there.

    python benchmarks/step_parts.py [check] [tune] [products] [fp8] [rounding] [attention] [optimizer] [--batch 128]
                                    [--out parts.json] [--tuning tuning.json]

`check` compares every kernel with its float32 reference, for bf16 and float32 inputs. `tune` times kernels with several
tile shapes, prints bytes per second, and writes the best to `--tuning` for `step.py --tuning`. `products` times the
matrix products of a block at their real shapes; `fp8` times FP8 products with one scale per row or in total, with fast
or exact accumulation, compared with bf16; `rounding` times the rounding to FP8; `attention` the backends on padded and
real lengths; `optimizer` the passes over the weights. A part that fails prints its error.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import step_fp8
import torch
from step_cases import (
    BLOCKS,
    HEADS,
    NUM_IMAGE,
    NUM_TEXT,
    UNITS,
    WIDTH,
    attempt,
    empty_fp8_weight,
    milliseconds,
    operands,
)
from step_loops import real_lengths
from torch import Tensor, nn

from sd3_light.config import SIZES
from sd3_light.families.sd3.fast import reference
from sd3_light.families.sd3.fast.fp8 import Fp8Rows
from sd3_light.families.sd3.fast.row_plan import RowPlan, make_plan


def captions(count: int) -> list[int]:
    """Return the text tokens of ``count`` samples, the same in every call."""
    return real_lengths(count, np.random.default_rng(0))


# --- correctness -------------------------------------------------------------------------------------


OPERATIONS = (
    "residual_norm", "residual_norm_backward", "gelu", "gelu_backward", "join", "join_backward", "gather_rows",
    "scatter_rows", "round_rows", "round_weight",
)  # fmt: skip
ROUNDED_LIMIT = 5e-3
"""Limit for FP8 rows: a number between two FP8 values may round to either, depending on the last bit of float32."""


def apply_operation(ops: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Return the result of an operation."""
    if name != "round_weight":
        return getattr(ops, name)(*args)
    (weights,) = args
    weight = empty_fp8_weight(sum(map(len, weights)), weights[0].shape[1], weights[0].device)
    ops.round_weight(weights, weight)
    return weight.forward, weight.backward


def worst_difference(results: Any, expected: Any) -> float:
    """Return the largest relative difference of the tensors of two results, |a - b| / |b|."""
    if isinstance(expected, Tensor):
        assert results.dtype == expected.dtype and results.shape == expected.shape, (
            results.dtype,
            results.shape,
            expected.shape,
        )
        return float((results.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9))
    if expected is None:
        assert results is None
        return 0.0
    if isinstance(expected, Fp8Rows):
        rounded = worst_difference(results.dequantized(), expected.dequantized())
        assert rounded < ROUNDED_LIMIT, f"FP8 rows differ by {rounded:.2e}"
        return max(worst_difference(results.scale, expected.scale), worst_difference(results.plain, expected.plain))
    return max(worst_difference(a, b) for a, b in zip(results, expected, strict=True))


def check_operation(name: str, device: torch.device) -> float:
    """Return the worst difference of a kernel from its reference, over both streams, all forms, padded and real."""
    from sd3_light.families.sd3.fast import kernels

    worst = 0.0
    for lengths, (dtype, limit) in itertools.product(
        (None, captions(6)), ((torch.float32, 1e-5), (torch.bfloat16, 6e-3))
    ):
        plan = make_plan(6, 70, max(captions(6)), lengths, device)
        for rows in (plan.image, plan.text):
            for args in operands(name, rows, plan, dtype, WIDTH, HEADS):
                results, expected = (apply_operation(ops, name, args) for ops in (kernels, reference))
                if name in ("join", "scatter_rows"):  # rows after the last sample are undefined
                    count = plan.image.count + plan.text.count
                    results, expected = ([part[:count] for part in _listed(made)] for made in (results, expected))
                difference = worst_difference(results, expected)
                assert difference < limit, f"{name} differs by {difference:.2e} from its reference in {dtype}"
                worst = max(worst, difference)
    return worst


def _listed(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


def broken_kernels(device: torch.device) -> dict[str, str]:
    """Return the kernels that do not compile or are incorrect on this device, with the reason."""
    results = {}
    for name in OPERATIONS:
        try:
            worst = check_operation(name, device)
            print(f"check {name:24} {worst:.2e}", flush=True)
        except Exception as error:  # a compiler error is a result
            results[name] = f"{type(error).__name__}: {str(error)[:1500]}"
            print(f"check {name:24} {results[name]}", flush=True)
    return results


# --- speed --------------------------------------------------------------------------------------

CANDIDATES: dict[str, dict[str, list[int]]] = {
    "norm": {"R": [1, 2, 4], "num_warps": [4, 8]},
    "norm_backward": {"R": [1, 2], "STAGES": [1, 3], "num_warps": [4, 8, 16]},
    "gelu_backward": {"R": [1, 4], "BLOCK": [512, 1024], "STAGES": [1, 2], "num_warps": [4, 8]},
    "join": {"num_warps": [2, 4, 8]},
    "join_backward": {"STAGES": [1, 3], "num_warps": [4, 8, 16]},
    "copy": {"R": [1, 4], "num_warps": [4, 8]},
    "norm_fp8": {"R": [1, 2, 4], "num_warps": [4, 8]},
    "norm_backward_fp8": {"R": [1, 2], "STAGES": [1, 3], "num_warps": [4, 8, 16]},
    "gelu_fp8": {"num_warps": [4, 8, 16]},
    "join_backward_fp8": {"STAGES": [1, 3], "num_warps": [4, 8, 16]},
    "copy_fp8": {"R": [1, 4], "num_warps": [4, 8]},
    "round_rows": {"num_warps": [4, 8, 16]},
    "weight": {"N": [64, 128], "K": [32, 64, 128], "num_warps": [4, 8]},
}
# operation, index of the tuned form, and the number of [M, D] bf16 tensors it reads and writes
MOVES: dict[str, tuple[str, int, float]] = {
    "norm": ("residual_norm", -1, 4),
    "norm_backward": ("residual_norm_backward", -1, 6),
    "gelu_backward": ("gelu_backward", 0, 12),
    "join": ("join", -1, 6 * (1 + NUM_TEXT / NUM_IMAGE)),
    "join_backward": ("join_backward", -1, 8),
    "copy": ("gather_rows", -1, 2),
    "norm_fp8": ("residual_norm", -2, 4.5),
    "norm_backward_fp8": ("residual_norm_backward", -2, 6.5),
    "gelu_fp8": ("gelu", 0, 10),
    "join_backward_fp8": ("join_backward", -2, 9.5),
    "copy_fp8": ("gather_rows", 0, 2.5),
    "round_rows": ("round_rows", 0, 1.5),
    "weight": ("round_weight", 0, 0),
}


def tune(batch: int, device: torch.device) -> dict[str, Any]:
    """Return the best tile of each kernel for the image rows, and print all times."""
    from sd3_light.families.sd3.fast import kernels

    plan = make_plan(batch, NUM_IMAGE, NUM_TEXT, None, device)
    best: dict[str, Any] = {}
    for kernel, choices in CANDIDATES.items():
        operation, form, moves = MOVES[kernel]
        args = list(operands(operation, plan.image, plan, torch.bfloat16, WIDTH, HEADS))[form]
        if operation == "round_weight":
            args = (*args, empty_fp8_weight(3 * WIDTH, WIDTH, device))
        times = []
        for values in itertools.product(*choices.values()):
            kernels.TUNING[kernel] = dict(zip(choices, values, strict=True))
            try:
                took = milliseconds(lambda name=operation, args=args: getattr(kernels, name)(*args))
            except Exception as error:  # a tile that is too large for the device is a result
                print(f"tune {kernel} {kernels.TUNING[kernel]}: {type(error).__name__} {str(error)[:200]}", flush=True)
                continue
            times.append((took, kernels.TUNING[kernel]))
        if times:
            times.sort(key=lambda entry: entry[0])
            took, best[kernel] = times[0]
            kernels.TUNING[kernel] = best[kernel]
            rate = moves * plan.image.count * WIDTH * 2 / took / 1e9
            others = ", ".join(f"{ms:.3f} {'/'.join(map(str, values.values()))}" for ms, values in times)
            print(f"tune {kernel:14} {took:.3f} ms, {rate:.2f} TB/s: {best[kernel]}; all: {others}", flush=True)
    return best


def products(batch: int, device: torch.device) -> dict[str, Any]:
    """Measure TFLOP/s of every product of a block, and the milliseconds of all products per step."""
    results: dict[str, Any] = {}

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def note(name: str, flop: float, function: Callable[[], Any]) -> None:
        took = attempt(name, lambda: milliseconds(function))
        if isinstance(took, float):
            results[name] = {"ms": took, "tflops": flop / took / 1e9}

    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        total = 0.0
        for stream, rows in (("image", batch * NUM_IMAGE), ("text", batch * NUM_TEXT)):
            for label, inner, outer in (("qkv", 1, 3), ("out", 1, 1), ("up", 1, 4), ("down", 4, 1)):
                x, w, g = normal(rows, inner * WIDTH), normal(outer * WIDTH, inner * WIDTH), normal(rows, outer * WIDTH)
                b, flop = normal(outer * WIDTH), 2.0 * rows * inner * outer * WIDTH**2
                key = f"{library} {stream} {label}"
                note(f"{key} forward", flop, lambda x=x, w=w, b=b: torch.addmm(b, x, w.t()))
                note(f"{key} of input", flop, lambda g=g, w=w: torch.mm(g, w))
                note(f"{key} of weight bf16", flop, lambda g=g, x=x: torch.mm(g.t(), x))
                note(f"{key} of weight", flop, lambda g=g, x=x: torch.mm(g.t(), x, out_dtype=torch.float32))
                total += sum(
                    results.get(f"{key} {product}", {"ms": 0.0})["ms"]
                    for product in ("forward", "of input", "of weight")
                )
        results[f"{library} all blocks"] = {"ms": BLOCKS * total, "tflops": 0.0}
    torch.backends.cuda.preferred_blas_library("default")
    rows, joined, square = batch * NUM_IMAGE, normal(batch, NUM_IMAGE + NUM_TEXT, WIDTH), normal(WIDTH, WIDTH)
    flop = 2.0 * rows * WIDTH**2
    note("out, image rows among the joined ones, batched", flop, lambda: torch.bmm(
        joined[:, :NUM_IMAGE], square.t().expand(batch, -1, -1)))  # fmt: skip
    for name, values in results.items():
        print(f"product {name:48} {values['ms']:8.3f} ms {values['tflops']:8.1f} TFLOP/s", flush=True)
    return results


def attention(batch: int, device: torch.device) -> dict[str, Any]:
    """Measure milliseconds of the attention of one block, forward and with backward."""
    from sd3_light.families.sd3.fast.sample_attention import attend

    listed = attempt("flash implementations", lambda: torch.nn.attention.list_flash_attention_impls())
    print(f"flash implementations: {listed}", flush=True)
    for other in listed if isinstance(listed, list) else []:
        outcome = attempt(other, lambda other=other: torch.nn.attention.activate_flash_attention_impl(other))
        if outcome is None:
            print(f"activated {other}; the flash rows below use it", flush=True)
            break
    results: dict[str, Any] = {}
    cases: list[tuple[str, list[int] | None, int, str | None]] = [
        ("padded flash", None, batch, "flash"),
        ("padded cudnn", None, batch, "cudnn"),
        ("real varlen", captions(2 * batch), 2 * batch, None),
        ("one length, varlen", [NUM_TEXT - 1, *[NUM_TEXT] * (batch - 1)], batch, None),
    ]
    for name, lengths, count, backend in cases:
        plan = make_plan(count, NUM_IMAGE, NUM_TEXT, lengths, device)
        parts = [torch.randn(plan.capacity, HEADS, UNITS, device=device, dtype=torch.bfloat16) for _ in range(3)]
        leaves = [part.requires_grad_() for part in parts]
        grad = torch.randn_like(parts[0])
        each = [len_ + NUM_IMAGE for len_ in lengths] if lengths else [NUM_IMAGE + NUM_TEXT] * count
        flop = 4.0 * sum(n * n for n in each) * WIDTH

        def forward(leaves: Any = leaves, plan: RowPlan = plan, backend: str | None = backend) -> Tensor:
            return attend(*leaves, plan, backend)

        def both(leaves: Any = leaves, grad: Tensor = grad, run: Any = forward) -> Any:
            return torch.autograd.grad(run(), leaves, grad)

        first = attempt(name, lambda run=forward: milliseconds(run))
        second = attempt(name, lambda run=both: milliseconds(run))
        if isinstance(first, float) and isinstance(second, float):
            results[name] = {"forward": first, "both": second}
            rates = f"{flop / first / 1e9:.0f}, {2.5 * flop / (second - first) / 1e9:.0f}"
            print(f"attention {name:20} forward {first:.3f} ms, with backward {second:.3f} ms ({rates} TFLOP/s)")
    return results


def optimizer(device: torch.device) -> dict[str, Any]:
    """Measure milliseconds of each pass over the weights of the full-size model."""
    from diffusers import SD3Transformer2DModel

    from sd3_light.families.sd3.fast.weights import WeightCopies

    with torch.device(device):
        model = SD3Transformer2DModel(**SIZES["sd3_light"].transformer_config())
    weights: list[nn.Parameter] = list(model.parameters())
    for weight in weights:
        weight.grad = 0.01 * torch.randn_like(weight)
    grads = [weight.grad for weight in weights if weight.grad is not None]
    adamw: Any = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    copies = WeightCopies(model, torch.bfloat16)
    one = torch.ones((), device=device)

    def step(grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        adamw.grad_scale, adamw.found_inf = grad_scale, found_inf
        adamw.step()

    passes: dict[str, Callable[[], Any]] = {
        "norm": lambda: torch.stack(torch._foreach_norm(grads)).square().sum().sqrt(),
        "clip": lambda: torch._foreach_mul_(grads, one),
        "fused AdamW": lambda: step(None, None),
        "fused AdamW that scales": lambda: step(one, 0 * one),
        "copies in bf16": copies.refresh,
    }
    results = {}
    for name, function in passes.items():
        took = attempt(name, lambda function=function: milliseconds(function))
        results[name] = took
        print(f"optimizer {name:24} {took if isinstance(took, dict) else round(took, 3)} ms", flush=True)
    return results


def main() -> None:
    """Run the benchmark."""
    names = ("check", "tune", "products", "fp8", "rounding", "attention", "optimizer")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], metavar="PART", help=f"any of {', '.join(names)}; default: all")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--tuning", type=Path, help="JSON file for the best tiles")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(names)):
        parser.error(f"unknown part {unknown[0]}")

    device, results = torch.device("cuda"), {}
    parts: dict[str, Callable[[], Any]] = {
        "check": lambda: broken_kernels(device),
        "tune": lambda: tune(args.batch, device),
        "products": lambda: products(args.batch, device),
        "fp8": lambda: step_fp8.products(args.batch, device),
        "rounding": lambda: step_fp8.rounding(args.batch, device),
        "attention": lambda: attention(args.batch, device),
        "optimizer": lambda: optimizer(device),
    }
    for name in args.names or names:
        results[name] = attempt(name, parts[name])
        if args.out is not None:
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.tuning is not None and isinstance(results.get("tune"), dict):
        args.tuning.write_text(json.dumps(results["tune"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
