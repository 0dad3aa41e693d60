"""Peak host memory of the data path, and how it grows with the number of samples.

    python benchmarks/memory.py [--samples 1000000] [--parts list look ...] [--tmp FOLDER]

Writes tars of 10,000 tiny images with one caption each, for N/10 and then N samples, and runs each part of the data
path in its own process: `list`, `look` (probe the images), `plan`, `build` with the cache stage (with encoders that
return zeros, since their weights are not measured), `again` (the stage when nothing changed), `stale` (the comparison
when every shard is stale because mirrored images are needed too), and an epoch through the loader with 0 and 2 workers
(`read`).

`anon` is the peak of anonymous memory beyond the baseline after imports; `rss` also counts pages of mapped files, which
the kernel can reclaim; `worker` is the private memory of the largest worker process. The size of the manifest and the
number of units, the two that may grow, are printed with them.
"""

import argparse
import gc
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from sd3_light.assets import DEMO
from sd3_light.cache import verb as cache
from sd3_light.cache.recipe import decides_shards
from sd3_light.config import LoadedConfig, load_config
from sd3_light.data.cache_plan import make_cache_plan
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.data.stream import MicroBatches
from sd3_light.engines import Launch
from sd3_light.engines.feed import make_order, open_cache
from sd3_light.families.sd3 import encoders as frozen_parts
from sd3_light.sources.catalogue import Catalogue, Listing, make_sources
from sd3_light.sources.claims import Claims

SAMPLES_PER_TAR = 10_000
SIZES = ((16, 16), (32, 16), (16, 32))
VARIANTS = 4
PARTS = ("list", "look", "plan", "build", "again", "stale", "read0", "read2")
WIDTHS = {"clip_l": 96, "clip_g": 128, "t5": 256}  # the demo's
TOKENS = 1
TRAIN = f"""
output_dir = "run"
dataset = "data.toml"
cache_dir = "cache"
max_steps = 1
save_every_n_steps = 1
micro_batch_size_per_gpu = 64
caching_num_workers = 2
[model]
train_type = "sd3_light_pretrain"
diffusers_path = "{DEMO}"
size = "tiny2"
t5_max_length = 16
text_tokens = "real"
"""
DATA = f'size_buckets = {[list(size) for size in SIZES]}\n[[directory]]\npath = "set"\n'
FLIP = "flip = true\n"


# --- samples -----------------------------------------------------------------------------------


def write_samples(folder: Path, count: int) -> None:
    """Write a dataset of ``count`` samples in tars, and its TOML files."""
    (folder / "set").mkdir(parents=True)
    images = [png(size, seed) for size in SIZES for seed in range(VARIANTS)]
    for first in range(0, count, SAMPLES_PER_TAR):
        with open(folder / "set" / f"{first // SAMPLES_PER_TAR:05d}.tar", "wb") as file:
            for number in range(first, min(first + SAMPLES_PER_TAR, count)):
                file.write(member(f"{number:09d}.png", images[number * 7 % len(images)]))
                file.write(member(f"{number:09d}.txt", f"a synthetic caption, number {number}".encode()))
            file.write(bytes(2 * tarfile.BLOCKSIZE))
    (folder / "train.toml").write_text(TRAIN, encoding="utf-8")
    (folder / "data.toml").write_text(DATA, encoding="utf-8")


def data_toml(part: str) -> str:
    """Return the dataset TOML of a part."""
    return DATA + (FLIP if part == "stale" else "")


def png(size: tuple[int, int], seed: int) -> bytes:
    """Return the bytes of a small image."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8) // 64 * 64
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def member(name: str, data: bytes) -> bytes:
    """Return a file in tar format."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


# --- encoders without cost --------------------------------------------------------------------


class ZeroEncoders:
    """Replaces `FrozenParts`: returns zeros of the right shapes."""

    latent_channels = 16
    device = torch.device("cpu")
    vae_dtype = torch.float32

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def reconstruct(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return pixels

    def encode_images(self, pixels: NDArray[np.uint8], flip: bool) -> dict[str, Tensor]:
        count, height, width, _ = pixels.shape
        shape = (count, 1 + flip, 2 * self.latent_channels, height // 8, width // 8)
        return {"moments": torch.zeros(shape, dtype=torch.float16)}

    def tokenize(self, captions: Sequence[str]) -> int:
        return len(captions)

    def encode_captions(
        self, captions: Sequence[str] | int, columns: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        count = captions if isinstance(captions, int) else len(captions)
        text = {f"{name}.tokens": (count * TOKENS, width) for name, width in WIDTHS.items()}
        text |= {f"{name}.pooled": (count, WIDTHS[name]) for name in ("clip_l", "clip_g")}
        starts = {f"{name}.start": torch.arange(count + 1) * TOKENS for name in WIDTHS}
        return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in text.items()} | starts

    def encode_empty(self) -> dict[str, Tensor]:
        return self.encode_captions([""])

    def synchronize(self) -> None:
        pass

    def waiter(self) -> Callable[[], None]:
        return self.synchronize

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class PassThrough:
    """A model that returns batches unchanged."""

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        return (batch,), ()


# --- the parts -------------------------------------------------------------------------------------


def run_part(part: str, folder: Path) -> None:
    """Run one part of the data path on the results of the earlier parts in ``folder``."""
    loaded = load_config(folder / "train.toml")
    if part in ("list", "look", "plan"):
        prepare(part, loaded)
    elif part.startswith("read"):
        read(loaded, int(part.removeprefix("read")))
    else:
        frozen_parts.FrozenParts = ZeroEncoders  # type: ignore[assignment, misc]
        cache.run(loaded, options=cache.CacheOptions(dry_run=part == "stale"))


def prepare(part: str, loaded: LoadedConfig) -> None:
    """List, probe or plan; earlier parts are already done."""
    folder, train = Path(loaded.dataset.cache_dir), loaded.train
    folder.mkdir(parents=True, exist_ok=True)
    with Claims(folder / "claims") as claims:
        catalogue = Catalogue(folder, claims)
        listings: list[Listing] = catalogue.refresh(make_sources(loaded.dataset.directories), lambda _: None)
        if part == "look":
            catalogue.probe_images(listings, train.caching_num_workers, lambda _: None)
        if part == "plan":
            make_cache_plan(catalogue, listings, decides_shards(cache.make_recipe(train.model)), train.sd3_shard_size)


def read(loaded: LoadedConfig, workers: int) -> None:
    """Read one epoch in training order."""
    data = open_cache(loaded.dataset, loaded.train, Launch())
    order = make_order(data, loaded, Launch())
    batches, steps = MicroBatches(data, order, 0, 1, 1), range(order.steps_per_epoch)
    num_samples = 0
    for (batch,), _ in PipelineDataLoader(batches, None, 1, PassThrough(), num_dataloader_workers=workers, items=steps):
        num_samples += len(batch["sample_id"])
    assert num_samples >= data.manifest.counts["used"]


# --- measuring -------------------------------------------------------------------------------------


class Meter:
    """Samples the memory of this process and its children; peaks in KiB above the initial values."""

    def __init__(self, interval: float = 0.02) -> None:
        self._interval, self._stop = interval, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.anon = self.worker = self.rss = 0

    def __enter__(self) -> Self:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the kernel's peak
        self._first = status(os.getpid())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.rss = status(os.getpid())["VmHWM"] - self._first["VmRSS"]

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            own = status(os.getpid())["RssAnon"]
            self.anon = max(self.anon, own - self._first["RssAnon"])
            for child in children(os.getpid()):
                # a forked worker shares its parent's pages, so only private ones count
                self.worker = max(self.worker, private(child))


def status(process: int) -> dict[str, int]:
    """Return the memory values of a process in KiB; empty if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(value) for name, value, _ in pairs}


def private(process: int) -> int:
    """Return the private memory of a process in KiB."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_Dirty:")), 0)


def children(process: int) -> Iterator[int]:
    """Yield the child processes of a process."""
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            yield from map(int, (task / "children").read_text(encoding="ascii").split())
        except OSError:
            continue


def measure(part: str, folder: Path) -> dict[str, float]:
    """Run a part in this process and return its measurements."""
    torch.set_num_threads(1)
    with Meter() as meter:
        started = time.perf_counter()
        run_part(part, folder)
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "anon": meter.anon, "rss": meter.rss, "worker": meter.worker}


def measure_in_child(part: str, folder: Path) -> dict[str, float]:
    """Run a part in a child process and return its measurements."""
    command = [sys.executable, __file__, "--child", part, "--tmp", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{part}: {done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def sizes(folder: Path) -> str:
    """Return the size of the manifest and the number of units as text."""
    shards = folder / "cache" / "shards"
    units = len(list(shards.glob("*.safetensors"))) - 1 if shards.is_dir() else 0
    manifest = folder / "cache" / "manifest.json"
    return f"manifest {manifest.stat().st_size / 1e6:.2f} MB, {units:,} units" if manifest.is_file() else ""


def run_all(folder: Path, count: int, parts: Sequence[str]) -> None:
    """Write ``count`` samples and print one line per part."""
    started = time.perf_counter()
    write_samples(folder, count)
    print(f"{count:,} samples written in {time.perf_counter() - started:.0f} s", flush=True)
    for part in parts:
        (folder / "data.toml").write_text(data_toml(part), encoding="utf-8")
        results = measure_in_child(part, folder)
        figures = "".join(f"{results[name] / 1024:9.1f}" for name in ("anon", "rss", "worker"))
        rate = count / results["seconds"]
        print(f"{part:6} {count:10,} {results['seconds']:9.1f} {rate:11,.0f} {figures}  {sizes(folder)}", flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tmp", type=Path, help="working folder; default: the system's temporary folder")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(f"\n{json.dumps(measure(args.child, args.tmp))}")
        return
    print(f"{'part':6} {'samples':>10} {'seconds':>9} {'samples/s':>11} {'anon MB':>9}{'rss MB':>9}{'worker MB':>10}")
    for count in (args.samples // 10, args.samples):
        with tempfile.TemporaryDirectory(dir=args.tmp, prefix="memory-") as folder:
            run_all(Path(folder), count, args.parts)


if __name__ == "__main__":
    main()
