"""How fast is a cache built and read, and what is needed at a billion samples? Without a downloaded model or dataset.

    python benchmarks/cache.py build [--out FOLDER] [--images 6000] [--side 256] [--text real padded] [--tiny]
    python benchmarks/cache.py read [--size sd3_light] [--text padded] [--shards 16] [--samples 32] [--batch 32]
    python benchmarks/cache.py scale [--samples 1000000000] [--ranks 8 64 256 1024] [--only-manifests]

`build` draws JPEG files (sides of 300 to 640 pixels) with captions of typical web lengths, writes a model folder with
SD3's frozen parts (random weights), then measures in one process:

    alone   the encoders on prepared pixels and tokens, in the batches of the build; results are copied to the host
    build   the cache stage as users run it: probe, decode in worker processes, encode, write; `encode` is only its
            encoding, from the first image to the last shard on disk

The main result is encode / alone: 1.0 means that reading, decoding and writing cost nothing. Every measurement is
preceded by a short one of the same kind as warm-up.

`read` writes a cache of random numbers, reads its files sequentially, then in training order through the loader with 0,
1 and 2 workers (without preparing inputs). Everything is in the page cache, so this measures the loader and not the
disk.

`scale` simulates a billion samples and 1,024 ranks: what each process stores, computes, opens and reads, and the
limits. Nothing is trained and no shard is written: order, prefetch, manifest and checkpoint index run on shards that
exist only as numbers. `docs/evidence/scaling.md` explains the results.
"""

import argparse
import itertools
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache as remembered
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.basics import best_device, parser_of
from common.models import LABEL, Model, Shape, sd3_columns, write_cache, write_model
from diffusers import SD3Transformer2DModel
from PIL import Image

from sd3_light.assets import DEMO
from sd3_light.cache import verb as cache
from sd3_light.cache.identity import decides_shards
from sd3_light.cache.shard_builder import ShardBuilder
from sd3_light.checkpoint.index import Index, Range, merge_entries
from sd3_light.config import SIZES, LoadedConfig, ModelSize, load_config
from sd3_light.cost.data_bytes import open_shard_bytes, sample_bytes
from sd3_light.data import manifest as manifest_module
from sd3_light.data.cache_plan import CachePlan, make_cache_plan
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.order import Order, Segment, build_order, rank_picks, rank_slice
from sd3_light.data.shard_table import column, group_shards
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset, MicroBatches
from sd3_light.engines.processes import num_sockets
from sd3_light.families.sd3.encoders import FrozenParts
from sd3_light.sources.catalogue import Catalogue, make_sources
from sd3_light.sources.claims import Claims

WORDS = ("red", "green", "blue", "circle", "square", "star", "small", "large", "left", "right")  # one token each
MEAN_WORDS = 22
PARTS = ("vae", "clip_l", "clip_g", "t5")
BUFFER = 8 << 20
PER_MACHINE = 8
MICRO = 64
KINDS = ("param", "exp_avg", "exp_avg_sq", "ema")
TRAIN = """
output_dir = "run"
dataset = "{dataset}"
cache_dir = "cache-{text}"
max_steps = 1
micro_batch_size_per_gpu = 1
save_every_n_steps = 1
caching_batch_size = {batch}
caching_num_workers = {workers}
sd3_shard_size = {shard}
[model]
train_type = "sd3_light_pretrain"
diffusers_path = "{model}"
size = "{size}"
t5_max_length = {length}
text_tokens = "{text}"
dtype = "bfloat16"
"""


# --- building ------------------------------------------------------------------------------------


def draw(folder: Path, first: int, count: int) -> None:
    """Write photo-like JPEG files: smooth colours with some noise, so that files have the size of photos."""
    random = np.random.default_rng(first)
    for number in range(first, first + count):
        width, height = random.integers(300, 640, 2).tolist()
        coarse = Image.fromarray(random.integers(0, 255, (9, 9, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        noisy = np.clip(smooth + random.integers(-12, 12, (height, width, 1)), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number:07d}.jpg", quality=88)
        length = int(np.clip(random.lognormal(np.log(MEAN_WORDS) - 0.18, 0.6), 3, 200))
        (folder / f"{number:07d}.txt").write_text(" ".join(random.choice(WORDS, length)))


def draw_all(folder: Path, count: int, processes: int) -> None:
    """Draw ``count`` images with several processes."""
    folder.mkdir(parents=True)
    step = -(-count // (4 * processes))
    with ProcessPoolExecutor(processes) as pool:
        jobs = [pool.submit(draw, folder, first, min(step, count - first)) for first in range(0, count, step)]
        for job in jobs:
            job.result()


def write_config(out: Path, name: str, text: str, model: Path, args: argparse.Namespace) -> LoadedConfig:
    """Write a config whose dataset is the folder ``name``."""
    data = out / f"{name}.toml"
    data.write_text(f'resolutions = [{args.side}]\n[[directory]]\npath = "{name}"\n')
    train = out / f"train-{name}-{text}.toml"
    size, length = ("tiny2", 16) if args.tiny else ("sd3_light", 256)
    train.write_text(
        TRAIN.format(
            dataset=data.name, text=text, batch=args.batch_size, workers=args.workers, shard=args.shard_size,
            model=model, size=size, length=length,
        ).replace("cache-", f"cache-{name}-")
    )  # fmt: skip
    return load_config(train)


def plan_of(loaded: LoadedConfig) -> CachePlan:
    """Return the plan of a built cache."""
    folder = loaded.dataset.cache_dir
    assert isinstance(folder, Path)
    with Claims(folder / "claims") as claims:
        catalogue = Catalogue(folder, claims)
        listings = catalogue.refresh(make_sources(loaded.dataset.directories), lambda _: None)
        decided_by = decides_shards(cache.make_identity(loaded.train.model))
        return make_cache_plan(catalogue, listings, decided_by, loaded.train.sd3_shard_size)


def encoder_seconds(loaded: LoadedConfig, device: torch.device) -> dict[str, float]:
    """Return the seconds of the encoders on prepared inputs: all together, and each alone."""
    train, plan = loaded.train, plan_of(loaded)
    planned = [(shard.bucket, [list(m.captions) for m in plan.members(shard)]) for shard in plan.shards]
    random = np.random.default_rng(0)
    batches = {
        bucket: torch.from_numpy(
            random.integers(0, 255, (train.caching_batch_size, bucket.height, bucket.width, 3), dtype=np.uint8)
        )
        for bucket in {bucket for bucket, _ in planned}
    }
    with FrozenParts(train.model, device, train.caching_batch_size) as parts:
        work = []
        for bucket, captions in planned:
            distinct = list(dict.fromkeys(caption for sample in captions for caption in sample))
            work.append((bucket, len(captions), parts.tokenize(distinct)))

        def run(images: bool, names: tuple[str, ...], most: int | None = None) -> float:
            started = time.perf_counter()
            for bucket, count, tokens in work[:most]:
                for start in range(0, count if images else 0, train.caching_batch_size):
                    parts.encode_images(batches[bucket][: min(train.caching_batch_size, count - start)], False)
                for name in names:
                    parts.encode_text(name, tokens[name])
            parts.synchronize()
            return time.perf_counter() - started

        text_encoders = ("clip_l", "clip_g", "t5")
        run(True, text_encoders, 2)
        results = {"all": run(True, text_encoders), "vae": run(True, ())}
        return {**results, **{name: run(False, (name,)) for name in text_encoders}}


def timed_build(loaded: LoadedConfig) -> tuple[float, float, float, int]:
    """Return the seconds of the whole stage, of loading the encoders and of encoding, and the number of samples."""
    durations: list[float] = []
    original = ShardBuilder.build

    def build(self: ShardBuilder, *args: object) -> None:
        started = time.perf_counter()
        for name in PARTS:
            self._encoders.part(name)  # type: ignore[attr-defined]
        durations.append(time.perf_counter() - started)
        started = time.perf_counter()
        original(self, *args)  # type: ignore[arg-type]
        durations.append(time.perf_counter() - started)

    ShardBuilder.build = build  # type: ignore[method-assign]
    try:
        started = time.perf_counter()
        (report,) = cache.run(loaded)
        return time.perf_counter() - started, *durations, report.encoded  # type: ignore[return-value]
    finally:
        ShardBuilder.build = original  # type: ignore[method-assign]


def measure_build(out: Path, text: str, model: Path, args: argparse.Namespace) -> None:
    """Print the speed of a build for one kind of text tokens."""
    main = write_config(out, "images", text, model, args)
    whole, loading, first, count = timed_build(main)
    # the first build includes the warm-up of the libraries: build again
    shutil.rmtree(main.dataset.cache_dir / "shards")  # type: ignore[operator]
    again, _, encode, _ = timed_build(main)
    alone = encoder_seconds(main, best_device())
    size = sum(p.stat().st_size for p in main.dataset.cache_dir.glob("shards/*.safetensors"))  # type: ignore[union-attr]
    print(f"\n{text}: {count} samples of {args.side} px, batches of {args.batch_size}, {args.workers} decoders")
    print(f"  encoders alone  {count / alone['all']:8.1f} images/s   ({alone['all']:.1f} s)")
    total = sum(alone[part] for part in PARTS)
    print("  share of each   " + ", ".join(f"{part} {alone[part] / total:.1%}" for part in PARTS))
    print("  each alone      " + ", ".join(f"{part} {count / alone[part]:.0f}/s" for part in PARTS))
    print(f"  build, encoding {count / encode:8.1f} images/s   ({encode:.1f} s; the first time {first:.1f} s)")
    print(f"  whole stage     {whole:.1f} s first (probes all images, loads {loading:.1f} s), {again:.1f} s again")
    print(f"  encode / alone  {alone['all'] / encode:8.3f}")
    print(f"  on disk         {size / count / 1e6:.3f} MB per sample")


def build(args: argparse.Namespace) -> None:
    """Measure builds."""
    with tempfile.TemporaryDirectory() if args.out is None else nullcontext(args.out) as folder:
        out = Path(folder)
        model = DEMO if args.tiny else out / "model"
        if not (model / "model_index.json").is_file():
            write_model(Model("sd3", depth="2", encoders="deep"), model, [" ".join(WORDS)], best_device())
        if not (out / "images").is_dir():
            draw_all(out / "images", args.images, args.workers)
        for text in args.text:
            measure_build(out, text, model, args)


# --- reading -------------------------------------------------------------------------------------


class PassThrough:
    """A model that returns batches unchanged."""

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        return (batch,), ()


def read_sequentially(files: list[Path]) -> float:
    """Return the bytes per second of sequential reading."""
    buffer, total, started = bytearray(BUFFER), 0, time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total / (time.perf_counter() - started)


def read_by_loader(dataset: MicroBatches, steps: int, epochs: int, workers: int) -> float:
    """Return the bytes per second of the loader. The first epoch, which hashes and allocates, is not timed."""
    loader = PipelineDataLoader(
        dataset, None, 1, PassThrough(), num_dataloader_workers=workers, items=range(steps * (epochs + 1))
    )
    total, started = 0, 0.0
    for number, ((batch,), _) in enumerate(loader):
        if number >= steps:
            total += sum(value.nbytes for value in batch.values() if value is not None)
        if number == steps - 1:
            started = time.perf_counter()
    return total / (time.perf_counter() - started)


def read(args: argparse.Namespace) -> None:
    """Print the table of throughputs."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = Shape.of(SIZES[args.size])
        write_cache(folder, shape, args.shards * args.samples, 1, args.text == "real", args.samples)
        data = CachedDataset(LocalStore(folder))
        order = data.order(0, {LABEL: 1.0}, lambda resolution: args.batch)
        batches = MicroBatches(data, order, 0, 1, 1)
        files = [folder / SHARDS / entry.file for entry in data.manifest.shards]
        size = sum(file.stat().st_size for file in files)
        each = size / (args.shards * args.samples)
        print(f"{size / 1e9:.2f} GB, {each / 1e6:.3f} MB per sample, batch {args.batch}")
        print(f"{'':22}{'GB/s':>8}{'relative':>10}{'samples/s':>12}")
        for workers in (0, 1, 2):
            # the best of several: other load on the machine only slows them down
            plain = max(read_sequentially(files) for _ in range(args.repeats))
            rates = [read_by_loader(batches, order.steps_per_epoch, args.epochs, workers) for _ in range(args.repeats)]
            if workers == 0:
                print(f"{'sequential reading':22}{plain / 1e9:8.2f}")
            label = f"loader, {workers} workers"
            rate = max(rates)
            print(f"{label:22}{rate / 1e9:8.2f}{rate / plain:10.0%}{rate / each:12,.0f}", flush=True)


# --- scale: order and reading, pure -------------------------------------------------------------------


def shard_sizes(samples: int, most: int, seed: int = 0) -> list[int]:
    """Return the shard sizes of one bucket, as the cache chooses them: between ``most`` / 4 and ``most``."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(most // 4, most, endpoint=True, size=2 * samples // (most // 2) + 8).tolist()
    sums = list(accumulate(sizes))
    count = next(index for index, total in enumerate(sums) if total >= samples)
    return [*sizes[:count], samples - (sums[count - 1] if count else 0)]


def shard_order(samples: int, most: int, world: int, window: int) -> Order:
    """Build the order of one bucket in such shards, with 64 samples per rank in a global batch."""
    segment = remembered(Segment)
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
    sizes, segment = shard_sizes(samples, most), remembered(Segment)
    part = rank_slice(world * MICRO, world // 2, world, 0, 1)
    tracemalloc.start()
    order = build_order(0, [([segment(size) for size in sizes], world * MICRO)], window)
    order.picks(0, *part)
    order.picks(order.steps_per_epoch, *part)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    first = _seconds(lambda: shard_order(samples, most, world, window).picks(0, *part)) - _seconds(
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


# --- scale: manifest, in its own process, to measure its memory -----------------------------


def numbered_entry(number: int) -> ShardEntry:
    """Return the entry of a shard that exists only as a number."""
    digest = sha256(str(number).encode()).hexdigest()
    label = f"part-{number % 32:05d}"
    file = f"{label}-0-{digest[:6]}-r256x256-256x256-{digest[:20]}.safetensors"
    sizes = 128 + number % 385, 10**9 + number
    return ShardEntry(file, "256x256", (256, 256), f"{label}#0", *sizes, digest, digest[:32])


def write_manifest(folder: Path, shards: int, table: bool) -> None:
    """Write a manifest with ``shards`` shards, in a table or as one JSON file."""
    manifest_module.TABLE_SHARDS = 0 if table else shards
    Manifest({"format": 2}, tuple(map(numbered_entry, range(shards))), numbered_entry(0)).save(folder)


def manifest_cost(shards: int, table: bool) -> dict[str, float]:
    """Return the size of its files, the seconds to open it and the private bytes kept, measured in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        write_manifest(Path(folder), shards, table)
        command = [sys.executable, __file__, "scale", "--manifest", folder]
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


# --- scale: checkpoint --------------------------------------------------------------------------------


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


# --- scale: the report --------------------------------------------------------------------------------


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
            order = shard_order(samples, most, world, window)
            step = reading(order, world)
            opens, read = step.opened * order.steps_per_epoch, step.hashed * order.buckets[0].sizes.mean() * each
            print(
                f"  {world:5} ranks: {order.steps_per_epoch:,} steps per epoch; a rank opens {step.opened:.1f} shards "
                f"per step, {opens:,.0f} per epoch; a machine hashes {step.hashed:.1f} per step and trains on "
                f"{step.needed:.1f}: {step.amplification:.1f} x, {read / 1e9:.1f} GB per step; slices cover the batch: "
                f"{covers(order, 1, world)}"
            )


def scale(args: argparse.Namespace) -> None:
    """Print what each process holds and reads."""
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


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    verbs = parser.add_subparsers(required=True)
    building = verbs.add_parser("build")
    building.set_defaults(run=build)
    building.add_argument("--out", type=Path, help="working folder; default: a temporary one")
    building.add_argument("--images", type=int, default=6000)
    building.add_argument("--side", type=int, default=256)
    building.add_argument("--batch-size", type=int, default=64)
    building.add_argument("--workers", type=int, default=12)
    building.add_argument("--shard-size", type=int, default=1024)
    building.add_argument("--text", nargs="+", choices=("real", "padded"), default=["real", "padded"])
    building.add_argument("--tiny", action="store_true", help="the demo's models, to try the benchmark on a CPU")
    reading = verbs.add_parser("read")
    reading.set_defaults(run=read)
    reading.add_argument("--size", choices=SIZES, default="sd3_light", help="of the model: its encoders and images")
    reading.add_argument("--text", choices=("real", "padded"), default="padded")
    reading.add_argument("--shards", type=int, default=16)
    reading.add_argument("--samples", type=int, default=32, help="samples per shard")
    reading.add_argument("--batch", type=int, default=32)
    reading.add_argument("--epochs", type=int, default=4)
    reading.add_argument("--repeats", type=int, default=5)
    scaling = verbs.add_parser("scale")
    scaling.set_defaults(run=scale)
    scaling.add_argument("--samples", type=int, default=1_000_000_000)
    scaling.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    scaling.add_argument("--window", type=int, default=16)
    scaling.add_argument("--shards", type=int, nargs="*", default=[50_000, 400_000, 2_000_000], help="of manifests")
    scaling.add_argument("--only-manifests", action="store_true")
    scaling.add_argument("--manifest", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
