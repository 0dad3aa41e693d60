"""Speed of the training step on batches that are already on the GPU, compared with a plain loop over the stock model.

    python benchmarks/step.py [ROW ...] [--list] [--steps 10] [--profile ROW ...] [--out step.json] [--tiny]
    python benchmarks/step.py --tune TILES.json [--batch 128]

One line per row: seconds per step, images per second, their ratio to the first row that ran (`plain-64` by default),
model FLOPs per second as a share of the GPU's peak (MFU; padding of real text and recomputation do not count), peak
memory, and seconds until the end of the first step (building, compiling). If a row fails, its line contains the error
and the next row runs. `--profile` adds the GPU time by kind of kernel. README.md in this folder explains the columns.

`--tune` asks which tiles make our kernels fast on this GPU; those of the package were chosen on an H200 at width 1536.
It times every kernel on the image rows of a full-size batch with several tiles, prints milliseconds and bytes per
second, and writes the fastest for `--tuning`. Whether the kernels are right on a GPU is checked by every run that uses
them, and by `tests/gpu/test_fast.py`.
"""

import argparse
import gc
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.basics import best_device, device_name, parser_of, synchronize, write_json
from common.models import t5_lengths
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from sd3_light.config import SIZES, ModelSize
from sd3_light.core.compiling import compile_blocks
from sd3_light.core.cost import Tokens
from sd3_light.cost.amount import GIB
from sd3_light.cost.device_peaks import peak_flops
from sd3_light.cost.training_flops import step_flops
from sd3_light.families.sd3.cost import SD3Cost, image_tokens
from sd3_light.families.sd3.fast.block import BlockOptions
from sd3_light.families.sd3.fast.forward import FastDenoiser
from sd3_light.families.sd3.fast.fp8 import E4M3, Fp8Rows, Fp8Weight
from sd3_light.families.sd3.fast.operations import operations
from sd3_light.families.sd3.fast.row_layout import RowLayout, make_layout
from sd3_light.families.sd3.fast.self_check import KernelShape, check_kernels
from sd3_light.families.sd3.layers import unpatchify
from sd3_light.flow.objective import flow_loss

NUM_BATCHES = 4
"""Number of batches that steps cycle through, so that lengths and buckets change from step to step."""
CLIP_TOKENS = 77
T5_TOKENS = 256
SQUARE = ((256, 256),)
# of the tiles: width and heads of the size sd3_light, and its tokens per sample
WIDTH = 1536
HEADS = 24
NUM_IMAGE = 256
NUM_TEXT = 333
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
MOVES = {
    "norm": 4, "norm_backward": 6, "gelu_backward": 12, "join": 6 * (1 + NUM_TEXT / NUM_IMAGE), "join_backward": 8,
    "copy": 2, "norm_fp8": 4.5, "norm_backward_fp8": 6.5, "gelu_fp8": 10, "join_backward_fp8": 9.5, "copy_fp8": 2.5,
    "round_rows": 1.5, "weight": 0,
}  # fmt: skip
"""Tensors of bf16, as large as the rows, that a kernel reads and writes."""
RESTART = 75  # exit code of a child that needs a new process for the remaining rows
LARGE = ((512, 512),)
BUCKETS = ((256, 256), (320, 192), (192, 320), (288, 224))


@dataclass(frozen=True)
class Row:
    """Settings of one line. ``step`` is the kind of step; ``sides`` are image sizes, one bucket per batch."""

    step: str
    batch: int
    text: str = "padded"
    sides: tuple[tuple[int, int], ...] = SQUARE
    optimizer: str = "folded"
    size: str = "sd3_light"
    qk_norm: bool = True
    options: BlockOptions = field(default_factory=BlockOptions)
    batches: int = NUM_BATCHES
    steps: int | None = None


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


# --- batches -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """A prepared micro-batch on the device, with its real text lengths on the host."""

    features: tuple[Tensor, ...]
    target: Tensor
    lengths: list[int] | None

    def text_tokens(self) -> list[int]:
        """Return the text tokens of each sample."""
        return self.lengths or [self.features[2].shape[1]] * len(self.target)


def real_lengths(count: int, rng: np.random.Generator) -> list[int]:
    """Draw text tokens of typical captions: those of T5, and as many of CLIP, at most 77. No text is dropped."""
    t5 = t5_lengths(count, T5_TOKENS, rng)
    return (t5 + np.minimum(t5, CLIP_TOKENS)).tolist()  # type: ignore[no-any-return]


def batches(row: Row, size: ModelSize, device: torch.device) -> list[Batch]:
    """Return random batches of the right shapes."""
    rng, made = np.random.default_rng(0), []
    for number in range(row.batches):
        width, height = row.sides[number % len(row.sides)]
        latent = (row.batch, size.latent_channels, height // 8, width // 8)
        lengths = real_lengths(row.batch, rng) if row.text == "real" else None
        longest = CLIP_TOKENS + T5_TOKENS if lengths is None else max(lengths)
        prompt = torch.randn(row.batch, longest, size.text_width, device=device, dtype=torch.bfloat16)
        pooled = torch.randn(row.batch, size.pooled_width, device=device, dtype=torch.bfloat16)
        noisy, target = (torch.randn(latent, device=device) for _ in range(2))
        made.append(Batch((noisy, 1000 * torch.rand(row.batch, device=device), prompt, pooled), target, lengths))
    return made


def flops(row: Row, size: ModelSize, batch: Batch) -> int:
    """Return the FLOPs of a step on this batch."""
    height, width = batch.target.shape[-2:]
    tokens = (Tokens(image_tokens(8 * width, 8 * height), text) for text in batch.text_tokens())
    return step_flops(SD3Cost(size), Counter(tokens))


# --- steps -------------------------------------------------------------------------------------

Step = Callable[[Batch], Tensor]


def autocast(device: torch.device) -> Any:
    """Return a bf16 autocast context on GPUs."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def plain_step(row: Row, model: SD3Transformer2DModel, device: torch.device) -> Step:
    """The straightforward loop: stock model, autocast, mean squared error, clipping, AdamW."""
    if row.options.keep == "inputs":
        model.train()
        model.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    def step(batch: Batch) -> Tensor:
        noisy, times, prompt, pooled = batch.features
        if device.type == "cpu":
            prompt, pooled = prompt.float(), pooled.float()
        with autocast(device):
            velocity = model(
                hidden_states=noisy, timestep=times, encoder_hidden_states=prompt, pooled_projections=pooled
            ).sample
            loss = nn.functional.mse_loss(velocity.float(), batch.target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_optimizer(model: SD3Transformer2DModel, kind: str) -> Callable[[], None]:
    """Return a function that clips by the global norm and steps. ``folded``: the AdamW kernel scales the gradients."""
    parameters = list(model.parameters())
    options = {"lr": 1e-4, "weight_decay": 0.01, "fused": True, "capturable": parameters[0].is_cuda}
    optimizer: Any = torch.optim.AdamW(parameters, **options)

    def step() -> None:
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        assert len(grads) == len(parameters)
        norm = torch.stack(torch._foreach_norm(grads)).square().sum().sqrt()
        optimizer.found_inf = (~torch.isfinite(norm)).float()
        if kind == "folded":
            optimizer.grad_scale = torch.clamp(norm + 1e-6, min=1.0)
        else:
            torch._foreach_mul_(grads, torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def compiled_step(row: Row, model: SD3Transformer2DModel, device: torch.device) -> Step:
    """A step of the stock model with compiled blocks."""
    compile_blocks(model)
    update = make_optimizer(model, row.optimizer)

    def step(batch: Batch) -> Tensor:
        noisy, times, prompt, pooled = batch.features
        with autocast(device):
            velocity = model(noisy, prompt.float(), pooled.float(), times, return_dict=False)[0]
        loss = flow_loss(velocity, batch.target).mean()
        loss.backward()
        update()
        return loss.detach()

    return step


def fast_step(row: Row, model: SD3Transformer2DModel, device: torch.device) -> Step:
    """A step with the fast blocks."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    denoiser = FastDenoiser(model, dtype, row.options)
    update = make_optimizer(model, row.optimizer)

    def step(batch: Batch) -> Tensor:
        features = tuple(feature.to(dtype) if index == 2 else feature for index, feature in enumerate(batch.features))
        patches = denoiser(features, batch.lengths)
        loss = flow_loss(unpatchify(patches, *batch.target.shape[-2:]), batch.target).mean()
        loss.backward()
        update()
        return loss.detach()

    return step


def make_step(row: Row, size: ModelSize, device: torch.device) -> Step:
    """Build the model on the device and return its step."""
    with torch.device(device):
        model = SD3Transformer2DModel(**size.transformer_config())
    if row.step == "plain":
        return plain_step(row, model, device)
    make = compiled_step if row.step == "compiled" else fast_step
    return make(row, model, device)


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
    """Apply the tiles that `--tune` has found."""
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


# --- tiles -------------------------------------------------------------------------------------


def call_of(kernel: str, layout: RowLayout) -> tuple[str, tuple[Any, ...]]:
    """Return the operation that uses a kernel, and its arguments."""
    rows = layout.image
    device = rows.sample_index.device
    form = "both" if kernel.endswith("fp8") else "plain"

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    def x(times: int = 1) -> Tensor:
        return normal(rows.count, times * WIDTH)

    shift, scale, gate = normal(rows.samples, 5 * WIDTH).chunk(5, dim=1)[:3]
    pending = (x(), torch.randn(WIDTH, device=device), gate)
    norms = (torch.rand(WIDTH // HEADS, device=device) + 0.5, torch.rand(WIDTH // HEADS, device=device))
    joined = tuple(normal(layout.capacity, HEADS, WIDTH // HEADS) for _ in range(3))
    match kernel.removesuffix("_fp8"):
        case "norm":
            return "residual_norm", (x(), pending, scale, shift, rows, form)
        case "norm_backward":
            return "residual_norm_backward", (x(), x(), x(), pending, scale, rows, None, form)
        case "gelu":
            return "gelu", (x(4), form)
        case "gelu_backward":
            return "gelu_backward", (x(4), x(4), False, form)
        case "join":
            streams = (x(3), normal(layout.text.count, 3 * WIDTH))
            return "join", (streams, (norms, norms), HEADS, layout)
        case "join_backward":
            return "join_backward", (joined, x(3), norms, HEADS, rows, form)
        case "copy":
            return "gather_rows", (joined[0].flatten(1), rows, form)
        case "round_rows":
            return "round_rows", (x(),)
        case _:
            weights = [torch.randn(WIDTH, WIDTH, device=device) for _ in range(3)]
            return "round_weight", (weights, empty_weight(3 * WIDTH, WIDTH, device))


def empty_weight(outputs: int, inputs: int, device: torch.device) -> Fp8Weight:
    """Return empty storage for a rounded weight."""

    def empty_rows(count: int, width: int) -> Fp8Rows:
        return Fp8Rows(torch.zeros(count, width, device=device).to(E4M3), torch.zeros(count, 1, device=device))

    return Fp8Weight(empty_rows(outputs, inputs), empty_rows(inputs, outputs))


def tune(batch: int) -> dict[str, Any]:
    """Return the fastest tile of each kernel, and print all times."""
    import triton

    from sd3_light.families.sd3.fast import kernels

    layout = make_layout(batch, NUM_IMAGE, NUM_TEXT, None, torch.device("cuda"))
    best: dict[str, Any] = {}
    for kernel, choices in CANDIDATES.items():
        operation, arguments = call_of(kernel, layout)
        function = getattr(kernels, operation)
        times = []
        for values in itertools.product(*choices.values()):
            tile = dict(zip(choices, values, strict=True))
            kernels.TUNING[kernel] = tile
            try:
                timed = triton.testing.do_bench(
                    lambda run=function, words=arguments: run(*words), warmup=15, rep=60, return_mode="median"
                )
            except Exception as error:  # a tile that is too large for the device is a result
                print(f"{kernel} {tile}: {type(error).__name__} {str(error)[:200]}", flush=True)
                continue
            times.append((float(timed), tile))
        if times:
            times.sort(key=lambda entry: entry[0])
            milliseconds, best[kernel] = times[0]
            kernels.TUNING[kernel] = best[kernel]
            rate = MOVES[kernel] * layout.image.count * WIDTH * 2 / milliseconds / 1e9
            others = ", ".join(f"{ms:.3f} {'/'.join(map(str, tile.values()))}" for ms, tile in times)
            print(f"{kernel:18} {milliseconds:.3f} ms, {rate:.2f} TB/s: {best[kernel]}; all: {others}", flush=True)
    return best


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
    parser.add_argument("--tuning", type=Path, help="tuned tiles, written by --tune")
    parser.add_argument("--tune", type=Path, metavar="FILE", help="only time the kernels, and write the fastest tiles")
    parser.add_argument("--batch", type=int, default=128, help="of --tune")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := sorted({*args.names, *args.profile} - set(ROWS)):
        parser.error(f"unknown row {unknown[0]}; see --list")
    if args.list:
        print("\n".join(ROWS))
    elif args.tune:
        if not torch.cuda.is_available():
            parser.error("--tune needs a GPU")
        write_json(args.tune, tune(args.batch))
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
