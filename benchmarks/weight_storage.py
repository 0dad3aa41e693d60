"""Compares float32 master weights with weights in bfloat16, 8-bit moments and released gradients, over several seeds.

The row `stock` has float32 weights without fast or compiled blocks and CUDA graphs, `fp8` has them with fp8 products.

    python benchmarks/world_prepare.py FOLDER --scenes simple --side 256 --images 16384 --caches padded
    python benchmarks/weight_storage.py FOLDER [--blocks 24] [--heads 24] [--steps 500] [--seeds 1 2 3] [--batch 16]
                                        [--rows float32 stock fp8 8bit bfloat16 adafactor] [--set KEY=VALUE ...]
                                        [--out FILE]
    python benchmarks/weight_storage.py TRAIN.toml ...

Every row is the train stage on the same images, with the same initial weights, order, noise and timesteps per seed.
With FOLDER the denoiser has random weights and SD3's blocks; 24 blocks of 24 heads are SD3.5 medium without its second
attention. A train TOML of any family trains what it says; it needs `eval_datasets`. Results per run: the loss on
held-out images with fixed noise after the last step, the mean training loss of the last 100 steps, the peak of GPU
memory and the time per step, all as the run's log has them; then each row's mean ratio to `float32` of the same seed.
Runs that are in the output file are not repeated. `--tiny` has sizes for a CPU.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

import torch
from common.basics import append_line, parser_of, read_lines
from common.world import load

from sd3_light.config import LoadedConfig, load_config
from sd3_light.train import verb as train

RELEASE = ("gradient_release=true", "gradient_clipping=0.0")
NARROW = ('optimizer.weight_dtype="bfloat16"',)
ROWS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "stock": ("fast=false", "compile=false", "cuda_graphs=false"),
    "fp8": ("fp8=true",),
    "8bit": ('optimizer.type="adamw8bit"', *RELEASE),
    "bfloat16": ('optimizer.type="adamw8bit"', *RELEASE, *NARROW),
    "bfloat16-moments32": (*RELEASE, *NARROW),
    "adafactor": ('optimizer.type="adafactor"', "optimizer.lr=0.003", *RELEASE, *NARROW),
}
"""Overrides by row; the first is what the others are compared with."""
LAST = 100
TINY = {"blocks": 2, "heads": 2, "batch": 8}
CPU = ["num_dataloader_workers=1", "eval_micro_batch_size_per_gpu=128"]


def overrides(args: argparse.Namespace, row: str, seed: int, folder: Path) -> list[str]:
    """Return the overrides of one run."""
    steps = args.steps
    keys = [
        f'output_dir="{folder}"',
        *(f"{key}={value}" for key, value in {"seed": seed, "max_steps": steps, "logging_steps": 1}.items()),
        *(f"{key}={steps}" for key in ("eval_every_n_steps", "checkpoint_every_n_steps", "steps_per_print")),
        "ema.enable=false",
    ]
    if args.source.is_dir():
        keys += [
            f"model.shape={{num_layers={args.blocks}, num_heads={args.heads}}}",
            f"micro_batch_size_per_gpu={args.batch}",
            f"sampling.every_n_steps={10 * steps}",
            "optimizer.lr=3e-4",
            "warmup_steps=50",
            'lr_scheduler="constant"',
            "eval_at_fixed_t=false",
            f'cache_residence="{"device" if torch.cuda.is_available() else "host"}"',
        ]
    keys += CPU if args.tiny else ["activation_checkpointing=true"]
    return [*keys, *ROWS[row], *args.set]


def load_run(args: argparse.Namespace, keys: list[str]) -> LoadedConfig:
    """Return the config of a run: the recipe of a prepared folder, with a shape in place of its size, or a TOML."""
    if not args.source.is_dir():
        return load_config(args.source, keys)
    base = Path(__file__).parent / "world.toml"
    shaped = args.source / f"weight_storage-{os.getpid()}.toml"  # several processes may train on the same folder
    text = base.read_text(encoding="utf-8").replace('size = "demo"\n', "").replace("position_step = 1.0\n", "")
    shaped.write_text(text, encoding="utf-8")
    return load(args.source, keys, shaped)


def run_one(args: argparse.Namespace, row: str, seed: int) -> dict[str, Any]:
    """Train once and return the results."""
    folder = args.work / f"{row}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    train.run(load_run(args, overrides(args, row, seed, folder.resolve())), on_sample=lambda *_: None)
    events = read_lines(folder / "log.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    held_out = [event for event in events if event["event"] == "eval"]
    later = steps[len(steps) // 2 :]
    result = {
        "row": row,
        "seed": seed,
        "held_out": held_out[-1]["flow"],
        "train": statistics.fmean(event["loss"] for event in steps[-LAST:]),
        "gib": max((event.get("gpu_memory_gib") or 0.0 for event in steps), default=0.0),
        "seconds": statistics.median(args.batch / event["samples_per_second"] for event in later),
        "skipped": steps[-1]["skipped"],
    }
    shutil.rmtree(folder)
    gc.collect()
    return result


def summary(results: list[dict[str, Any]]) -> str:
    """Return a table: means over the seeds, and the ratio to the first row of the same seed."""
    reference = {entry["seed"]: entry for entry in results if entry["row"] == next(iter(ROWS))}
    lines = [f"{'row':20} seeds  held out  / float32   (each)                       train  / float32    GiB  s/step"]
    for row in ROWS:
        own = [entry for entry in results if entry["row"] == row and entry["seed"] in reference]
        if not own:
            continue
        mean = {key: statistics.fmean(entry[key] for entry in own) for key in ("held_out", "train", "gib", "seconds")}
        ratios = {key: [entry[key] / reference[entry["seed"]][key] for entry in own] for key in ("held_out", "train")}
        each = ", ".join(f"{ratio:.4f}" for ratio in ratios["held_out"])
        lines.append(
            f"{row:20} {len(own):5}  {mean['held_out']:.5f}  {statistics.fmean(ratios['held_out']):.4f}     {each:28} "
            f"{mean['train']:.5f}  {statistics.fmean(ratios['train']):.4f}  {mean['gib']:6.2f}  {mean['seconds']:.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the table after every run."""
    parser = parser_of(__doc__)
    parser.add_argument("source", type=Path, help="folder of world_prepare.py, or a train TOML")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=["float32", "8bit", "bfloat16"])
    for name, value in {"blocks": 24, "heads": 24, "steps": 500, "batch": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for all rows")
    parser.add_argument("--work", type=Path, default=Path("weight_storage_runs"))
    parser.add_argument("--out", type=Path, default=Path("weight_storage.jsonl"))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
    results = read_lines(args.out)
    for seed in args.seeds:
        for row in args.rows:
            if any((entry["row"], entry["seed"]) == (row, seed) for entry in results):
                continue
            results.append(run_one(args, row, seed))
            append_line(args.out, results[-1])
            print(json.dumps(results[-1]), flush=True)
            print(summary(results), flush=True)


if __name__ == "__main__":
    main()
