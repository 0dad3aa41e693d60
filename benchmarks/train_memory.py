"""Compares the GPU memory of training with the estimate of `sd3-light check`, and measures the speed of steps.

    python benchmarks/train_memory.py [NAME ...] [--list] [--steps 3] [--out memory.json] [--tiny]

Runs some steps of the training module and the torch engine, with EMA, on random batches that are already on the device;
no cache, data or model folder is needed. All runs share one process and release their memory.

`allocated` and `reserved` are the peaks of torch's counters; `process` is all used GPU memory, CUDA context included,
so no other process may use the GPU. `predicted` is the total of `cost/gpu_memory.py`; `ratio` is predicted / process,
and `torch` is the same without the context, relative to `allocated`. `--tiny` runs small versions, also on a CPU.
"""

import argparse
import gc
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common.basics import best_device, device_name, parser_of, synchronize, write_json
from diffusers import SD3Transformer2DModel
from torch import Tensor

from sd3_light.config import SIZES, ModelSize, TrainConfig
from sd3_light.core.batch import Batch
from sd3_light.core.compiling import compile_blocks
from sd3_light.core.cost import Tokens
from sd3_light.cost.amount import GIB
from sd3_light.cost.device_peaks import peak_flops
from sd3_light.cost.gpu_memory import gpu_memory
from sd3_light.cost.training_flops import step_flops
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.engines import Launch
from sd3_light.engines.torch import TorchEngine
from sd3_light.families.sd3.cost import SD3Cost, image_tokens
from sd3_light.families.sd3.module import SD3TrainingModule
from sd3_light.optim.ema import Averages

PADDED = 77 + 256
REAL = (20, 120)
"""Minimum and maximum text tokens per sample with real tokens, CLIP and T5 together."""


@dataclass(frozen=True)
class Setup:
    """One run."""

    size: str
    batch: int
    pixels: int = 256
    text: int = PADDED
    compiled: bool = False
    checkpointing: bool = False
    tracks: int = 1
    accumulation: int = 1
    optimizer: str = "adamw"
    real: bool = False


# fmt: off
SETUPS = {
    "demo":                   Setup("demo", 512, pixels=64, text=32),
    "light-64":               Setup("sd3_light", 64),
    "light-64-compiled":      Setup("sd3_light", 64, compiled=True),
    "light-128-ckpt":         Setup("sd3_light", 128, checkpointing=True),
    "light-128-ckpt-compiled": Setup("sd3_light", 128, checkpointing=True, compiled=True),
    "square-128":             Setup("sd3_light_square", 128),
    "medium-16-ckpt":         Setup("sd3.5_medium", 16, pixels=512, checkpointing=True),
    "light-16-ema0":          Setup("sd3_light", 16, tracks=0),
    "light-16-ema3":          Setup("sd3_light", 16, tracks=3),
    "light-16-accum4":        Setup("sd3_light", 16, accumulation=4),
    "light-16-ckpt-accum4":   Setup("sd3_light", 16, checkpointing=True, accumulation=4),
    "light-64-real":          Setup("sd3_light", 64, text=REAL[1], real=True),
    "light-16-muon":          Setup("sd3_light", 16, optimizer="muon"),
}
# fmt: on


def tiny(setup: Setup) -> Setup:
    """Return a small version of a run for a CPU."""
    text = min(setup.text, 24)
    return replace(setup, size="tiny2", batch=min(setup.batch, 4), pixels=64, text=text, compiled=False)


def config_of(setup: Setup) -> TrainConfig:
    """Return the config of a run; its paths are never read."""
    tracks = [{"name": f"track{number}", "decay": 0.99} for number in range(1, setup.tracks)]
    table = {
        "output_dir": "run",
        "dataset": "data.toml",
        "max_steps": 1,
        "micro_batch_size_per_gpu": setup.batch,
        "gradient_accumulation_steps": setup.accumulation,
        "activation_checkpointing": setup.checkpointing,
        "compile": setup.compiled,
        "model": {
            "train_type": "sd3_light_pretrain",
            "diffusers_path": "model",
            "size": setup.size,
            "text_tokens": "real" if setup.real else "padded",
        },
        "optimizer": {"type": setup.optimizer},
        "ema": {"enable": setup.tracks > 0, "update_every": 1, "track": tracks},
    }
    return TrainConfig.model_validate(table, context={"base": Path.cwd()})


def setup_of(setup: Setup) -> TrainingSetup:
    """Return the setup for the memory estimate, as in `check`."""
    return TrainingSetup(
        SD3Cost(SIZES[setup.size]),
        Tokens(image_tokens(setup.pixels, setup.pixels), setup.text),
        setup.batch,
        ema_tracks=setup.tracks,
        checkpointing=setup.checkpointing,
        compiled=setup.compiled,
        accumulation=setup.accumulation,
        optimizer=setup.optimizer,
    )


def random_batch(setup: Setup, device: torch.device) -> Batch:
    """Return a prepared micro-batch."""
    size, side = SIZES[setup.size], setup.pixels // 8
    latent = (setup.batch, size.latent_channels, side, side)
    noisy, target = (torch.randn(latent, device=device) for _ in range(2))
    prompt = torch.randn(setup.batch, setup.text, size.text_width, device=device, dtype=torch.bfloat16)
    pooled = torch.randn(setup.batch, size.pooled_width, device=device, dtype=torch.bfloat16)
    values = {"noisy": noisy, "t": torch.rand(setup.batch, device=device), "prompt": prompt, "pooled": pooled}
    host = {"prompt.length": lengths_of(setup)} if setup.real else {}
    return Batch(setup.batch, {**values, "target": target}, host)


def lengths_of(setup: Setup) -> Tensor:
    """Return the text tokens of each sample; with real tokens one sample has the maximum."""
    if not setup.real:
        return torch.full((setup.batch,), setup.text)
    generator = torch.Generator().manual_seed(0)  # the same lengths in every call
    lengths = torch.randint(min(REAL[0], setup.text), setup.text + 1, (setup.batch,), generator=generator)
    lengths[0] = setup.text
    return lengths


# --- one run ---------------------------------------------------------------------------------------


def build(setup: Setup, device: torch.device) -> tuple[TorchEngine, Averages]:
    """Build the engine and averages of the training stage. Weights are drawn on the device, which is fast."""
    config = config_of(setup)
    with torch.device(device):
        transformer = SD3Transformer2DModel(**SIZES[setup.size].transformer_config())
    if setup.compiled:
        compile_blocks(transformer)
    engine = TorchEngine(SD3TrainingModule(transformer, config), config, Launch(), device)
    return engine, Averages(engine.weights, config.ema)


def run(setup: Setup, device: torch.device, steps: int) -> dict[str, float]:
    """Return the seconds per step and, on a GPU, the peak memory. The first step, which compiles, is not timed."""
    engine, averages = build(setup, device)
    batches = [random_batch(setup, device) for _ in range(setup.accumulation)]
    started = first = time.perf_counter()
    for step in range(1, steps + 1):
        engine.train_step(batches, 1e-4)
        averages.update(engine.weights, step)
        synchronize()
        if step == 1:
            started = time.perf_counter()
    seconds = (time.perf_counter() - started) / (steps - 1)
    return {"first_step_seconds": started - first, "seconds": seconds, **measured(device)}


def measured(device: torch.device) -> dict[str, float]:
    """Return memory in bytes; empty on a CPU. torch keeps reserved memory, so the total of the process is its peak."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "process": total - free,
    }


def release_memory(device: torch.device) -> None:
    """Free the memory of the last run."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure(setup: Setup, device: torch.device, steps: int) -> dict[str, Any]:
    """Measure one run and compare it with its estimate; out-of-memory is recorded as an error."""
    case = setup_of(setup)
    predicted = gpu_memory(case)
    row: dict[str, Any] = {
        **asdict(setup),
        "predicted": predicted.total,
        "predicted_torch": predicted.total - predicted.context.value,
        "moment": predicted.moment,
        "formula": {"state": predicted.state.formula, "step": predicted.step.formula},
    }
    try:
        row |= run(setup, device, steps)
    except torch.OutOfMemoryError as error:
        row["error"] = str(error).split(".")[0]
    else:
        row |= speed(setup, SIZES[setup.size], case.tokens.image, row["seconds"], device)
    if "process" in row:
        row |= {"ratio": row["predicted"] / row["process"], "ratio_torch": row["predicted_torch"] / row["allocated"]}
    return row


def speed(setup: Setup, size: ModelSize, image: int, seconds: float, device: torch.device) -> dict[str, float]:
    """Return images per second, and the share of the device's peak if known."""
    lengths = lengths_of(setup).tolist()
    rate = setup.accumulation * step_flops(SD3Cost(size), Counter(Tokens(image, text) for text in lengths)) / seconds
    results = {"images_per_second": setup.accumulation * setup.batch / seconds, "tflops": rate / 1e12}
    peak = peak_flops(device_name(), "bfloat16")
    return results if peak is None else {**results, "mfu": rate / peak}


# --- table -------------------------------------------------------------------------------------

_COLUMNS = (
    f"{'':26}{'predicted':>10}{'allocated':>10}{'reserved':>9}{'process':>9}{'ratio':>7}{'torch':>8}"
    f"{'s/step':>8}{'img/s':>9}{'MFU':>7}{'first s':>9}"
)


def line(name: str, row: dict[str, Any]) -> str:
    """Format a run as a line of the table, with sizes in GiB."""
    sizes = [f"{row[key] / GIB:.2f}" if key in row else "" for key in ("predicted", "allocated", "reserved", "process")]
    text = f"{name:26}{sizes[0]:>10}{sizes[1]:>10}{sizes[2]:>9}{sizes[3]:>9}"
    if "error" in row:
        return f"{text}  {row['error']}"
    ratios = [f"{row[key]:.3f}" if key in row else "" for key in ("ratio", "ratio_torch")]
    mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
    text += f"{ratios[0]:>7}{ratios[1]:>8}{row['seconds']:8.3f}{row['images_per_second']:9.1f}{mfu:>7}"
    return f"{text}{row['first_step_seconds']:9.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs to measure; default: all")
    parser.add_argument("--list", action="store_true", help="list the runs and exit")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    if args.list:
        print("\n".join(SETUPS))
        return
    if unknown := sorted(set(args.names) - set(SETUPS)):
        parser.error(f"unknown run {unknown[0]}; see --list")
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step is not timed")
    device = best_device()
    measure_all({name: SETUPS[name] for name in args.names or SETUPS}, device, args)


def measure_all(setups: dict[str, Setup], device: torch.device, args: argparse.Namespace) -> None:
    """Measure all runs; the output file is written after each."""
    name = device_name()
    print(f"{name}, torch {torch.__version__}; sizes in GiB\n{_COLUMNS}", flush=True)
    rows: dict[str, Any] = {}
    for key, setup in setups.items():
        release_memory(device)
        rows[key] = measure(tiny(setup) if args.tiny else setup, device, args.steps)
        print(line(key, rows[key]), flush=True)
        if args.out is not None:
            about = {"device": name, "torch": torch.__version__, "runs": rows}
            write_json(args.out, about)


if __name__ == "__main__":
    main()
