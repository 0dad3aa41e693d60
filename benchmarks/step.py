"""Speed of the training step on batches that are already on the GPU, compared with a plain loop over the stock model.

    python benchmarks/step.py [ROW ...] [--list] [--steps 10] [--profile ROW ...] [--out step.json] [--tiny]

One line per row: seconds per step, images per second, their ratio to the first row that ran (`plain-64` by default),
model FLOPs per second as a share of the GPU's peak (MFU; padding of real text and recomputation do not count), peak
memory, and seconds until the end of the first step (building, compiling). If a row fails, its line contains the error
and the next row runs. `--profile` adds the GPU time by kind of kernel. README.md in this folder explains the columns.
"""

import argparse
import gc
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common.basics import best_device, device_name, parser_of, synchronize, write_json
from common.loops import Batch, Row, Step, batches, flops, make_step

from sd3_light.config import SIZES
from sd3_light.cost.amount import GIB
from sd3_light.cost.device_peaks import peak_flops
from sd3_light.families.sd3.fast.block import BlockOptions
from sd3_light.families.sd3.fast.operations import operations
from sd3_light.families.sd3.fast.self_check import KernelShape, check_kernels

RESTART = 75  # exit code of a child that needs a new process for the remaining rows
LARGE = ((512, 512),)
BUCKETS = ((256, 256), (320, 192), (192, 320), (288, 224))


def _rows() -> dict[str, Row]:
    ours, most = Row("fast", 128), {"batches": 1, "steps": 2}
    plain = Row("plain", 64, optimizer="default")
    return {
        "plain-64": plain,
        "plain-64-no-qk-norm": replace(plain, qk_norm=False),
        "compiled-64": Row("compiled", 64, optimizer="fused"),
        "compiled-128": Row("compiled", 128, optimizer="fused"),
        "fast-64": replace(ours, batch=64),
        "fast-128": ours,
        "fast-192": replace(ours, batch=192),
        "fast-128-flash": replace(ours, options=BlockOptions("flash")),
        "fast-128-real": replace(ours, text="real"),
        "fast-256-real": replace(ours, batch=256, text="real"),
        "fast-128-bf16-gradients": replace(ours, options=BlockOptions(float32_gradients=False)),
        "fast-128-clip-apart": replace(ours, optimizer="fused"),
        "fast-128-buckets": replace(ours, sides=BUCKETS),
        "fast-128-real-buckets": replace(ours, sides=BUCKETS, text="real"),
        "fast-32-512px": replace(ours, batch=32, sides=LARGE),
        "fast-56-512px": replace(ours, batch=56, sides=LARGE),  # as many tokens as 128 images of 256 px
        "fast-64-512px-real": replace(ours, batch=64, sides=LARGE, text="real"),
        "plain-32-512px": replace(plain, batch=32, sides=LARGE),
        # less stored for the backward pass
        "fast-128-selective": replace(ours, options=BlockOptions(keep="products")),
        "fast-128-again": replace(ours, options=BlockOptions(keep="inputs")),
        "fast-256-selective": replace(ours, batch=256, options=BlockOptions(keep="products")),
        "fast-512-again": replace(ours, batch=512, options=BlockOptions(keep="inputs")),
        # FP8 products of activations and weights
        "fast-64-fp8": replace(ours, batch=64, options=BlockOptions(products="fp8")),
        "fast-128-fp8": replace(ours, options=BlockOptions(products="fp8")),
        "fast-128-fp8-exact-sums": replace(ours, options=BlockOptions(products="fp8", fast_sums=False)),
        "fast-128-fp8-selective": replace(ours, options=BlockOptions(keep="products", products="fp8")),
        "fast-256-real-fp8": replace(ours, batch=256, text="real", options=BlockOptions(products="fp8")),
        # about the largest micro-batches that fit in 139 GiB
        "plain-112-most": replace(plain, batch=112, **most),
        "plain-120-most": replace(plain, batch=120, **most),
        "plain-960-again-most": replace(plain, batch=960, options=BlockOptions(keep="inputs"), **most),
        "fast-208-most": replace(ours, batch=208, **most),
        "fast-336-selective-most": replace(ours, batch=336, options=BlockOptions(keep="products"), **most),
        "fast-1024-again-most": replace(ours, batch=1024, options=BlockOptions(keep="inputs"), **most),
    }


ROWS = _rows()


def tiny(row: Row) -> Row:
    """Return a small version of a row for a CPU."""
    sides = tuple((width // 64 * 16, height // 64 * 16) for width, height in row.sides)
    return replace(row, size="tiny2", batch=4, sides=sides, options=replace(row.options, attention=None))


# --- one row -----------------------------------------------------------------------------------


def measure(row: Row, steps: int, profiled: bool, device: torch.device) -> dict[str, Any]:
    """Measure one row."""
    size = SIZES[row.size].with_overrides(qk_norm=row.qk_norm)
    started = time.perf_counter()
    torch.manual_seed(0)
    data, step = batches(row, size, device), make_step(row, size, device)
    losses = [step(data[0])]
    synchronize()
    first = time.perf_counter() - started
    losses += [step(batch) for batch in data]  # every shape once
    synchronize()
    steps, started = row.steps or steps, time.perf_counter()
    losses += [step(data[number % len(data)]) for number in range(steps)]
    synchronize()
    seconds = (time.perf_counter() - started) / steps
    work = sum(flops(row, size, data[number % len(data)]) for number in range(steps)) / steps / seconds
    results: dict[str, Any] = {
        "seconds": seconds,
        "images_per_second": row.batch / seconds,
        "first_step_seconds": first,
    }
    results |= {"tflops": work / 1e12, "losses": [round(float(loss), 4) for loss in losses[:6]]}
    if device.type == "cuda":
        results["memory_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        peak = peak_flops(torch.cuda.get_device_name(device), "bfloat16")
        results |= {"mfu": work / peak} if peak is not None else {}
        results |= {"profile": profile(step, data, device)} if profiled else {}
    return results


KINDS = (
    ("elementwise", r"^triton_(poi|per|red)_"),  # the compiler names its kernels after the operations they fuse
    ("attention", r"flash|fmha|sdpa|attention"),
    ("products", r"gemm|nvjet|cutlass|cublas|splitk|xmma|gemv"),
    ("optimizer", r"multi_tensor|adam|foreach|lpnorm"),
    ("copies", r"memcpy|memset|copy|catarray|index|fill"),
)


def kind_of(kernel: str) -> str:
    """Classify a kernel by its name; the default is elementwise (or a reduction)."""
    lower = kernel.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, lower)), "elementwise")


def profile(step: Step, data: Sequence[Batch], device: torch.device) -> dict[str, Any]:
    """Return the milliseconds per step by kind of kernel, and the slowest kernels."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as results:
        for batch in data[:2]:
            step(batch)
        synchronize()
    kernels = [(event.key, event.self_device_time_total / 2e3, event.count // 2) for event in results.key_averages()]
    by_kind: dict[str, float] = {}
    for name, milliseconds, _ in kernels:
        by_kind[kind_of(name)] = by_kind.get(kind_of(name), 0.0) + milliseconds
    kernels.sort(key=lambda kernel: -kernel[1])
    return {"by_kind": by_kind, "kernels": [(name[:160], round(ms, 3), count) for name, ms, count in kernels[:60]]}


def use_tuning(tuning: Path | None) -> None:
    """Apply the tiles that `kernels.py` has found."""
    from sd3_light.families.sd3.fast import kernels

    if tuning is not None and tuning.is_file():
        kernels.TUNING.update(json.loads(tuning.read_text(encoding="utf-8")))


@cache
def kernel_problem(fp8: bool, device: torch.device) -> str | None:
    """Return why the kernels of the full size cannot be used on this GPU."""
    size = SIZES["sd3_light"]
    return check_kernels(KernelShape(size.num_heads, size.head_dim, "bfloat16", fp8), device, operations(device))


def run_here(names: Sequence[str], args: argparse.Namespace) -> None:
    """Run rows in this process and append each result to ``args.child``. The device is cleaned between rows."""
    device = best_device()
    if device.type == "cuda":
        use_tuning(args.tuning)
    for name in names:
        row = tiny(ROWS[name]) if args.tiny else ROWS[name]
        try:
            if device.type == "cuda" and row.step == "fast":
                problem = kernel_problem(row.options.products == "fp8", device)
                assert problem is None, problem
            results = measure(row, args.steps, name in args.profile, device)
        except Exception as error:  # a row is an experiment: its error is its result
            results = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        with open(args.child, "a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **results}) + "\n")
        if "CUDA error" in results.get("error", ""):
            sys.exit(RESTART)  # the device is unusable
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


# --- all rows ----------------------------------------------------------------------------------


def run_all(names: Sequence[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield results from a child process. If it dies, its current row failed and a new child continues."""
    left, started = list(names), time.monotonic()
    while left:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            path.touch()
            words = ["--child", str(path), "--steps", str(args.steps), *(["--tiny"] if args.tiny else [])]
            words += ["--tuning", str(args.tuning)] if args.tuning else []
            command = [sys.executable, __file__, *left, *words, "--profile", *args.profile]
            child, done = subprocess.Popen(command), 0
            while left:
                ended = child.poll() is not None
                for line in path.read_text(encoding="utf-8").splitlines()[done:]:
                    done += 1
                    left.pop(0)
                    yield json.loads(line)
                if ended or time.monotonic() - started > args.seconds:
                    break
                time.sleep(0.2)
            if left and time.monotonic() - started > args.seconds:
                child.kill()
                yield from ({"name": name, "error": "not run: out of time"} for name in left)
                return
            if child.wait() != RESTART and left:
                yield {"name": left.pop(0), "error": f"the process failed with exit code {child.wait()}"}


COLUMNS = f"{'':26}{'s/step':>8}{'img/s':>8}{'ratio':>7}{'TFLOP/s':>9}{'MFU':>7}{'GiB':>7}{'first s':>9}  losses"


def line(results: dict[str, Any], base: float | None) -> str:
    """Format a row of the table, followed by the kinds of kernels if profiled."""
    if "error" in results:
        return f"{results['name']:26}  {results['error']}"
    ratio = results["images_per_second"] / base if base else 1.0
    mfu = f"{results['mfu']:.1%}" if "mfu" in results else ""
    memory = f"{results['memory_gib']:.1f}" if "memory_gib" in results else ""
    text = f"{results['name']:26}{results['seconds']:8.4f}{results['images_per_second']:8.1f}{ratio:7.2f}"
    text += f"{results['tflops']:9.1f}{mfu:>7}{memory:>7}{results['first_step_seconds']:9.1f}  {results['losses']}"
    if "profile" in results:
        kinds = sorted(results["profile"]["by_kind"].items(), key=lambda item: -item[1])
        text += "\n    ms per step: " + ", ".join(f"{name} {value:.1f}" for name, value in kinds)
        for name, ms, count in results["profile"]["kernels"][:25]:
            text += f"\n    {ms:9.2f} ms {count:5} x {name[:110]}"
    return text


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="ROW", help="rows to run; none: all")
    parser.add_argument("--list", action="store_true", help="list the rows and exit")
    parser.add_argument("--steps", type=int, default=10, help="number of timed steps")
    parser.add_argument("--profile", nargs="*", default=[], metavar="ROW", help="rows to profile")
    parser.add_argument("--seconds", type=float, default=3600, help="time limit; unfinished rows are skipped")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--tiny", action="store_true", help="small versions for a CPU")
    parser.add_argument("--tuning", type=Path, help="tuned tiles, written by kernels.py")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := sorted({*args.names, *args.profile} - set(ROWS)):
        parser.error(f"unknown row {unknown[0]}; see --list")
    if args.list:
        print("\n".join(ROWS))
    elif args.child:
        run_here(args.names, args)
    else:
        table(args.names or list(ROWS), args)


def table(names: Sequence[str], args: argparse.Namespace) -> None:
    """Print results as they arrive; the output file is complete after each."""
    device = device_name()
    print(f"{device}, torch {torch.__version__}\n{COLUMNS}", flush=True)
    rows: dict[str, Any] = {}
    base: float | None = None
    for results in run_all(names, args):
        base = base or results.get("images_per_second")
        rows[results["name"]] = {**asdict(ROWS[results["name"]]), **results}
        print(line(results, base), flush=True)
        if args.out is not None:
            about = {"device": device, "torch": torch.__version__, "rows": rows}
            write_json(args.out, about)


if __name__ == "__main__":
    main()
