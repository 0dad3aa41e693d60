"""Speed of the training stage on a synthetic cache with real shapes; encoders and images are not needed.

    python benchmarks/train_run.py --regimes [padded real ...] --out FOLDER [any option below]
    python benchmarks/train_run.py --regime padded|real|fp8|small128|base|icons [any option below]
    python benchmarks/train_run.py [--size sd3_light] [--layers 12] [--heads 8] [--pixels 256] [--captions 1]
                                   [--batch 64] [--steps 60] [--text padded|real] [--max-tokens 16] [--ema-every 100]
                                   [--fast true|false|auto] [--fp8] [--compile] [--checkpointing true|false|selective]
                                   [--cuda-graphs true|false|auto] [--profile FILE]
                                   [--workers 8] [--residence auto|stream|host|device] [--engine torch|deepspeed]
                                   [--out FOLDER] [--feed-only] [--start-only]

Writes a cache of random numbers (256 px and SD3's text widths for the large sizes, those of the demo for the small
ones), a model folder with only configs and a train TOML, then runs the training stage: loader, engine, EMA, log, and a
checkpoint at the end (or every `--checkpoint-every` steps; none with `--no-save`). The results come from the run's
log.jsonl; the first `--warm` steps (compiling, hashing shards, allocating memory) are excluded.

A regime sets the options of one row of the table in docs/evidence/speed.md; options on the command line override it.
`--regimes` runs several, all of them by default: they write their caches at the same time and train one after another.
Each leaves log, config, summary and output in FOLDER/REGIME; one with a summary is not run again. Prints a table.
After `--steps` the run repeats its last step `--alone` times on the same inputs: no loader, no copies, no noise.
`stage of step` in the results is the stage's speed relative to that. `host_seconds` says what the main process does
in a step.

With `--text real` the number of T5 tokens per caption is log-normal (median 22, sigma 0.5, mean 25, at least 5), with
the same number of CLIP tokens, at most 77. `--out` keeps log, config and summary; the rest is deleted. `--feed-only`
does not train: it measures how many samples per second the loader workers prepare for a GPU, which adds the noise, and
how many per second of CPU time, which is per core. `--start-only` measures the time from the start of a process to the
end of its first step, twice, so that files are in the page cache the second time.
`--profile` writes where the time of the last steps of the warm-up goes: launches, operations of the host, kernels.
"""

import argparse
import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common.basics import parser_of, write_json
from common.models import IMAGES, Shape, write_cache, write_model_folder
from common.profiling import measure_start, profiling, without_saves
from torch import Tensor

from sd3_light.config import SIZES, ModelSize, UserError, load_config
from sd3_light.config.optimizers import OPTIMIZERS
from sd3_light.core.cost import Tokens
from sd3_light.cost.amount import GIB
from sd3_light.cost.gpu_memory import gpu_memory
from sd3_light.cost.training_setup import TrainingSetup
from sd3_light.engines import Launch
from sd3_light.families.sd3.cost import SD3Cost, image_tokens
from sd3_light.runlog import read_log

REGIMES: dict[str, dict[str, Any]] = {
    "padded": {"size": "sd3_light", "text": "padded", "batch": 128, "samples": 1024},
    "real": {"size": "sd3_light", "text": "real", "batch": 256, "samples": 2048},
    "fp8": {"size": "sd3_light", "text": "real", "batch": 256, "samples": 2048, "fp8": True},
    "small128": {
        **{"size": "sd3_light_square", "layers": 12, "pixels": 128, "text": "real", "batch": 512, "samples": 7163},
        **{"captions": 2, "steps": 160, "warm": 60, "logging_steps": 20},
    },
    "base": {
        **{"size": "demo", "text": "padded", "batch": 1024, "samples": 32768, "ema_every": 1},
        **{"steps": 400, "warm": 100, "logging_steps": 20},
    },
    "icons": {
        **{"size": "demo", "layers": 8, "heads": 8, "pixels": 128, "text": "real", "max_tokens": 77},
        **{"batch": 1024, "samples": 32768, "ema_every": 1, "steps": 200, "warm": 100, "logging_steps": 20},
    },
}
"""Options by regime: the six runs in which the stage is compared with its step."""

HEAD = "| regime | step, samples/s | stage, samples/s | stage of step | GPU idle |\n|---|---:|---:|---:|---:|"
ABOUT = (
    *("regime", "engine", "size", "batch", "text", "compile", "fast", "cuda_graphs", "fp8", "workers", "residence"),
    "checkpointing",
)
"""Options that describe a run in its summary."""
_MEANS = ("samples_per_second", "seconds", "data_wait", "host_bound", "tflops_per_gpu", "mfu", "host_memory_gib")
_PEAKS = ("gpu_memory_gib", "gpu_reserved_gib")


# --- the files of a run --------------------------------------------------------------------------


def chosen_size(args: argparse.Namespace) -> ModelSize:
    """Return the size of the denoiser."""
    size = SIZES[args.size].with_overrides(args.layers, None)
    return size if args.heads is None else replace(size, num_heads=args.heads)


def train_toml(args: argparse.Namespace, shape: Shape) -> str:
    """Return the train TOML. It has no exports, since the model folder is incomplete."""
    booleans = {"true": "true", "false": "false"}
    names = ("checkpointing", "fast", "cuda_graphs")
    flags = {name: booleans.get(getattr(args, name), f'"{getattr(args, name)}"') for name in names}
    size = chosen_size(args)
    shaped = f"shape = {{num_layers = {size.num_layers}, num_heads = {size.num_heads}}}"
    sized = f'size = "{args.size}"' + ("" if args.layers is None else f"\nnum_layers = {args.layers}")
    return f"""
output_dir = "run"
dataset = "data.toml"
cache_dir = "cache"
max_steps = {args.steps + args.alone}
micro_batch_size_per_gpu = {args.batch}
gradient_accumulation_steps = {args.accumulation}
zero_stage = {args.zero_stage}
activation_checkpointing = {flags["checkpointing"]}
fast = {flags["fast"]}
compile = {str(args.compile).lower()}
cuda_graphs = {flags["cuda_graphs"]}
fp8 = {str(args.fp8).lower()}
warmup_steps = 1000
checkpoint_every_n_steps = {args.checkpoint_every or args.steps + args.alone}
keep_last_n_checkpoints = 1
logging_steps = {args.logging_steps}
num_dataloader_workers = {args.workers}
dataloader_prefetch_per_worker = 2
cache_residence = "{args.residence}"
[model]
train_type = "sd3_light_pretrain"
diffusers_path = "model"
{sized if args.heads is None else shaped}
t5_max_length = {shape.t5_tokens}
text_tokens = "{args.text}"
enable_uncond_text_dropout = true
uncond_text = "empty"
[optimizer]
type = "{args.optimizer}"
[ema]
enable = true
update_every = {args.ema_every}
"""


def prepare_folder(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Write all files of a run and return its description."""
    size, real = chosen_size(args), args.text == "real"
    shape = Shape.of(size, args.pixels, args.max_tokens)
    tokens = write_cache(folder / "cache", shape, args.samples, args.captions, real)
    write_model_folder(folder / "model", shape)
    (folder / IMAGES).mkdir()
    (folder / "train.toml").write_text(train_toml(args, shape), encoding="utf-8")
    data = f'resolutions = [{shape.pixels}]\n[[directory]]\npath = "{IMAGES}"\n'
    (folder / "data.toml").write_text(data, encoding="utf-8")
    case = TrainingSetup(
        SD3Cost(size),
        Tokens(image_tokens(shape.pixels, shape.pixels), shape.clip_tokens + shape.t5_tokens),
        args.batch,
        ema_tracks=1,
        checkpointing={"true": True, "false": False}.get(args.checkpointing, "selective"),  # type: ignore[arg-type]
        compiled=args.compile,
        fast=args.fast != "false" and not args.compile,
        accumulation=args.accumulation,
        optimizer=args.optimizer,
    )
    cache = sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())
    return {
        **{name: getattr(args, name) for name in ABOUT},
        "layers": size.num_layers,
        "heads": size.num_heads,
        **asdict(shape),
        "text_tokens": tokens,
        "cache_gb": cache / 1e9,
        "predicted_gib": gpu_memory(case).total / GIB,
    }


# --- one run -------------------------------------------------------------------------------------


def repeated(steps: Any, after: int) -> Any:
    """Return a source of the first ``after`` of ``steps``, and then of the last of them again and again."""

    def source(first: int) -> Iterator[Any]:
        with closing(steps(first)) as batches:
            yield from islice(batches, after - 1)
            step = [batch.map_tensors(Tensor.clone) for batch in next(batches)]
            while True:  # the workers wait: to end them would take a second of a measured record
                yield step

    return source


def train(folder: Path, engine: str, saves: bool, alone_after: int) -> None:
    """Run the training stage in a prepared folder."""
    from sd3_light.check import verb as check
    from sd3_light.train import verb as stage

    without_saves(checkpoints=saves)
    make_steps = stage.training_steps
    stage.training_steps = lambda *args: repeated(make_steps(*args), alone_after)
    loaded = load_config(folder / "train.toml")
    check.require(loaded)
    try:
        stage.run(loaded, Launch(), by_deepspeed=engine == "deepspeed")
    except UserError as error:  # the log up to here is still useful
        print(f"the run failed: {error}")


def feed(folder: Path, args: argparse.Namespace) -> str:
    """Return the speed of the loader without training; the first ``warm`` steps are excluded."""
    from sd3_light.data.loader import LoadTimes, PipelineDataLoader
    from sd3_light.data.prepare import CleanPreparer
    from sd3_light.data.stream import MicroBatches
    from sd3_light.encoding.vae import LatentScale
    from sd3_light.engines.feed import loader_options, make_order, open_cache
    from sd3_light.families.sd3.prepare import InputPreparer

    loaded, launch, times = load_config(folder / "train.toml"), Launch(), LoadTimes()
    config = loaded.train
    torch.set_num_threads(1)
    data = open_cache(loaded.dataset, config, launch)
    scale = LatentScale.of_folder(config.model.diffusers_path)
    preparer = CleanPreparer(InputPreparer(config.seed, config.model, scale, data.empty_text()))
    micro = config.gradient_accumulation_steps
    batches = MicroBatches(data, make_order(data, loaded, launch), 0, 1, micro)
    options = {"items": range(2**62), "times": times, **loader_options(config, preparer)}
    steps = PipelineDataLoader(batches, None, micro, preparer, **options).steps()
    for _ in range(args.warm):
        next(steps)
    started, before = time.perf_counter(), (times.read_cpu, times.prepare_cpu)
    for _ in range(args.steps):
        next(steps)
    took = time.perf_counter() - started
    read, prepare = times.read_cpu - before[0], times.prepare_cpu - before[1]
    steps.close()
    samples = args.steps * args.batch * args.accumulation
    return (
        f"{samples / took:.0f} samples/s prepared by {args.workers} workers, {args.text} text; "
        f"{samples / (read + prepare):.0f} samples/s per core (CPU time per sample: reading {1e6 * read / samples:.0f} "
        f"us, preparing {1e6 * prepare / samples:.0f} us)"
    )


def summary(log: Path, warm: int, started: float, last: int) -> dict[str, Any]:
    """Summarize the log from step ``warm`` to step ``last``; the two last records are then of the step alone."""
    events = list(read_log(log))
    steps = [event for event in events if event["event"] == "step"]
    measured = [event for event in steps if warm < event["step"] <= last] or steps[-1:]
    results: dict[str, Any] = {"records": len(measured)}
    # time until the model is built and until the first steps are done, without imports
    results |= {"seconds_to_start": next(e["time"] for e in events if e["event"] == "start") - started}
    results |= {f"seconds_to_step_{steps[0]['step']}": steps[0]["time"] - started}
    for name in _MEANS:
        values = [event[name] for event in measured if name in event]
        results |= {name: sum(values) / len(values)} if values else {}
    if steps[-2]["step"] > last:
        alone = sum(event["samples_per_second"] for event in steps[-2:]) / 2
        results["step alone, samples_per_second"] = alone
        results["stage of step"] = results["samples_per_second"] / alone
    host = [event["host_seconds"] for event in measured if "host_seconds" in event]
    results |= (
        {f"host {name}, seconds": sum(times[name] for times in host) / len(host) for name in host[0]} if host else {}
    )
    # peak counters reset with each record, and the first record can have the highest peak
    results |= {name: max(event[name] for event in steps) for name in _PEAKS if name in steps[-1]}
    results["loss"] = [steps[0]["loss"], steps[-1]["loss"]]
    checkpoints = [event for event in events if event["event"] == "checkpoint"]
    results["checkpoints"] = [
        {name: event[name] for name in ("step", "stall_seconds", "seconds", "bytes")} for event in checkpoints
    ]
    return results


def print_summary(results: Mapping[str, Any]) -> None:
    """Print one value per line."""
    for name, value in results.items():
        if name == "checkpoints":
            for checkpoint in value:
                print(
                    f"checkpoint at step {checkpoint['step']}: training paused {checkpoint['stall_seconds']:.2f} s, "
                    f"written in {checkpoint['seconds']:.1f} s, {checkpoint['bytes'] / 1e9:.2f} GB"
                )
        else:
            print(f"{name:22} {f'{value:.4g}' if isinstance(value, float) else value}")


# --- all regimes ---------------------------------------------------------------------------------


def start(regime: str, out: Path, more: list[str]) -> "subprocess.Popen[bytes]":
    """Start the run of a regime."""
    folder = out / regime
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "--regime", regime, "--out", str(folder), "--lock", str(out / "lock")]
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen([*command, "--no-save", *more], stdout=output, stderr=subprocess.STDOUT)


def row(regime: str, out: Path) -> str:
    """Return the table's row of a regime."""
    file = out / regime / "summary.json"
    if not file.is_file():
        return f"| {regime} | failed: {out / regime / 'output.txt'} | | | |"
    results = json.loads(file.read_text(encoding="utf-8"))
    stage = results["samples_per_second"]
    ratio = results.get("stage of step")
    if ratio is None:
        return f"| {regime} | not measured | {stage:,.1f} | | |"
    step = results["step alone, samples_per_second"]
    waits = f"{results['data_wait']:.1%}, waits in {results.get('host_bound', 0):.0%} of steps"
    return f"| {regime} | {step:,.1f} | {stage:,.1f} | {ratio:.1%} | {waits} |"


def run_regimes(args: argparse.Namespace) -> None:
    """Run regimes in processes with the other options of the command line, and print their table."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--regimes", nargs="*")
    own.add_argument("--out")
    _, more = own.parse_known_args()
    regimes = args.regimes or list(REGIMES)
    todo = [regime for regime in regimes if not (args.out / regime / "summary.json").is_file()]
    for run in [start(regime, args.out, more) for regime in todo]:
        run.wait()
    print(HEAD, *(row(regime, args.out) for regime in regimes), sep="\n")


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Hold the lock file: runs with the same file prepare their caches at the same time and train one after another."""
    if lock is None:
        yield
        return
    with lock.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = parser_of(__doc__)
    parser.add_argument("--regimes", nargs="*", choices=REGIMES, help="run these, or all, with --out")
    parser.add_argument("--regime", choices=REGIMES, help="a named set of options")
    parser.add_argument("--size", choices=SIZES, default="sd3_light")
    parser.add_argument("--layers", type=int, help="number of blocks, if not that of the size")
    parser.add_argument("--heads", type=int, help="number of heads, 64 wide, if not that of the size")
    parser.add_argument("--pixels", type=int, help="side of the images; default: 256, or 64 for the small sizes")
    parser.add_argument("--captions", type=int, default=1, help="captions per sample")
    parser.add_argument("--ema-every", type=int, default=100, help="steps between updates of the average")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--alone", type=int, help="repetitions of the last step; default: three records")
    parser.add_argument("--warm", type=int, default=20, help="warm-up steps that are excluded")
    parser.add_argument("--logging-steps", type=int, default=10)
    parser.add_argument("--text", choices=("padded", "real"), default="padded")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an encoder; for the small sizes")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="FP8 products in the fast blocks")
    parser.add_argument("--fast", choices=("true", "false", "auto"), default="auto", help="use the fast blocks")
    parser.add_argument("--cuda-graphs", choices=("true", "false", "auto"), default="auto", help="replay CUDA graphs")
    parser.add_argument("--profile", type=Path, help="file for tables of launches, host operations and kernels")
    choices = ("true", "false", "selective")
    parser.add_argument("--checkpointing", choices=choices, default="false", help="activation checkpointing")
    parser.add_argument("--no-save", action="store_true", help="write no checkpoint")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw")
    parser.add_argument("--engine", choices=("torch", "deepspeed"), default="torch")
    parser.add_argument(
        "--zero-stage", type=int, choices=range(4), default=1, help="ZeRO stage of the DeepSpeed engine"
    )
    parser.add_argument("--feed-only", action="store_true", help="measure only the loader")
    parser.add_argument("--start-only", action="store_true", help="measure only the time to the end of the first step")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument(
        "--residence", choices=("auto", "stream", "host", "device"), default="auto", help="of the cache"
    )
    parser.add_argument("--checkpoint-every", type=int, help="steps between checkpoints; default: one at the end")
    parser.add_argument("--lock", type=Path, help="runs with the same file prepare at once and train one at a time")
    parser.add_argument("--tmp", type=Path, help="working folder; default: the system's temporary folder")
    parser.add_argument("--out", type=Path, help="folder for log, config and summary.json")
    return parser


def main() -> None:
    """Run the benchmark."""
    parser = make_parser()
    args = parser.parse_args()
    if args.regimes is not None:
        if args.out is None:
            parser.error("--regimes needs --out, a folder for the results")
        run_regimes(args)
        return
    parser.set_defaults(**REGIMES.get(args.regime, {}))
    args = parser.parse_args()
    args.alone = 3 * args.logging_steps if args.alone is None else args.alone
    with tempfile.TemporaryDirectory(dir=args.tmp) as name:
        folder = Path(name)
        about = prepare_folder(folder, args)
        print(f"{args.samples} samples, {about['cache_gb']:.2f} GB, {about['text_tokens']:.1f} text tokens", flush=True)
        if args.feed_only:
            print(feed(folder, args))
            return
        if args.start_only:
            measure_start(folder)
            return
        with turn(args.lock), nullcontext() if args.profile is None else profiling(args.profile, args.warm):
            started = time.time()
            train(folder, args.engine, not args.no_save, args.steps)
        results = {**about, **summary(folder / "run" / "log.jsonl", args.warm, started, args.steps)}
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            for file in ("log.jsonl", "config.toml"):
                shutil.copy(folder / "run" / file, args.out)
            write_json(args.out / "summary.json", results)
    print_summary(results)


if __name__ == "__main__":
    main()
