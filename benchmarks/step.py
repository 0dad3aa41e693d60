"""The training step alone, on batches that are on the GPU already: ours beside the plainest loop over the stock model.

    python benchmarks/step.py [ROW ...] [--list] [--steps 10] [--profile ROW ...] [--out step.json] [--tiny]

One line a row: seconds a step, images a second, their ratio to the first row that ran (`plain-64` unless others are
named), model FLOPs of a second as a share of the GPU's peak (MFU; padding of real text and what is computed twice do
not count), peak memory, and seconds until the first step was done (building, compiling). A row that fails says so in
its line and the next one runs. `--profile` adds where the GPU's time goes, by kind of kernel. README.md beside this
file says how to read it.
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
from pathlib import Path
from typing import Any

import torch
from step_loops import Batch, Row, Step, batches, flops, make_step

from sd3_light.budget.device_peaks import peak_flops
from sd3_light.config import SIZES
from sd3_light.model.fast.block import BlockOptions

GIB = 1 << 30
ANEW = 75  # exit status of a child that must be followed by another
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
        "fast-128-flash": replace(ours, how=BlockOptions("flash")),
        "fast-128-real": replace(ours, text="real"),
        "fast-256-real": replace(ours, batch=256, text="real"),
        "fast-128-bf16-gradients": replace(ours, how=BlockOptions(float32_gradients=False)),
        "fast-128-clip-apart": replace(ours, optimizer="fused"),
        "fast-128-buckets": replace(ours, sides=BUCKETS),
        "fast-128-real-buckets": replace(ours, sides=BUCKETS, text="real"),
        "fast-32-512px": replace(ours, batch=32, sides=LARGE),
        "fast-56-512px": replace(ours, batch=56, sides=LARGE),  # as many tokens as 128 pictures of 256 px
        "fast-64-512px-real": replace(ours, batch=64, sides=LARGE, text="real"),
        "plain-32-512px": replace(plain, batch=32, sides=LARGE),
        "fast-64-graph": replace(ours, step="graph", batch=64),
        "fast-128-graph": replace(ours, step="graph"),
        "fast-128-in-backward": replace(ours, optimizer="in backward"),
        # less is kept for the backward pass
        "fast-128-selective": replace(ours, how=BlockOptions(keep="products")),
        "fast-128-again": replace(ours, how=BlockOptions(keep="inputs")),
        "fast-256-selective": replace(ours, batch=256, how=BlockOptions(keep="products")),
        "fast-512-again": replace(ours, batch=512, how=BlockOptions(keep="inputs")),
        # products of rows with weights in 8 bits
        "fast-64-fp8": replace(ours, batch=64, how=BlockOptions(products="fp8")),
        "fast-128-fp8": replace(ours, how=BlockOptions(products="fp8")),
        "fast-128-fp8-exact-sums": replace(ours, how=BlockOptions(products="fp8", fast_sums=False)),
        "fast-128-fp8-selective": replace(ours, how=BlockOptions(keep="products", products="fp8")),
        "fast-256-real-fp8": replace(ours, batch=256, text="real", how=BlockOptions(products="fp8")),
        # about the largest micro-batches that 139 GiB hold
        "plain-112-most": replace(plain, batch=112, **most),
        "plain-120-most": replace(plain, batch=120, **most),
        "plain-960-again-most": replace(plain, batch=960, how=BlockOptions(keep="inputs"), **most),
        "fast-208-most": replace(ours, batch=208, **most),
        "fast-336-selective-most": replace(ours, batch=336, how=BlockOptions(keep="products"), **most),
        "fast-1024-again-most": replace(ours, batch=1024, how=BlockOptions(keep="inputs"), **most),
    }


ROWS = _rows()


def tiny(row: Row) -> Row:
    """A stand-in that a CPU can run."""
    sides = tuple((width // 64 * 16, height // 64 * 16) for width, height in row.sides)
    how, step = replace(row.how, attention=None), "fast" if row.step == "graph" else row.step
    return replace(row, step=step, size="tiny2", batch=4, sides=sides, how=how)


# --- one row -----------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(row: Row, steps: int, profiled: bool, device: torch.device) -> dict[str, Any]:
    """All numbers of a row."""
    size = SIZES[row.size].with_overrides(qk_norm=row.qk_norm)
    begun = time.perf_counter()
    torch.manual_seed(0)
    data, step = batches(row, size, device), make_step(row, size, device)
    losses = [step(data[0])]
    synchronize(device)
    first = time.perf_counter() - begun
    losses += [step(batch) for batch in data]  # every shape once
    synchronize(device)
    steps, begun = row.steps or steps, time.perf_counter()
    losses += [step(data[number % len(data)]) for number in range(steps)]
    synchronize(device)
    seconds = (time.perf_counter() - begun) / steps
    work = sum(flops(row, size, data[number % len(data)]) for number in range(steps)) / steps / seconds
    found: dict[str, Any] = {"seconds": seconds, "images_per_second": row.batch / seconds, "first_step_seconds": first}
    found |= {"tflops": work / 1e12, "losses": [round(float(loss), 4) for loss in losses[:6]]}
    if device.type == "cuda":
        found["memory_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        peak = peak_flops(torch.cuda.get_device_name(device), "bfloat16")
        found |= {"mfu": work / peak} if peak is not None else {}
        found |= {"profile": profile(step, data, device)} if profiled else {}
    return found


KINDS = (
    ("elementwise", r"^triton_(poi|per|red)_"),  # the compiler names its kernels after all that they replace
    ("attention", r"flash|fmha|sdpa|attention"),
    ("products", r"gemm|nvjet|cutlass|cublas|splitk|xmma|gemv"),
    ("optimizer", r"multi_tensor|adam|foreach|lpnorm"),
    ("copies", r"memcpy|memset|copy|catarray|index|fill"),
)


def kind_of(kernel: str) -> str:
    """Which kind of work a kernel does, by its name; what is none of the others is elementwise or a sum."""
    lower = kernel.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, lower)), "elementwise")


def profile(step: Step, data: Sequence[Batch], device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, and the kernels that take most."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        for batch in data[:2]:
            step(batch)
        synchronize(device)
    kernels = [(event.key, event.self_device_time_total / 2e3, event.count // 2) for event in found.key_averages()]
    by_kind: dict[str, float] = {}
    for name, milliseconds, _ in kernels:
        by_kind[kind_of(name)] = by_kind.get(kind_of(name), 0.0) + milliseconds
    kernels.sort(key=lambda kernel: -kernel[1])
    return {"by_kind": by_kind, "kernels": [(name[:160], round(ms, 3), count) for name, ms, count in kernels[:60]]}


def prepare_kernels(tuning: Path | None, device: torch.device) -> list[str]:
    """Tiles as they were found best; names the kernels that are wrong on this device."""
    import step_parts

    from sd3_light.model.fast import kernels

    if tuning is not None and tuning.is_file():
        kernels.TUNING.update({k: v for k, v in json.loads(tuning.read_text(encoding="utf-8")).items() if k != "error"})
    return sorted(step_parts.broken_kernels(device))


def run_here(names: Sequence[str], args: argparse.Namespace) -> None:
    """Rows in this process, each result appended to ``args.child``; one that fails leaves the next a clean device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    broken = prepare_kernels(args.tuning, device) if device.type == "cuda" else []
    for name in names:
        row = tiny(ROWS[name]) if args.tiny else ROWS[name]
        try:
            assert not broken or row.step not in ("fast", "graph"), (
                f"kernels that differ from their references here: {broken}"
            )
            found = measure(row, args.steps, name in args.profile, device)
        except Exception as error:  # a row is an experiment: whatever it throws is its result
            found = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        with open(args.child, "a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **found}) + "\n")
        if "CUDA error" in found.get("error", "") or row.optimizer == "in backward":
            sys.exit(ANEW)  # nothing can be asked of the device any more, or hooks hold on to the model
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


# --- all rows ----------------------------------------------------------------------------------


def run_all(names: Sequence[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Results as they come, from a child process; when it dies, the row in its hands failed and a new one goes on."""
    left, begun = list(names), time.monotonic()
    while left:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            path.touch()
            options = ["--child", str(path), "--steps", str(args.steps), *(["--tiny"] if args.tiny else [])]
            options += ["--tuning", str(args.tuning)] if args.tuning else []
            command = [sys.executable, __file__, *left, *options, "--profile", *args.profile]
            child, done = subprocess.Popen(command), 0
            while left:
                ended = child.poll() is not None
                for line in path.read_text(encoding="utf-8").splitlines()[done:]:
                    done += 1
                    left.pop(0)
                    yield json.loads(line)
                if ended or time.monotonic() - begun > args.seconds:
                    break
                time.sleep(0.2)
            if left and time.monotonic() - begun > args.seconds:
                child.kill()
                yield from ({"name": name, "error": "no time was left"} for name in left)
                return
            if child.wait() != ANEW and left:
                yield {"name": left.pop(0), "error": f"the process ended with {child.wait()}"}


COLUMNS = f"{'':26}{'s/step':>8}{'img/s':>8}{'ratio':>7}{'TFLOP/s':>9}{'MFU':>7}{'GiB':>7}{'first s':>9}  losses"


def line(found: dict[str, Any], base: float | None) -> str:
    """A row of the table, with the kinds of kernels below where they were measured."""
    if "error" in found:
        return f"{found['name']:26}  {found['error']}"
    ratio = found["images_per_second"] / base if base else 1.0
    mfu = f"{found['mfu']:.1%}" if "mfu" in found else ""
    memory = f"{found['memory_gib']:.1f}" if "memory_gib" in found else ""
    text = f"{found['name']:26}{found['seconds']:8.4f}{found['images_per_second']:8.1f}{ratio:7.2f}"
    text += f"{found['tflops']:9.1f}{mfu:>7}{memory:>7}{found['first_step_seconds']:9.1f}  {found['losses']}"
    if "profile" in found:
        kinds = sorted(found["profile"]["by_kind"].items(), key=lambda item: -item[1])
        text += "\n    ms a step: " + ", ".join(f"{name} {value:.1f}" for name, value in kinds)
        for name, ms, count in found["profile"]["kernels"][:25]:
            text += f"\n    {ms:9.2f} ms {count:5} x {name[:110]}"
    return text


def main() -> None:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ROW", help="rows to run; none: all")
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--profile", nargs="*", default=[], metavar="ROW", help="rows to profile as well")
    parser.add_argument("--seconds", type=float, default=3600, help="rows that have not ended by then are left out")
    parser.add_argument("--out", type=Path, help="JSON file for all numbers")
    parser.add_argument("--tiny", action="store_true", help="small stand-ins, for a CPU")
    parser.add_argument("--tuning", type=Path, help="tiles of the kernels, as step_parts.py found them best")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := sorted({*args.names, *args.profile} - set(ROWS)):
        parser.error(f"no row is named {unknown[0]}; see --list")
    if args.list:
        print("\n".join(ROWS))
    elif args.child:
        run_here(args.names, args)
    else:
        table(args.names or list(ROWS), args)


def table(names: Sequence[str], args: argparse.Namespace) -> None:
    """Print as results come; the file is whole after each."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{device}, torch {torch.__version__}\n{COLUMNS}", flush=True)
    rows: dict[str, Any] = {}
    base: float | None = None
    for found in run_all(names, args):
        base = base or found.get("images_per_second")
        rows[found["name"]] = {**asdict(ROWS[found["name"]]), **found}
        print(line(found, base), flush=True)
        if args.out is not None:
            about = {"device": device, "torch": torch.__version__, "rows": rows}
            args.out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
