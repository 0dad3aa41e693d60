"""The cache stage on Ray: the speed of two encoders compared with one, and the memory of driver and encoders.

    python benchmarks/ray_cache.py speed [--images 1200]              # two free cores, three minutes
    python benchmarks/ray_cache.py memory [--samples 10000 100000 1000000]

Both start a local Ray cluster of four CPUs, so that Ray keeps two processes for decoding beside two encoders; set
RAY_worker_niceness=0 where other programs run. `speed` builds a cache of generated images with the demo's encoders, one
CPU thread each, once to warm up and once more for the measurement, with one and with two encoders. `memory` builds
caches of tiny images with encoders that return zeros, each in a new process, and prints the peaks of anonymous memory:
those of the driver above the value when it is connected, and those of the largest encoder.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import memory
import ray

from sd3_light.cache import ray_builder
from sd3_light.cache.dataset_build import DatasetBuild
from sd3_light.cache.ray_builder import RayBuilder
from sd3_light.cache.ray_encoder import EncoderSettings, ShardEncoder
from sd3_light.cache.verb import CacheOptions
from sd3_light.config import LoadedConfig, load_config
from sd3_light.engines import Launch
from sd3_light.families.sd3 import encoders as frozen_parts
from sd3_light.world import write_dataset

OBJECT_STORE = 100 << 20
NUM_CPUS = 4
SHARDS = ("sd3_shard_size=16", "caching_batch_size=8")  # small, so that both encoders end at the same time
DATA = 'size_buckets = [[64, 64], [80, 48], [48, 80]]\n[[directory]]\npath = "images"\n'


class ZeroEncoder(ShardEncoder):
    """An actor whose encoders return zeros."""

    def __init__(self, settings: EncoderSettings) -> None:
        frozen_parts.FrozenParts = memory.ZeroEncoders  # type: ignore[assignment, misc]
        super().__init__(settings)


@contextmanager
def builder_of(loaded: LoadedConfig, actors: int) -> Iterator[RayBuilder]:
    """Yield a builder whose encoders have started, on a new local cluster."""
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        object_store_memory=OBJECT_STORE,
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        with RayBuilder(loaded.train, "", actors) as builder:
            while len(builder.pool.ready(actors)) < actors:
                time.sleep(0.1)
            yield builder
    finally:
        ray.shutdown()


# --- speed ----------------------------------------------------------------------------------------


def measure_speed(folder: Path, images: int) -> None:
    """Print the images per second of one and two encoders, and their ratio."""
    write_dataset(folder / "images", images, seed=1)
    (folder / "train.toml").write_text(memory.TRAIN, encoding="utf-8")
    (folder / "data.toml").write_text(DATA, encoding="utf-8")
    rates = []
    for actors in (1, 2):
        loaded = load_config(folder / "train.toml", [*SHARDS, f"cache_dir={folder / f'cache-{actors}'}"])
        with builder_of(loaded, actors) as builder:
            for options in (CacheOptions(), CacheOptions(regenerate=True)):
                started = time.perf_counter()
                report = DatasetBuild(loaded.train, Launch(), options, builder).build("", loaded.dataset)
                seconds = time.perf_counter() - started
        rates.append(report.encoded / seconds)
        print(f"{actors} encoders: {report.encoded} images in {seconds:.1f} s, {rates[-1]:.1f} images/s", flush=True)
    print(f"two encoders are {rates[1] / rates[0]:.2f} times as fast as one")


# --- memory ---------------------------------------------------------------------------------------


class PeakMeter:
    """Samples the anonymous memory of processes; peaks in KiB."""

    def __init__(self, processes: list[int], interval: float = 0.05) -> None:
        self.peaks = dict.fromkeys(processes, 0)
        self.first = {process: memory.status(process)["RssAnon"] for process in processes}
        self._interval, self._stop = interval, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMeter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            for process in self.peaks:
                self.peaks[process] = max(self.peaks[process], memory.status(process).get("RssAnon", 0))


def measure_memory(folder: Path, samples: int) -> None:
    """Print the peaks of driver and encoders for a number of samples; called in a new process."""
    memory.write_samples(folder, samples)
    ray_builder.ShardEncoder = ZeroEncoder  # type: ignore[misc]
    loaded = load_config(folder / "train.toml")
    with builder_of(loaded, 2) as builder:
        actors: list[Any] = builder.pool.ready(2)
        processes = [ray.get(actor.handle.__ray_call__.remote(lambda self: os.getpid())) for actor in actors]
        with PeakMeter([os.getpid(), *processes]) as meter:
            started = time.perf_counter()
            report = DatasetBuild(loaded.train, Launch(), CacheOptions(), builder).build("", loaded.dataset)
            seconds = time.perf_counter() - started
    assert report.encoded == samples, report
    driver = meter.peaks[os.getpid()] - meter.first[os.getpid()]
    encoder = max(meter.peaks[process] for process in processes)
    print(
        f"{samples:,} samples: driver +{driver / 1024:.0f} MiB, largest encoder {encoder / 1024:.0f} MiB, "
        f"{seconds:.0f} s",
        flush=True,
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["speed", "memory"])
    parser.add_argument("--images", type=int, default=1200)
    parser.add_argument("--samples", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--tmp", type=Path, help="where to write (default: the system's temp folder)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for samples in args.samples if args.part == "memory" and not args.child else ():
        command = [sys.executable, __file__, "memory", "--child", "--samples", str(samples)]
        subprocess.run([*command, *(["--tmp", str(args.tmp)] if args.tmp else [])], check=True)
    if args.part == "speed" or args.child:
        with tempfile.TemporaryDirectory(dir=args.tmp) as folder:
            if args.part == "speed":
                measure_speed(Path(folder), args.images)
            else:
                measure_memory(Path(folder), args.samples[0])


if __name__ == "__main__":
    main()
