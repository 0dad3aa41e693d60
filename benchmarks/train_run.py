"""Speed of the training stage on a synthetic cache with real shapes; encoders and images are not needed.

    python benchmarks/train_run.py --regime padded|real|fp8|small128|base [any option below]
    python benchmarks/train_run.py [--size sd3_light] [--layers 12] [--pixels 256] [--captions 1] [--batch 64]
                                   [--steps 60] [--text padded|real] [--ema-every 100]
                                   [--fast true|false|auto] [--fp8] [--compile] [--checkpointing true|false|selective]
                                   [--cuda-graphs true|false|auto] [--profile FILE]
                                   [--workers 8] [--residence stream|host|device] [--engine torch|deepspeed]
                                   [--out FOLDER] [--feed-only]

Writes a cache of random numbers (256 px and SD3's text widths for the large sizes, those of the demo for the small
ones), a model folder with only configs and a train TOML, then runs the training stage: loader, engine, EMA, log, and a
checkpoint at the end (or every `--checkpoint-every` steps; none with `--no-save`). The results come from the run's
log.jsonl; the first `--warm` steps (compiling, hashing shards, allocating memory) are excluded.

A regime sets the options of one row of the table in docs/LOG.md; options on the command line override it. `stage of
step` in the results is the stage's speed relative to that of its step: the GPU's own time per step, divided by the wall
time. `host_seconds` says what the main process does in a step.

With `--text real` the number of T5 tokens per caption is log-normal (median 22, sigma 0.5, mean 25, at least 5), with
the same number of CLIP tokens, at most 77. `--out` keeps log, config and summary; the rest is deleted. `--feed-only`
does not train: it measures how many samples per second the loader workers prepare for a GPU, which adds the noise.
`--profile` writes where the time of the last steps of the warm-up goes: launches, operations of the host, kernels.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd3_light.budget.amount import GIB
from sd3_light.budget.flops import Tokens, image_tokens
from sd3_light.budget.gpu_memory import gpu_memory
from sd3_light.budget.training_setup import TrainingSetup
from sd3_light.config import SIZES, ModelSize, UserError, load_config
from sd3_light.config.optimizers import OPTIMIZERS
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.shards import Origin, ShardContent, write_shard
from sd3_light.engines import Launch
from sd3_light.runlog import read_log

SAMPLES_PER_SHARD = 128
IMAGES = "images"
LABEL = f"{IMAGES}#0"

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
}
"""Options by regime: the five runs in which the stage is compared with its step."""


@dataclass(frozen=True)
class Shape:
    """Shape of the samples: side in pixels, then tokens and width of each encoder."""

    pixels: int
    clip_tokens: int
    t5_tokens: int
    clip_l: int
    clip_g: int
    t5: int

    @staticmethod
    def of(size: ModelSize, pixels: int | None = None) -> "Shape":
        """Return the shape of SD3's encoders if the model size uses them, otherwise that of the demo."""
        if size.text_width == 4096:
            return Shape(pixels or 256, 77, 256, 768, 1280, 4096)
        return Shape(pixels or 64, 16, 16, 96, size.pooled_width - 96, size.text_width)

    @property
    def widths(self) -> dict[str, int]:
        """Token width of each encoder."""
        return {"clip_l": self.clip_l, "clip_g": self.clip_g, "t5": self.t5}


# --- cache -------------------------------------------------------------------------------------


def token_counts(shape: Shape, count: int, real: bool, rng: np.random.Generator) -> dict[str, Tensor]:
    """Return encoder -> tokens of each caption."""
    drawn = np.clip(rng.lognormal(np.log(22), 0.5, count), 5, shape.t5_tokens).astype(np.int64)
    t5 = torch.from_numpy(drawn) if real else torch.full((count,), shape.t5_tokens)
    clip = t5.clamp(max=shape.clip_tokens) if real else torch.full((count,), shape.clip_tokens)
    return {"clip_l": clip, "clip_g": clip, "t5": t5}


def content(shape: Shape, first: int, number: int, counts: Mapping[str, Tensor]) -> ShardContent:
    """Return samples with equally many captions: latents around 0 with small variance, text of small numbers."""
    side, captions = shape.pixels // 8, len(counts["t5"])
    mean = torch.randn(number, 1, 16, side, side)
    moments = torch.cat([mean, torch.full_like(mean, -6.0)], dim=2).to(torch.float16)
    text = {}
    for name, width in shape.widths.items():
        start = torch.cat([torch.zeros(1, dtype=torch.int64), counts[name].cumsum(0)])
        text[f"{name}.tokens"] = (0.2 * torch.randn(int(start[-1]), width)).to(torch.bfloat16)
        text[f"{name}.start"] = start
        if name != "t5":
            text[f"{name}.pooled"] = torch.randn(captions, width).to(torch.bfloat16)
    first_captions = torch.arange(number + 1) * (captions // number)
    return ShardContent(torch.arange(first, first + number), moments, first_captions, torch.arange(captions), text)


def write_cache(folder: Path, shape: Shape, samples: int, captions: int, real: bool) -> float:
    """Write a whole cache; returns the mean text tokens per sample, CLIP and T5 together."""
    (folder / SHARDS).mkdir(parents=True)
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    counts = token_counts(shape, samples * captions, real, rng)
    entries = []
    for first in range(0, samples, SAMPLES_PER_SHARD):
        number = min(SAMPLES_PER_SHARD, samples - first)
        part = {name: values[first * captions :][: number * captions] for name, values in counts.items()}
        entries.append(write(folder, shape, f"{first // SAMPLES_PER_SHARD:05d}", content(shape, first, number, part)))
    empty_counts = {name: values[:1].clamp(max=2) if real else values[:1] for name, values in counts.items()}
    empty = write(folder, shape, "empty", content(shape, 0, 1, empty_counts))
    Manifest({"text_tokens": "real" if real else "padded"}, tuple(entries), empty, {"pictures": samples}).save(folder)
    return float((counts["clip_l"] + counts["t5"]).double().mean())


def write(folder: Path, shape: Shape, name: str, samples: ShardContent) -> ShardEntry:
    """Write one shard."""
    side = (shape.pixels, shape.pixels)
    bucket = "empty" if name == "empty" else f"{shape.pixels}x{shape.pixels}"
    entry = ShardEntry(f"{name}.safetensors", bucket, side, LABEL, 0, 0, "", name)
    origins = [Origin(f"{number}", "", *side, ("",)) for number in samples.sample_id.tolist()]
    return write_shard(folder / SHARDS, entry, samples, origins)


# --- model folder and config ---------------------------------------------------------------


def write_model_folder(folder: Path, shape: Shape) -> None:
    """Write the files of an SD3 folder that `check` and training read: configs. Weights are empty files."""
    clip = {"max_position_embeddings": 77}
    configs: dict[str, dict[str, Any]] = {
        "vae": {"latent_channels": 16, "block_out_channels": [1] * 4, "scaling_factor": 1.5305, "shift_factor": 0.0609},
        "text_encoder": {**clip, "hidden_size": shape.clip_l, "projection_dim": shape.clip_l},
        "text_encoder_2": {**clip, "hidden_size": shape.clip_g, "projection_dim": shape.clip_g},
        "text_encoder_3": {"d_model": shape.t5},
    }
    for name, config in configs.items():
        write_json(folder / name / "config.json", config)
        (folder / name / ("diffusion_pytorch_model" if name == "vae" else "model")).with_suffix(".safetensors").touch()
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        length = shape.t5_tokens if name == "tokenizer_3" else shape.clip_tokens
        write_json(folder / name / "tokenizer_config.json", {"model_max_length": length})
        write_json(folder / name / "tokenizer.json", {})
    write_json(folder / "model_index.json", {})
    write_json(folder / "scheduler" / "scheduler_config.json", {})


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")


def train_toml(args: argparse.Namespace, shape: Shape) -> str:
    """Return the train TOML. It has no exports, since the model folder is incomplete."""
    booleans = {"true": "true", "false": "false"}
    names = ("checkpointing", "fast", "cuda_graphs")
    flags = {name: booleans.get(getattr(args, name), f'"{getattr(args, name)}"') for name in names}
    layers = "" if args.layers is None else f"num_layers = {args.layers}"
    return f"""
output_dir = "run"
dataset = "data.toml"
cache_dir = "cache"
max_steps = {args.steps}
micro_batch_size_per_gpu = {args.batch}
gradient_accumulation_steps = {args.accumulation}
zero_stage = {args.zero_stage}
activation_checkpointing = {flags["checkpointing"]}
fast = {flags["fast"]}
compile = {str(args.compile).lower()}
cuda_graphs = {flags["cuda_graphs"]}
fp8 = {str(args.fp8).lower()}
warmup_steps = 1000
checkpoint_every_n_steps = {args.checkpoint_every or args.steps}
keep_last_n_checkpoints = 1
logging_steps = {args.logging_steps}
num_dataloader_workers = {args.workers}
dataloader_prefetch_per_worker = 2
cache_residence = "{args.residence}"
[model]
train_type = "sd3_light_pretrain"
diffusers_path = "model"
size = "{args.size}"
{layers}
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
    size, real = SIZES[args.size].with_overrides(args.layers, None), args.text == "real"
    shape = Shape.of(size, args.pixels)
    tokens = write_cache(folder / "cache", shape, args.samples, args.captions, real)
    write_model_folder(folder / "model", shape)
    (folder / IMAGES).mkdir()
    (folder / "train.toml").write_text(train_toml(args, shape), encoding="utf-8")
    data = f'resolutions = [{shape.pixels}]\n[[directory]]\npath = "{IMAGES}"\n'
    (folder / "data.toml").write_text(data, encoding="utf-8")
    case = TrainingSetup(
        size,
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
    about = {
        "regime": args.regime,
        "engine": args.engine,
        "size": args.size,
        "layers": size.num_layers,
        "batch": args.batch,
        "text": args.text,
        "compile": args.compile,
        "fast": args.fast,
        "cuda_graphs": args.cuda_graphs,
        "fp8": args.fp8,
        "workers": args.workers,
        "residence": args.residence,
        **asdict(shape),
    }
    return {
        **about,
        "checkpointing": args.checkpointing,
        "text_tokens": tokens,
        "cache_gb": cache / 1e9,
        "predicted_gib": gpu_memory(case).total / GIB,
    }


# --- run ---------------------------------------------------------------------------------------

_MEANS = ("samples_per_second", "seconds", "gpu_seconds", "data_wait", "tflops_per_gpu", "mfu", "host_memory_gib")
_PEAKS = ("gpu_memory_gib", "gpu_reserved_gib")


def train(folder: Path, engine: str, saves: bool) -> None:
    """Run the training stage in a prepared folder."""
    from sd3_light.checkpoint.background import CheckpointKeeper
    from sd3_light.stages import check
    from sd3_light.stages import train as stage
    from sd3_light.training.driver import Driver

    Driver.export = lambda self, progress: None  # type: ignore[method-assign]  # there are no frozen parts to export

    if not saves:
        Driver.checkpoint = lambda self, progress: None  # type: ignore[method-assign]
        CheckpointKeeper.prepare = lambda self, pieces: None  # type: ignore[method-assign]

    loaded = load_config(folder / "train.toml")
    check.require(loaded)
    try:
        stage.run(loaded, Launch(), by_deepspeed=engine == "deepspeed")
    except UserError as error:  # the log up to here is still useful
        print(f"the run failed: {error}")


PROFILED_STEPS = 5


@contextmanager
def profiling(file: Path, warm: int) -> Iterator[None]:
    """Profile the last of the first ``warm`` steps of the run inside the block, and write tables of them."""
    from sd3_light.engines.torch import TorchEngine

    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler, train_step = torch.profiler.profile(activities=activities), TorchEngine.train_step
    began, calls, first = 0.0, 0, max(1, warm - PROFILED_STEPS)

    def synchronized() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def profiled(self: TorchEngine, *arguments: Any) -> Any:
        nonlocal began, calls
        calls += 1
        if calls == first:
            synchronized()
            profiler.start()
            began = time.perf_counter()
        elif calls == first + PROFILED_STEPS:
            seconds = synchronized() - began
            profiler.stop()
            file.write_text(profile_tables(profiler, seconds), encoding="utf-8")
        return train_step(self, *arguments)

    TorchEngine.train_step = profiled  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchEngine.train_step = train_step  # type: ignore[method-assign]


def profile_tables(profiler: torch.profiler.profile, seconds: float) -> str:
    """Return the launches per step, and tables of the host's operations and the kernels."""
    events = profiler.key_averages()
    launches = {event.key: event.count for event in events if "Launch" in event.key}
    kernels = [event for event in events if event.device_type != torch.autograd.DeviceType.CPU]
    gpu = sum(event.self_device_time_total for event in kernels) / 1e3
    lines = [
        f"{PROFILED_STEPS} steps, {1e3 * seconds / PROFILED_STEPS:.2f} ms per step under the profiler",
        f"{sum(event.count for event in kernels) / PROFILED_STEPS:.0f} kernels and copies per step, "
        f"{gpu / PROFILED_STEPS:.2f} ms of GPU time",
        *(f"{count / PROFILED_STEPS:.0f} {name} per step" for name, count in sorted(launches.items())),
    ]
    tables = (("host", "self_cpu_time_total"), ("GPU", "self_device_time_total"))
    for title, order in tables if kernels else tables[:1]:
        lines += ["", f"by the time of the {title}:", events.table(sort_by=order, row_limit=40)]
    return "\n".join(lines) + "\n"


def feed(folder: Path, args: argparse.Namespace) -> float:
    """Return the samples per second of the loader without training; the first ``warm`` steps are excluded."""
    from sd3_light.data.stream import MicroBatches
    from sd3_light.encoders.vae import LatentScale
    from sd3_light.training.data import make_loader, make_order, open_cache
    from sd3_light.training.sd3 import CleanPreparer, InputPreparer

    loaded, launch = load_config(folder / "train.toml"), Launch()
    config = loaded.train
    torch.set_num_threads(1)
    data = open_cache(loaded.dataset, config, launch)
    scale = LatentScale.of_folder(config.model.diffusers_path)
    preparer = CleanPreparer(InputPreparer(config.seed, config.model, scale, data.empty_text()))
    micro = config.gradient_accumulation_steps
    batches = MicroBatches(data, make_order(data, loaded, launch), 0, 1, micro)
    steps = make_loader(config, batches, None, micro, preparer, range(2**62)).steps()
    for _ in range(args.warm):
        next(steps)
    started = time.perf_counter()
    for _ in range(args.steps):
        next(steps)
    took = time.perf_counter() - started
    steps.close()
    return float(args.steps * args.batch * args.accumulation / took)


def summary(log: Path, warm: int, started: float) -> dict[str, Any]:
    """Summarize the log after the first ``warm`` steps."""
    events = list(read_log(log))
    steps = [event for event in events if event["event"] == "step"]
    measured = [event for event in steps if event["step"] > warm] or steps[-1:]
    results: dict[str, Any] = {"records": len(measured)}
    # time until the model is built and until the first steps are done, without imports
    results |= {"seconds_to_start": next(e["time"] for e in events if e["event"] == "start") - started}
    results |= {f"seconds_to_step_{steps[0]['step']}": steps[0]["time"] - started}
    for name in _MEANS:
        values = [event[name] for event in measured if name in event]
        results |= {name: sum(values) / len(values)} if values else {}
    if "gpu_seconds" in results:
        results["stage of step"] = results["gpu_seconds"] / results["seconds"]
        results["step alone, samples_per_second"] = results["samples_per_second"] / results["stage of step"]
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


def options() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", choices=REGIMES, help="a named set of options")
    parser.add_argument("--size", choices=SIZES, default="sd3_light")
    parser.add_argument("--layers", type=int, help="number of blocks, if not that of the size")
    parser.add_argument("--pixels", type=int, help="side of the images; default: 256, or 64 for the small sizes")
    parser.add_argument("--captions", type=int, default=1, help="captions per sample")
    parser.add_argument("--ema-every", type=int, default=100, help="steps between updates of the average")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=20, help="warm-up steps that are excluded")
    parser.add_argument("--logging-steps", type=int, default=10)
    parser.add_argument("--text", choices=("padded", "real"), default="padded")
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
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--residence", choices=("stream", "host", "device"), default="stream", help="of the cache")
    parser.add_argument("--checkpoint-every", type=int, help="steps between checkpoints; default: one at the end")
    parser.add_argument("--tmp", type=Path, help="working folder; default: the system's temporary folder")
    parser.add_argument("--out", type=Path, help="folder for log, config and summary.json")
    return parser


def main() -> None:
    """Run the benchmark."""
    parser = options()
    parser.set_defaults(**REGIMES.get(parser.parse_args().regime, {}))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.tmp) as name:
        folder = Path(name)
        about = prepare_folder(folder, args)
        print(f"{args.samples} samples, {about['cache_gb']:.2f} GB, {about['text_tokens']:.1f} text tokens", flush=True)
        if args.feed_only:
            print(f"{feed(folder, args):.0f} samples/s prepared by {args.workers} workers")
            return
        started = time.time()
        with nullcontext() if args.profile is None else profiling(args.profile, args.warm):
            train(folder, args.engine, not args.no_save)
        results = {**about, **summary(folder / "run" / "log.jsonl", args.warm, started)}
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            for file in ("log.jsonl", "config.toml"):
                shutil.copy(folder / "run" / file, args.out)
            (args.out / "summary.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_summary(results)


if __name__ == "__main__":
    main()
