"""Compares the speed of a cache build with that of the encoders alone, at full size with random weights.

    python benchmarks/cache_build.py [--out FOLDER] [--images 6000] [--side 256] [--text_tokens real padded] [--tiny]

Draws JPEG files (sides of 300 to 640 pixels) with captions of typical web lengths, creates a model folder with SD3's
shapes (`encoders.py`), then measures in one process:

    alone   the encoders on prepared pixels and tokens, in the batches of the build; results are copied to the host
    build   the cache stage as users run it: probe, decode in worker processes, encode, write; `encode` is only its
            encoding, from the first image to the last shard on disk

The main result is encode / alone: 1.0 means that reading, decoding and writing cost nothing. Every measurement is
preceded by a short one of the same kind as warm-up.
"""

import argparse
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from encoders import WORDS, make_folder
from PIL import Image

from sd3_light.cache import verb as cache
from sd3_light.cache.recipe import decides_shards
from sd3_light.cache.shard_builder import ShardBuilder
from sd3_light.config import LoadedConfig, load_config
from sd3_light.data.cache_plan import CachePlan, make_cache_plan
from sd3_light.families.sd3.encoders import FrozenParts
from sd3_light.sources.catalogue import Catalogue, make_sources
from sd3_light.sources.claims import Claims

MEAN_WORDS = 22
PARTS = ("vae", "clip_l", "clip_g", "t5")
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
            dataset=data.name, text=f"{text}", batch=args.batch_size, workers=args.workers, shard=args.shard_size,
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
        recipe = decides_shards(cache.make_recipe(loaded.train.model))
        return make_cache_plan(catalogue, listings, recipe, loaded.train.sd3_shard_size)


def encoder_seconds(loaded: LoadedConfig, device: torch.device, wait: bool = True) -> dict[str, float]:
    """Return the seconds of the encoders on prepared inputs: all together, and each alone."""
    train, plan = loaded.train, plan_of(loaded)
    units = [(unit.bucket, [list(m.captions) for m in plan.members(unit)]) for unit in plan.units]
    random = np.random.default_rng(0)
    batches = {
        bucket: torch.from_numpy(
            random.integers(0, 255, (train.caching_batch_size, bucket.height, bucket.width, 3), dtype=np.uint8)
        )
        for bucket in {bucket for bucket, _ in units}
    }
    with FrozenParts(
        train.model.diffusers_path, device, text_dtype=torch.bfloat16, t5_max_length=train.model.t5_max_length,
        text_tokens=train.model.text_tokens, batch_size=train.caching_batch_size, vae_dtype=train.model.vae_dtype,
    ) as parts:  # fmt: skip
        work = []
        for bucket, captions in units:
            distinct = list(dict.fromkeys(caption for sample in captions for caption in sample))
            work.append((bucket, len(captions), parts.tokenize(distinct)))

        def run(images: bool, names: tuple[str, ...], units: int | None = None) -> float:
            started = time.perf_counter()
            for bucket, count, tokens in work[:units]:
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
            self._parts.part(name)
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


def measure(out: Path, text: str, model: Path, args: argparse.Namespace, device: torch.device) -> None:
    """Print the results for one kind of text tokens."""
    main = write_config(out, "images", text, model, args)
    whole, loading, first, count = timed_build(main)
    # the first build includes the warm-up of the libraries: build again
    shutil.rmtree(main.dataset.cache_dir / "shards")  # type: ignore[operator]
    again, _, encode, _ = timed_build(main)
    alone = encoder_seconds(main, device)
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


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Compare a cache build with the encoders alone.")
    parser.add_argument("--out", type=Path, help="working folder; default: a temporary one")
    parser.add_argument("--images", "--pictures", type=int, default=6000)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--shard_size", type=int, default=1024)
    parser.add_argument("--text_tokens", nargs="+", default=["real", "padded"])
    parser.add_argument("--tiny", action="store_true", help="use the demo's models, to try the benchmark on a CPU")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        model = make_folder(out, device, args.tiny)
        if not (out / "images").is_dir():
            draw_all(out / "images", args.images, args.workers)
        for text in args.text_tokens:
            measure(out, text, model, args, device)


if __name__ == "__main__":
    main()
