"""How much of the encoders' own speed a build of the cache reaches, at full size with random weights.

    python benchmarks/cache_build.py [--out FOLDER] [--pictures 6000] [--side 256] [--text_tokens real padded] [--tiny]

Draws JPEG files (sides of 300 to 640 pixels) with captions of web-like lengths, makes a folder of SD3's shapes
(`encoders.py`), then measures in one process:

    alone   the encoders on ready pixels and ready tokens, in the batches of the build; results arrive on the host
    build   the cache stage as users run it: look, decode in worker processes, encode, write; `encode` is its encoding
            alone, from the first picture to the last shard on disk

The figure that counts is encode / alone: 1.0 would mean that reading, decoding and writing cost nothing. Every
measurement is preceded by a short one of the same kind, so that the device's libraries are warm in all of them.
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

from sd3_light.config import LoadedConfig, load_config
from sd3_light.data.building.cache_plan import CachePlan, make_cache_plan
from sd3_light.data.building.catalogue import Catalogue, make_sources
from sd3_light.data.building.claims import Claims
from sd3_light.encoders.frozen_parts import FrozenParts
from sd3_light.stages import cache
from sd3_light.stages.cache.shard_builder import ShardBuilder

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
    """Photo-like JPEG files: smooth colours with some noise, so that they weigh what photos do."""
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
    """``count`` pictures, drawn by several processes."""
    folder.mkdir(parents=True)
    step = -(-count // (4 * processes))
    with ProcessPoolExecutor(processes) as pool:
        jobs = [pool.submit(draw, folder, first, min(step, count - first)) for first in range(0, count, step)]
        for job in jobs:
            job.result()


def write_config(out: Path, name: str, text: str, model: Path, given: argparse.Namespace) -> LoadedConfig:
    """A config whose data set is the folder ``name``."""
    data = out / f"{name}.toml"
    data.write_text(f'resolutions = [{given.side}]\n[[directory]]\npath = "{name}"\n')
    train = out / f"train-{name}-{text}.toml"
    size, length = ("tiny2", 16) if given.tiny else ("sd3_light", 256)
    train.write_text(
        TRAIN.format(
            dataset=data.name, text=f"{text}", batch=given.batch_size, workers=given.workers, shard=given.shard_size,
            model=model, size=size, length=length,
        ).replace("cache-", f"cache-{name}-")
    )  # fmt: skip
    return load_config(train)


def plan_of(loaded: LoadedConfig) -> CachePlan:
    """The plan of a cache that has been built."""
    folder = loaded.dataset.cache_dir
    assert isinstance(folder, Path)
    with Claims(folder / "claims") as claims:
        catalogue = Catalogue(folder, claims)
        listings = catalogue.refresh(make_sources(loaded.dataset.directories), lambda _: None)
        return make_cache_plan(catalogue, listings, cache.make_recipe(loaded.train), loaded.train.sd3_shard_size)


def alone(loaded: LoadedConfig, device: torch.device, wait: bool = True) -> dict[str, float]:
    """Seconds of the encoders on ready inputs: all together, and each by itself."""
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
        text_tokens=train.model.text_tokens, batch_size=train.caching_batch_size,
    ) as parts:  # fmt: skip
        work = []
        for bucket, captions in units:
            distinct = list(dict.fromkeys(caption for own in captions for caption in own))
            work.append((bucket, len(captions), parts.tokenize(distinct)))

        def run(pictures: bool, names: tuple[str, ...], units: int | None = None) -> float:
            begun = time.perf_counter()
            for bucket, count, tokens in work[:units]:
                for start in range(0, count if pictures else 0, train.caching_batch_size):
                    parts.encode_images(batches[bucket][: min(train.caching_batch_size, count - start)], False)
                for name in names:
                    parts.encode_text(name, tokens[name])
            parts.synchronize()
            return time.perf_counter() - begun

        everything = ("clip_l", "clip_g", "t5")
        run(True, everything, 2)
        found = {"all": run(True, everything), "vae": run(True, ())}
        return {**found, **{name: run(False, (name,)) for name in everything}}


def timed_build(loaded: LoadedConfig) -> tuple[float, float, float, int]:
    """Seconds of the whole stage, of loading the encoders and of encoding, and the number of samples."""
    spent: list[float] = []
    real = ShardBuilder.build

    def build(self: ShardBuilder, *given: object) -> None:
        begun = time.perf_counter()
        for name in PARTS:
            self._parts.part(name)
        spent.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        real(self, *given)  # type: ignore[arg-type]
        spent.append(time.perf_counter() - begun)

    ShardBuilder.build = build  # type: ignore[method-assign]
    try:
        begun = time.perf_counter()
        (report,) = cache.run(loaded)
        return time.perf_counter() - begun, *spent, report.encoded  # type: ignore[return-value]
    finally:
        ShardBuilder.build = real  # type: ignore[method-assign]


def measure(out: Path, text: str, model: Path, given: argparse.Namespace, device: torch.device) -> None:
    """One line of results for one way to keep text."""
    main = write_config(out, "pictures", text, model, given)
    whole, loading, first, count = timed_build(main)
    # the first build paid for the libraries' warm-up: build the same again
    shutil.rmtree(main.dataset.cache_dir / "shards")  # type: ignore[operator]
    again, _, encode, _ = timed_build(main)
    own = alone(main, device)
    size = sum(p.stat().st_size for p in main.dataset.cache_dir.glob("shards/*.safetensors"))  # type: ignore[union-attr]
    print(f"\n{text}: {count} samples of {given.side} px, batches of {given.batch_size}, {given.workers} decoders")
    print(f"  encoders alone  {count / own['all']:8.1f} images/s   ({own['all']:.1f} s)")
    total = sum(own[part] for part in PARTS)
    print("  share of each   " + ", ".join(f"{part} {own[part] / total:.1%}" for part in PARTS))
    print("  each alone      " + ", ".join(f"{part} {count / own[part]:.0f}/s" for part in PARTS))
    print(f"  build, encoding {count / encode:8.1f} images/s   ({encode:.1f} s; the first time {first:.1f} s)")
    print(f"  whole stage     {whole:.1f} s first (looks at all, loads {loading:.1f} s), {again:.1f} s again")
    print(f"  encode / alone  {own['all'] / encode:8.3f}")
    print(f"  on disk         {size / count / 1e6:.3f} MB a sample")


def main() -> None:
    """Parse, prepare, measure."""
    parser = argparse.ArgumentParser(description="The cache build against the encoders alone.")
    parser.add_argument("--out", type=Path, help="folder to work in; default: a temporary one")
    parser.add_argument("--pictures", type=int, default=6000)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--shard_size", type=int, default=1024)
    parser.add_argument("--text_tokens", nargs="+", default=["real", "padded"])
    parser.add_argument("--tiny", action="store_true", help="the demo's parts, to try the benchmark on a CPU")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        model = make_folder(out, device, given.tiny)
        if not (out / "pictures").is_dir():
            draw_all(out / "pictures", given.pictures, given.workers)
        for text in given.text_tokens:
            measure(out, text, model, given, device)


if __name__ == "__main__":
    main()
