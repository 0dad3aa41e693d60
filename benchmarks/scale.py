"""Simulates a billion samples and 1,024 ranks: what each process stores, computes, opens and reads, and the limits.

Nothing is trained and no shard is written: order, prefetch, manifest and checkpoint index run on shards that exist only
as numbers. `docs/evidence/scaling.md` explains the results.
"""

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.basics import parser_of
from common.caches import sd3_columns
from diffusers import SD3Transformer2DModel

from sd3_light.checkpoint.index import Index, Range, merge_entries
from sd3_light.config import SIZES
from sd3_light.config.sizes import ModelSize
from sd3_light.cost.data_bytes import open_shard_bytes, sample_bytes
from sd3_light.data import manifest as manifest_module
from sd3_light.data.manifest import Manifest, ShardEntry
from sd3_light.data.order import Order, Segment, build_order, rank_picks, rank_slice
from sd3_light.data.shard_table import column, group_shards
from sd3_light.engines.processes import num_sockets

PER_MACHINE = 8
MICRO = 64
KINDS = ("param", "exp_avg", "exp_avg_sq", "ema")


# --- order and reading: pure -------------------------------------------------------------------


def shard_sizes(samples: int, most: int, seed: int = 0) -> list[int]:
    """Return the shard sizes of one bucket, as the cache chooses them: between ``most`` / 4 and ``most``."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(most // 4, most, endpoint=True, size=2 * samples // (most // 2) + 8).tolist()
    sums = list(accumulate(sizes))
    count = next(index for index, total in enumerate(sums) if total >= samples)
    return [*sizes[:count], samples - (sums[count - 1] if count else 0)]


def build(samples: int, most: int, world: int, window: int) -> Order:
    """Build the order of one bucket in such shards, with 64 samples per rank in a global batch."""
    segment = cache(Segment)
    return build_order(0, [([segment(size) for size in shard_sizes(samples, most)], world * MICRO)], window)


@dataclass(frozen=True)
class Reading:
    """Mean number of shards per step, for a rank and for a machine."""

    opened: float  # shards that a rank opens per step
    hashed: float  # shards that a machine hashes per step: all that its ranks prefetch or read
    needed: float  # samples that a machine trains on per step, in units of shards

    @property
    def amplification(self) -> float:
        """Bytes that a machine reads per byte it trains on."""
        return max(1.0, self.hashed / self.needed)


def reading(order: Order, world: int, num_samples: int = 8) -> Reading:
    """Return means over some machines, each over a range of steps several windows long."""
    machines, bucket = max(1, world // PER_MACHINE), order.buckets[0]
    share, each = bucket.batch // machines, float(bucket.sizes.mean())
    opened, hashed = [], []
    by_segment = machines > 1  # as `training.data` distributes samples
    stride = max(1, bucket.span // bucket.batch // 4)  # steps closer than this read the same windows
    for number in range(num_samples):
        first, machine = number * order.steps_per_epoch // num_samples, (number * 7) % machines
        part = rank_slice(bucket.batch, machine, machines, 0, 1)
        steps = range(first, min(first + 32 * stride, order.steps_per_epoch), stride)
        shards = set[int]()
        for windows in (order.windows_at(step, *part) for step in steps):
            segments = order.segments_of_share(windows, *part) if by_segment else order.segments_in(windows)
            shards |= set(segments.tolist())
        hashed.append(len(shards) / (stride * len(steps)))
        picks = rank_picks(order, first, machine * PER_MACHINE, world, 0, 1, by_segment)
        opened.append(len(np.unique(picks.segment)))
    return Reading(float(np.mean(opened)), float(np.mean(hashed)), share / each)


def covers(order: Order, step: int, world: int) -> bool:
    """Return whether the slices of all ranks form the global batch of a step, each sample once."""
    size = order.batch_size(step)
    parts = [order.picks(step, *rank_slice(size, rank, world, 0, 1)) for rank in range(world)]
    whole = order.picks(step)
    return all(
        np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))
        for name in ("segment", "index", "repeat")
    )


@dataclass(frozen=True)
class OrderCost:
    """Bytes of an order with the tables of two epochs; seconds to build it, per new epoch, and per step of a rank."""

    held: int
    first: float
    epoch: float
    step: float


def order_cost(samples: int, most: int, world: int, window: int) -> OrderCost:
    """Measure the cost for one rank; shard sizes are computed before, as if read from a manifest."""
    sizes, segment = shard_sizes(samples, most), cache(Segment)
    part = rank_slice(world * MICRO, world // 2, world, 0, 1)
    tracemalloc.start()
    order = build_order(0, [([segment(size) for size in sizes], world * MICRO)], window)
    order.picks(0, *part)
    order.picks(order.steps_per_epoch, *part)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    first = _seconds(lambda: build(samples, most, world, window).picks(0, *part)) - _seconds(
        lambda: shard_sizes(samples, most)
    )
    epoch = _seconds(lambda: order.picks(2 * order.steps_per_epoch, *part))
    steps = [2 * order.steps_per_epoch + number * order.steps_per_epoch // 50 for number in range(50)]
    step = _seconds(lambda: [order.picks(number, *part) for number in steps]) / len(steps)
    return OrderCost(held, first, epoch, step)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# --- manifest: in its own process, to measure its memory -----------------------------


def entry(number: int) -> ShardEntry:
    """Return the entry of a shard that exists only as a number."""
    digest = sha256(str(number).encode()).hexdigest()
    label = f"part-{number % 32:05d}"
    file = f"{label}-0-{digest[:6]}-r256x256-256x256-{digest[:20]}.safetensors"
    sizes = 128 + number % 385, 10**9 + number
    return ShardEntry(file, "256x256", (256, 256), f"{label}#0", *sizes, digest, digest[:32])


def write_manifest(folder: Path, shards: int, table: bool) -> None:
    """Write a manifest with ``shards`` shards, in a table or as one JSON file."""
    manifest_module.TABLE_SHARDS = 0 if table else shards
    Manifest({"format": 2}, tuple(map(entry, range(shards))), entry(0)).save(folder)


def manifest_cost(shards: int, table: bool) -> dict[str, float]:
    """Return the size of its files, the seconds to open it and the private bytes kept, measured in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        write_manifest(Path(folder), shards, table)
        command = [sys.executable, __file__, "--manifest", folder]
        figures: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return {**figures, "file": sum(path.stat().st_size for path in Path(folder).iterdir())}


def _measure_manifest(folder: Path) -> None:
    before, started = _anonymous(), (time.perf_counter(), time.process_time())
    manifest = Manifest.load(folder)
    seconds, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
    kept = _anonymous() - before
    buckets = group_shards(manifest.shards)
    order = build_order(0, [([Segment(count) for count in column(b.shards, "count").tolist()], 64) for b in buckets])
    facts = {"buckets": len(buckets), "steps": order.steps_per_epoch}
    ordered = time.process_time() - started[1] - cpu
    print(json.dumps({"seconds": seconds, "cpu": cpu, "order": ordered, "kept": kept, **facts}))


def _anonymous() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


# --- checkpoint --------------------------------------------------------------------------------


def shapes_of(size: ModelSize) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter without allocating them."""
    with torch.device("meta"):
        model = SD3Transformer2DModel(**size.transformer_config())
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def rank_notes(shapes: Mapping[str, tuple[int, ...]], rank: int, world: int) -> dict[str, Any]:
    """Return the index entries of a rank: the rows of every tensor that FSDP2 assigns to it."""
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        rows = -(-shape[0] // world)
        first, last = (min(shape[0], index * rows) for index in (rank, rank + 1))
        width = int(np.prod(shape[1:]))
        if last > first:
            held = Range(first * width, (last - first) * width, f"rank-{rank:05d}.safetensors", "0" * 64)
            for kind in KINDS:
                tensors[f"{kind}/{name}"] = {"shape": shape, "dtype": "F32", "ranges": [held]}
    return tensors


@dataclass(frozen=True)
class CheckpointCost:
    """Bytes of the largest part, ranges and bytes of the index, and the seconds in which rank 0 builds it."""

    part: int
    ranges: int
    index: int
    seconds: float


def checkpoint_cost(size: ModelSize, world: int) -> CheckpointCost:
    """Measure a checkpoint of sharded weights, AdamW moments and one EMA."""
    shapes = shapes_of(size)
    notes = [rank_notes(shapes, rank, world) for rank in range(world)]
    started = time.perf_counter()
    index = Index({}, merge_entries(notes), {})
    assert not any(entry.coverage_error() for entry in index.tensors.values())
    text = index.to_json()
    seconds = time.perf_counter() - started
    part = sum(held.length * 4 for entry in index.tensors.values() for held in entry.ranges[:1])
    return CheckpointCost(part, sum(len(entry.ranges) for entry in index.tensors.values()), len(text), seconds)


# --- the report --------------------------------------------------------------------------------


def report_order(samples: int, worlds: list[int], window: int) -> None:
    """Print the cost of order and reading for several shard sizes and world sizes."""
    columns = sd3_columns((32, 32, 32), {"clip_l": (77, 768), "clip_g": (77, 1280), "t5": (256, 4096)})
    each = sample_bytes(columns)
    print(f"{samples:,} samples of {each / 1e6:.2f} MB: {samples * each / 1e15:.2f} PB")
    for most in (512, 4096, 16384):
        cost = order_cost(samples, most, worlds[-1], window)
        shards = len(shard_sizes(samples, most))
        print(
            f"shards of {most}: {shards:,}; order {cost.held / 1e6:.0f} MB, {cost.first:.1f} s to build, "
            f"{cost.epoch:.2f} s per new epoch, {cost.step * 1e3:.2f} ms per step of a rank, "
            f"index of an open shard {open_shard_bytes(most) / 1e3:.0f} kB"
        )
        for world in worlds:
            order = build(samples, most, world, window)
            step = reading(order, world)
            opens, read = step.opened * order.steps_per_epoch, step.hashed * order.buckets[0].sizes.mean() * each
            print(
                f"  {world:5} ranks: {order.steps_per_epoch:,} steps per epoch; a rank opens {step.opened:.1f} shards "
                f"per step, {opens:,.0f} per epoch; a machine hashes {step.hashed:.1f} per step and trains on "
                f"{step.needed:.1f}: {step.amplification:.1f} x, {read / 1e9:.1f} GB per step; slices cover the batch: "
                f"{covers(order, 1, world)}"
            )


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--shards", type=int, nargs="*", default=[50_000, 400_000, 2_000_000], help="of manifests")
    parser.add_argument("--only-manifests", action="store_true")
    parser.add_argument("--manifest", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.manifest is not None:
        _measure_manifest(args.manifest)
        return
    for shards, table in itertools.product(args.shards, (False, True)):
        if not table and shards > 400_000:  # minutes
            continue
        cost, form = manifest_cost(shards, table), "a table" if table else "JSON"
        print(
            f"manifest of {shards:,} shards as {form}: {cost['file'] / 1e6:.0f} MB, opened in "
            f"{cost['seconds']:.2f} s ({cost['cpu']:.2f} s of one core), {cost['kept'] / 1e6:.0f} MB kept in every "
            f"process; order {cost['order']:.1f} s",
            flush=True,
        )
    if args.only_manifests:
        return
    report_order(args.samples, args.ranks, args.window)
    for world in args.ranks:
        checkpoint = checkpoint_cost(SIZES["sd3.5_medium"], world)
        print(
            f"checkpoint of sd3.5_medium by {world} ranks: part {checkpoint.part / 1e6:,.0f} MB, "
            f"{checkpoint.ranges:,} ranges, index {checkpoint.index / 1e6:.1f} MB built in "
            f"{checkpoint.seconds:.1f} s; {num_sockets(world)} sockets per process"
        )
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
