"""How fast is a cache built, and how fast is it read? At full size, without a downloaded model or dataset.

    python benchmarks/cache.py build [--out FOLDER] [--images 6000] [--side 256] [--text real padded] [--tiny]
    python benchmarks/cache.py read [--size sd3_light] [--text padded] [--shards 16] [--samples 32] [--batch 32]

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
"""

import argparse
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.basics import best_device, parser_of
from common.caches import LABEL, Shape, write_cache
from common.models import Model, write_model
from PIL import Image

from sd3_light.assets import DEMO
from sd3_light.cache import verb as cache
from sd3_light.cache.identity import decides_shards
from sd3_light.cache.shard_builder import ShardBuilder
from sd3_light.config import SIZES, LoadedConfig, load_config
from sd3_light.data.cache_plan import CachePlan, make_cache_plan
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.data.manifest import SHARDS
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset, MicroBatches
from sd3_light.families.sd3.encoders import FrozenParts
from sd3_light.sources.catalogue import Catalogue, make_sources
from sd3_light.sources.claims import Claims

WORDS = ("red", "green", "blue", "circle", "square", "star", "small", "large", "left", "right")  # one token each
MEAN_WORDS = 22
PARTS = ("vae", "clip_l", "clip_g", "t5")
BUFFER = 8 << 20
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
    with FrozenParts(
        train.model.diffusers_path, device, text_dtype=torch.bfloat16, t5_max_length=train.model.t5_max_length,
        text_tokens=train.model.text_tokens, batch_size=train.caching_batch_size, vae_dtype=train.model.vae_dtype,
    ) as parts:  # fmt: skip
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
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
