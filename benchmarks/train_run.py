"""Speed of the training stage on a synthetic cache with real shapes; encoders and images are not needed.

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

A regime sets the options of one row of the table in docs/evidence/LOG.md; options on the command line override it.
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
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_run_folder import prepare_folder
from train_run_profile import profiling
from train_start import measure_start, without_saves

from sd3_light.config import SIZES, UserError, load_config
from sd3_light.config.optimizers import OPTIMIZERS
from sd3_light.engines import Launch
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

_MEANS = ("samples_per_second", "seconds", "data_wait", "host_bound", "tflops_per_gpu", "mfu", "host_memory_gib")
_PEAKS = ("gpu_memory_gib", "gpu_reserved_gib")


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


def summary(log: Path, warm: int, started: float, last: int | None = None) -> dict[str, Any]:
    """Summarize the log from step ``warm`` to step ``last``; the two last records are then of the step alone."""
    events = list(read_log(log))
    steps = [event for event in events if event["event"] == "step"]
    measured = [event for event in steps if warm < event["step"] <= (last or event["step"])] or steps[-1:]
    results: dict[str, Any] = {"records": len(measured)}
    # time until the model is built and until the first steps are done, without imports
    results |= {"seconds_to_start": next(e["time"] for e in events if e["event"] == "start") - started}
    results |= {f"seconds_to_step_{steps[0]['step']}": steps[0]["time"] - started}
    for name in _MEANS:
        values = [event[name] for event in measured if name in event]
        results |= {name: sum(values) / len(values)} if values else {}
    if last is not None and steps[-2]["step"] > last:
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


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Hold the lock file: runs with the same file prepare their caches at the same time and train one after another."""
    if lock is None:
        yield
        return
    with lock.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def options() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser = options()
    parser.set_defaults(**REGIMES.get(parser.parse_args().regime, {}))
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
            (args.out / "summary.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_summary(results)


if __name__ == "__main__":
    main()
