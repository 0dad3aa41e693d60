"""How much host memory the data path takes at its peak, and what of it grows with the number of samples.

    python benchmarks/memory.py [--samples 1000000] [--parts list look ...] [--tmp FOLDER]

Makes tars of 10,000 tiny pictures with a caption each, a tenth of N and then N samples, and runs each part of the data
path in a process of its own: listing, looking, planning, building by the cache stage (with encoders that return zeros:
their weights are not what is measured), the stage again when nothing changed, the stage's comparison when every shard
has to be another one (mirrored pictures are wanted too), and an epoch through the loader with 0 and 2 workers.

`anon` is the peak of memory that is the process's own, beyond what it takes after imports; `rss` also counts pages of
files that are mapped, which the kernel takes back at will; `worker` is what the largest worker process has for itself.
Beside them: bytes of the manifest and number of units, the two that may grow.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from sd3_light.assets import DEMO
from sd3_light.config import LoadedConfig, load_config
from sd3_light.data.building.cache_plan import make_cache_plan
from sd3_light.data.building.catalogue import Catalogue, Listing, make_sources
from sd3_light.data.building.claims import Claims
from sd3_light.data.loader import PipelineDataLoader
from sd3_light.data.stream import MicroBatches
from sd3_light.engines import Launch
from sd3_light.stages import cache
from sd3_light.training.data import make_order, open_cache

A_TAR = 10_000
SIZES = ((16, 16), (32, 16), (16, 32))
VARIANTS = 4
PARTS = ("list", "look", "plan", "build", "again", "stale", "read0", "read2")
WIDTHS = {"clip_l": 4, "clip_g": 4, "t5": 8}
TOKENS = 2
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
MORE = "flip = true\n"


# --- the samples -----------------------------------------------------------------------------------


def lay(folder: Path, count: int) -> None:
    """A data set of ``count`` samples in tars, and the TOML files that name it."""
    (folder / "set").mkdir(parents=True)
    pictures = [png(size, seed) for size in SIZES for seed in range(VARIANTS)]
    for first in range(0, count, A_TAR):
        with open(folder / "set" / f"{first // A_TAR:05d}.tar", "wb") as file:
            for number in range(first, min(first + A_TAR, count)):
                file.write(member(f"{number:09d}.png", pictures[number * 7 % len(pictures)]))
                file.write(member(f"{number:09d}.txt", f"a synthetic caption, number {number}".encode()))
            file.write(bytes(2 * tarfile.BLOCKSIZE))
    (folder / "train.toml").write_text(TRAIN, encoding="utf-8")
    (folder / "data.toml").write_text(DATA, encoding="utf-8")


def data_toml(part: str) -> str:
    """The dataset TOML of a part."""
    return DATA + (MORE if part == "stale" else "")


def png(size: tuple[int, int], seed: int) -> bytes:
    """The bytes of a small picture."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8) // 64 * 64
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def member(name: str, data: bytes) -> bytes:
    """A file as it stands in a tar."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


# --- encoders that cost nothing --------------------------------------------------------------------


class NoParts:
    """In place of `FrozenParts`: zeros of the right shapes."""

    latent_channels = 16

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def encode_images(self, pixels: NDArray[np.uint8], flip: bool) -> Tensor:
        count, height, width, _ = pixels.shape
        shape = (count, 1 + flip, 2 * self.latent_channels, height // 8, width // 8)
        return torch.zeros(shape, dtype=torch.float16)

    def tokenize(self, captions: Sequence[str]) -> int:
        return len(captions)

    def encode_captions(self, captions: Sequence[str] | int) -> dict[str, Tensor]:
        count = captions if isinstance(captions, int) else len(captions)
        text = {f"{name}.tokens": (count * TOKENS, width) for name, width in WIDTHS.items()}
        text |= {f"{name}.pooled": (count, WIDTHS[name]) for name in ("clip_l", "clip_g")}
        starts = {f"{name}.start": torch.arange(count + 1) * TOKENS for name in WIDTHS}
        return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in text.items()} | starts

    def synchronize(self) -> None:
        pass

    def waiter(self) -> Callable[[], None]:
        return self.synchronize

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class HandOn:
    """A model that prepares nothing."""

    def prepare_inputs(self, batch: Any, timestep_quantile: float | None = None) -> Any:
        return (batch,), ()


# --- the parts -------------------------------------------------------------------------------------


def run_part(part: str, folder: Path) -> None:
    """One part of the data path over what the parts before it left in ``folder``."""
    loaded = load_config(folder / "train.toml")
    if part in ("list", "look", "plan"):
        prepare(part, loaded)
    elif part.startswith("read"):
        read(loaded, int(part.removeprefix("read")))
    else:
        cache.FrozenParts = NoParts  # type: ignore[assignment, attr-defined]
        cache.run(loaded, options=cache.CacheOptions(dry_run=part == "stale"))


def prepare(part: str, loaded: LoadedConfig) -> None:
    """List, look or plan; what came before is found done."""
    folder, train = loaded.dataset.local_cache_dir, loaded.train
    folder.mkdir(parents=True, exist_ok=True)
    with Claims(folder / "claims") as claims:
        catalogue = Catalogue(folder, claims)
        listings: list[Listing] = catalogue.refresh(make_sources(loaded.dataset.directories), lambda _: None)
        if part == "look":
            catalogue.probe_images(listings, train.caching_num_workers, lambda _: None)
        if part == "plan":
            make_cache_plan(catalogue, listings, cache.make_recipe(train), train.sd3_shard_size)


def read(loaded: LoadedConfig, workers: int) -> None:
    """An epoch in training's order."""
    data = open_cache(loaded.dataset, loaded.train, Launch())
    order = make_order(data, loaded, Launch())
    batches, steps = MicroBatches(data, order, 0, 1, 1), range(order.steps_per_epoch)
    seen = 0
    for (batch,), _ in PipelineDataLoader(batches, None, 1, HandOn(), num_dataloader_workers=workers, items=steps):
        seen += len(batch["sample_id"])
    assert seen >= data.manifest.counts["used"]


# --- measuring -------------------------------------------------------------------------------------


class Meter:
    """Samples the memory of this process and of its children; peaks in KiB beyond what was there at the start."""

    def __init__(self, interval: float = 0.02) -> None:
        self._interval, self._stop = interval, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.anon = self.worker = self.rss = 0

    def __enter__(self) -> Self:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the kernel's own peak starts anew
        self._first = status(os.getpid())
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.rss = status(os.getpid())["VmHWM"] - self._first["VmRSS"]

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            own = status(os.getpid())["RssAnon"]
            self.anon = max(self.anon, own - self._first["RssAnon"])
            for child in children(os.getpid()):
                # a forked worker begins with its parent's pages
                self.worker = max(self.worker, private(child))


def status(process: int) -> dict[str, int]:
    """The kernel's figures of a process in KiB; none of one that has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(value) for name, value, _ in pairs}


def private(process: int) -> int:
    """KiB that a process shares with no other."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_Dirty:")), 0)


def children(process: int) -> Iterator[int]:
    """The processes that a process has started."""
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            yield from map(int, (task / "children").read_text(encoding="ascii").split())
        except OSError:
            continue


def measure(part: str, folder: Path) -> dict[str, float]:
    """Run a part in this process; its figures."""
    torch.set_num_threads(1)
    with Meter() as meter:
        begun = time.perf_counter()
        run_part(part, folder)
        seconds = time.perf_counter() - begun
    return {"seconds": seconds, "anon": meter.anon, "rss": meter.rss, "worker": meter.worker}


def measure_apart(part: str, folder: Path) -> dict[str, float]:
    """The figures of a part from a process of its own."""
    command = [sys.executable, __file__, "--child", part, "--tmp", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{part}: {done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def sizes(folder: Path) -> str:
    """The manifest's bytes and the number of units."""
    shards = folder / "cache" / "shards"
    units = len(list(shards.glob("*.safetensors"))) - 1 if shards.is_dir() else 0
    manifest = folder / "cache" / "manifest.json"
    return f"manifest {manifest.stat().st_size / 1e6:.2f} MB, {units:,} units" if manifest.is_file() else ""


def run_all(folder: Path, count: int, parts: Sequence[str]) -> None:
    """Make ``count`` samples and print a line a part."""
    begun = time.perf_counter()
    lay(folder, count)
    print(f"{count:,} samples made in {time.perf_counter() - begun:.0f} s", flush=True)
    for part in parts:
        (folder / "data.toml").write_text(data_toml(part), encoding="utf-8")
        found = measure_apart(part, folder)
        figures = "".join(f"{found[name] / 1024:9.1f}" for name in ("anon", "rss", "worker"))
        rate = count / found["seconds"]
        print(f"{part:6} {count:10,} {found['seconds']:9.1f} {rate:11,.0f} {figures}  {sizes(folder)}", flush=True)


def main() -> None:
    """Parse, make the samples, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tmp", type=Path, help="folder to work in; the system's temporary one if not given")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(f"\n{json.dumps(measure(given.child, given.tmp))}")
        return
    print(f"{'part':6} {'samples':>10} {'seconds':>9} {'samples/s':>11} {'anon MB':>9}{'rss MB':>9}{'worker MB':>10}")
    for count in (given.samples // 10, given.samples):
        with tempfile.TemporaryDirectory(dir=given.tmp, prefix="memory-") as place:
            run_all(Path(place), count, given.parts)


if __name__ == "__main__":
    main()
