"""The parts of a training step alone, on a GPU: what each could reach at best, and that our kernels are right there.

    python benchmarks/step_parts.py [check] [tune] [products] [fp8] [rounding] [attention] [optimizer] [--batch 128]
                                    [--out parts.json] [--tuning tuning.json]

`check` compares every kernel with its reference in float32, bf16 and float32 inputs. `tune` times kernels under several
shapes of tiles, prints bytes a second, and leaves the best in `--tuning`, which `step.py --tuning` takes. `products`
times the matrix products of a block at their real shapes; `fp8` those that 8 bits can make, with a scale a row and one
for all, fast sums and exact ones, beside bf16's; `rounding` what it costs to make 8 bits; `attention` the backends on
padded and real lengths; `optimizer` the passes over the weights. A part that fails says so.
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
    eight_room,
    milliseconds,
    operands,
)
from step_loops import real_lengths
from torch import Tensor, nn

from sd3_light.config import SIZES
from sd3_light.model.fast import reference
from sd3_light.model.fast.fp8 import Fp8Rows
from sd3_light.model.fast.row_plan import RowPlan, make_plan


def captions(count: int) -> list[int]:
    """Text tokens of as many samples, the same in each call."""
    return real_lengths(count, np.random.default_rng(0))


# --- right -------------------------------------------------------------------------------------


OPERATIONS = (
    "residual_norm", "residual_norm_backward", "gelu", "gelu_backward", "join", "join_backward", "gather_rows",
    "scatter_rows", "round_rows", "round_weight",
)  # fmt: skip
ROUNDED_LIMIT = 5e-3
"""Of rows in 8 bits: a number that lies between two may go to either, by the last bit of float32."""


def applied(ops: Any, name: str, given: tuple[Any, ...]) -> Any:
    """What an operation makes."""
    if name != "round_weight":
        return getattr(ops, name)(*given)
    (weights,) = given
    room = eight_room(sum(map(len, weights)), weights[0].shape[1], weights[0].device)
    ops.round_weight(weights, room)
    return room.forward, room.backward


def worst_difference(found: Any, wanted: Any) -> float:
    """The largest relative distance of the tensors of two results, |a - b| / |b|."""
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found.dtype, found.shape, wanted.shape)
        return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-9))
    if wanted is None:
        assert found is None
        return 0.0
    if isinstance(wanted, Fp8Rows):
        rounded = worst_difference(found.dequantized(), wanted.dequantized())
        assert rounded < ROUNDED_LIMIT, f"rows in 8 bits differ by {rounded:.2e}"
        return max(worst_difference(found.scale, wanted.scale), worst_difference(found.plain, wanted.plain))
    return max(worst_difference(one, other) for one, other in zip(found, wanted, strict=True))


def check_operation(name: str, device: torch.device) -> float:
    """How far a kernel is from its reference at worst, over both streams, all forms, padded and real."""
    from sd3_light.model.fast import kernels

    worst = 0.0
    for lengths, (dtype, limit) in itertools.product(
        (None, captions(6)), ((torch.float32, 1e-5), (torch.bfloat16, 6e-3))
    ):
        plan = make_plan(6, 70, max(captions(6)), lengths, device)
        for rows in (plan.image, plan.text):
            for given in operands(name, rows, plan, dtype, WIDTH, HEADS):
                found, wanted = (applied(ops, name, given) for ops in (kernels, reference))
                if name in ("join", "scatter_rows"):  # rows behind the last sample mean nothing
                    count = plan.image.count + plan.text.count
                    found, wanted = ([part[:count] for part in _listed(made)] for made in (found, wanted))
                difference = worst_difference(found, wanted)
                assert difference < limit, f"{name} is {difference:.2e} away from its reference in {dtype}"
                worst = max(worst, difference)
    return worst


def _listed(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


def broken_kernels(device: torch.device) -> dict[str, str]:
    """Kernels that do not compile or compute something else on this device, with the reason."""
    found = {}
    for name in OPERATIONS:
        try:
            worst = check_operation(name, device)
            print(f"check {name:24} {worst:.2e}", flush=True)
        except Exception as error:  # whatever the compiler throws is the finding
            found[name] = f"{type(error).__name__}: {str(error)[:1500]}"
            print(f"check {name:24} {found[name]}", flush=True)
    return found


# --- fast --------------------------------------------------------------------------------------

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
# operation, the form of it that is tuned, and how many [M, D] in bf16 it reads and writes in that form
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
    """The best tile of each kernel for the image's rows; all times are printed."""
    from sd3_light.model.fast import kernels

    plan = make_plan(batch, NUM_IMAGE, NUM_TEXT, None, device)
    best: dict[str, Any] = {}
    for kernel, choices in CANDIDATES.items():
        operation, form, moves = MOVES[kernel]
        given = list(operands(operation, plan.image, plan, torch.bfloat16, WIDTH, HEADS))[form]
        if operation == "round_weight":
            given = (*given, eight_room(3 * WIDTH, WIDTH, device))
        times = []
        for values in itertools.product(*choices.values()):
            kernels.TUNING[kernel] = dict(zip(choices, values, strict=True))
            try:
                took = milliseconds(lambda name=operation, given=given: getattr(kernels, name)(*given))
            except Exception as error:  # too large a tile for the device is a result too
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
    """TFLOP/s of every product of a block, and milliseconds of all of them in a step."""
    found: dict[str, Any] = {}

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def note(name: str, flop: float, function: Callable[[], Any]) -> None:
        took = attempt(name, lambda: milliseconds(function))
        if isinstance(took, float):
            found[name] = {"ms": took, "tflops": flop / took / 1e9}

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
                    found.get(f"{key} {what}", {"ms": 0.0})["ms"] for what in ("forward", "of input", "of weight")
                )
        found[f"{library} all blocks"] = {"ms": BLOCKS * total, "tflops": 0.0}
    torch.backends.cuda.preferred_blas_library("default")
    rows, joined, square = batch * NUM_IMAGE, normal(batch, NUM_IMAGE + NUM_TEXT, WIDTH), normal(WIDTH, WIDTH)
    flop = 2.0 * rows * WIDTH**2
    note("out, image rows among the joined ones, batched", flop, lambda: torch.bmm(
        joined[:, :NUM_IMAGE], square.t().expand(batch, -1, -1)))  # fmt: skip
    for name, values in found.items():
        print(f"product {name:48} {values['ms']:8.3f} ms {values['tflops']:8.1f} TFLOP/s", flush=True)
    return found


def attention(batch: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of one block's attention, forward, and forward with backward."""
    from sd3_light.model.fast.sample_attention import attend

    listed = attempt("flash implementations", lambda: torch.nn.attention.list_flash_attention_impls())
    print(f"flash implementations: {listed}", flush=True)
    for other in listed if isinstance(listed, list) else []:
        outcome = attempt(other, lambda other=other: torch.nn.attention.activate_flash_attention_impl(other))
        if outcome is None:
            print(f"{other} is here; what follows runs on it where flash is named", flush=True)
            break
    found: dict[str, Any] = {}
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
            found[name] = {"forward": first, "both": second}
            rates = f"{flop / first / 1e9:.0f}, {2.5 * flop / (second - first) / 1e9:.0f}"
            print(f"attention {name:20} forward {first:.3f} ms, with backward {second:.3f} ms ({rates} TFLOP/s)")
    return found


def optimizer(device: torch.device) -> dict[str, Any]:
    """Milliseconds of each pass over the weights of the real model."""
    from diffusers import SD3Transformer2DModel

    from sd3_light.model.fast.weights import WeightCopies

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
    found = {}
    for name, function in passes.items():
        took = attempt(name, lambda function=function: milliseconds(function))
        found[name] = took
        print(f"optimizer {name:24} {took if isinstance(took, dict) else round(took, 3)} ms", flush=True)
    return found


def main() -> None:
    """Parse, run, write."""
    names = ("check", "tune", "products", "fp8", "rounding", "attention", "optimizer")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], metavar="PART", help=f"of {', '.join(names)}; none: all")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--out", type=Path, help="JSON file for all numbers")
    parser.add_argument("--tuning", type=Path, help="JSON file for the best tiles")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(names)):
        parser.error(f"no part is named {unknown[0]}")

    device, found = torch.device("cuda"), {}
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
        found[name] = attempt(name, parts[name])
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.tuning is not None and isinstance(found.get("tune"), dict):
        args.tuning.write_text(json.dumps(found["tune"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
