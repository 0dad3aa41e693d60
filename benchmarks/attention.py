"""Attention of stock denoisers on this GPU: which kernel is fast, which is right, and which one ends its process?

    python benchmarks/attention.py [OUT.json] [--cases flux z_image sd3] [--kernels cudnn] [--lanes 4] [--timeout 90]

A case has the tokens, heads and width of a head of a published model at 1024 px. Every case runs with every kernel of
`scaled_dot_product_attention` and as packed rows (`varlen_attn`), with queries in memory order [B, T, H, E] as stock
processors make them, or copied to [B, H, T, E] first, and with a gradient that is a part of a larger one, as after the
split into text and image. Each combination runs in its own process, since a failing kernel ends it, some at the same
time: times are upper limits with more than one lane. Prints milliseconds forward and with the backward pass, TFLOP/s,
and the largest relative error of output and gradients beside the float32 result of a few heads.
"""

import argparse
import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Case:
    """The shape of one attention: samples, rows of text, rows of the image, heads, width of a head."""

    samples: int
    text: int
    image: int
    heads: int
    width: int


CASES = {
    "flux": Case(1, 512, 4096, 24, 128),
    "qwen_image": Case(1, 64, 4096, 24, 128),
    "z_image": Case(1, 32, 4096, 30, 128),
    "sd3": Case(1, 333, 4096, 24, 64),
    "sd3_512": Case(4, 333, 1024, 24, 64),
    "wan": Case(1, 0, 32760, 12, 128),
}
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "packed": None,
}
LAYOUTS = ("rows", "copied", "mixed")


def attend(parts: list[Tensor], kernel: str, layout: str) -> Tensor:
    """Return [B, T, H E] of queries, keys and values [B, T, H, E]."""
    samples, tokens = parts[0].shape[:2]
    if kernel == "packed":
        from torch.nn.attention.varlen import varlen_attn

        bounds = tokens * torch.arange(samples + 1, device=parts[0].device, dtype=torch.int32)
        rows = [part.flatten(0, 1) for part in parts]
        packed: Any = varlen_attn(rows[0], rows[1], rows[2], bounds, bounds, tokens, tokens)
        joined: Tensor = packed.unflatten(0, (samples, tokens)).flatten(2)
        return joined
    turned = [part.transpose(1, 2) for part in parts]
    if layout == "copied":
        turned = [part.contiguous() for part in turned]
    with sdpa_kernel(KERNELS[kernel]):
        output = scaled_dot_product_attention(*turned)
    return output.transpose(1, 2).flatten(2)


def milliseconds(run: Any, repeats: int = 10) -> float:
    """Return the median time of a function on the GPU."""
    times = []
    for _ in range(repeats):
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return sorted(times)[len(times) // 2]


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error of a tensor; NaN stays NaN."""
    return float((actual.float() - expected).norm() / expected.norm())


def measure(case: Case, kernel: str, layout: str) -> dict[str, float]:
    """Time one combination in this process, and compare it with float32."""
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)
    tokens = case.text + case.image
    shape = (case.samples, tokens, case.heads, case.width)
    drawn = [torch.randn(shape, device=device, generator=generator) for _ in range(4)]
    leaves = [part.bfloat16().requires_grad_() for part in drawn[:3]]
    grad = drawn[3].bfloat16().flatten(2)

    def forward() -> Tensor:
        return attend(leaves, kernel, layout)

    def both() -> tuple[Tensor, ...]:
        output = forward()
        text = output[:, : case.text]
        image = output[:, case.text :]
        return torch.autograd.grad((text, image), leaves, (grad[:, : case.text], grad[:, case.text :]))

    if layout == "mixed":
        wide = torch.cat([grad, grad], dim=2)
        torch.autograd.grad(forward(), leaves, wide[..., : grad.shape[2]])
    results = [forward().detach(), *both()]
    torch.cuda.synchronize()
    few = 2  # heads
    exact = [part.detach()[:, :, :few].float().requires_grad_() for part in leaves]
    with sdpa_kernel(SDPBackend.MATH):
        output = scaled_dot_product_attention(*(part[:1].transpose(1, 2) for part in exact)).transpose(1, 2)
    output.backward(grad.unflatten(2, (case.heads, case.width))[:1, :, :few].float())
    errors = [error(results[0].unflatten(2, (case.heads, case.width))[:1, :, :few], output.detach())]
    errors += [
        error(actual[:1, :, :few], part.grad[:1])
        for actual, part in zip(results[1:], exact, strict=True)
        if part.grad is not None
    ]
    flop = 4.0 * case.samples * tokens**2 * case.heads * case.width
    first = milliseconds(forward)
    second = milliseconds(both)
    return {
        "forward_ms": first,
        "both_ms": second,
        "forward_tflops": flop / first / 1e9,
        "backward_tflops": 2.5 * flop / (second - first) / 1e9,
        "error": max(errors, key=lambda each: (each != each, each)),
    }


def in_a_process(combination: tuple[str, str, str], timeout: float) -> dict[str, Any]:
    """Run one combination in a new process and return its numbers, or why there are none."""
    command = [sys.executable, __file__, "--one", *combination]
    facts = dict(zip(("case", "kernel", "layout"), combination, strict=True))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {**facts, "failed": f"no result in {timeout:.0f} s"}
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        failed = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        return {**facts, "failed": f"exit code {done.returncode}: {failed[:160]}"}
    return {**facts, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    """Run the benchmark."""
    if sys.argv[1:2] == ["--one"]:
        name, kernel, layout = sys.argv[2:]
        print(json.dumps(measure(CASES[name], kernel, layout)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="JSON of the results")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--lanes", type=int, default=1, help="processes at the same time")
    parser.add_argument("--timeout", type=float, default=90, help="seconds of one combination")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    combinations = [
        each
        for each in itertools.product(args.cases, args.kernels, LAYOUTS)
        if each[1] != "packed" or each[2] == "rows"
    ]
    results = []
    with ThreadPoolExecutor(args.lanes) as pool:
        for row in pool.map(lambda each: in_a_process(each, args.timeout), combinations):
            results.append(row)
            name = f"{row['case']:10} {row['kernel']:9} {row['layout']:6}"
            if "failed" in row:
                print(f"{name} {row['failed']}", flush=True)
            else:
                print(
                    f"{name} forward {row['forward_ms']:.3f} ms, with backward {row['both_ms']:.3f} ms "
                    f"({row['forward_tflops']:.0f}, {row['backward_tflops']:.0f} TFLOP/s), error {row['error']:.1e}",
                    flush=True,
                )
            if args.out is not None:
                args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
