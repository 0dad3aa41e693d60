"""Compares the loader's throughput from an S3 server with that of plain parallel range reads of the same objects.

    python benchmarks/remote_read.py [--latency 50] [--errors 0.01] [--workers 0 1 2] [--range-kib 1024] [--in-flight 8]

Writes a cache of random numbers and uploads it to moto's S3 server in another process. A layer in front of the server
delays every answer by ``--latency`` ms and answers a share of ``--errors`` of the requests for shards with 503. Then it
alternates, ``--repeats`` times:

    plain    each of N processes keeps ``--in-flight`` requests for ranges running, and throws the bytes away
    loader   one epoch in training order with N workers, each with as many requests; the disk cache is empty at first

The main result is loader / plain. Both use the same library with the same retries. With 0 workers both run in this
process, which has a connection already; otherwise each measurement starts its processes. Ranges are smaller than those
of training, so that latency limits both and not the CPU, which client and server share here.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
from cache_read import LABEL, PassThrough, build

from sd3_light.data.loader import PipelineDataLoader
from sd3_light.data.manifest import SHARDS, Manifest
from sd3_light.data.store import RemoteStore, remote
from sd3_light.data.store.protocols import with_retries
from sd3_light.data.stream import CachedDataset, MicroBatches

URL = "s3://benchmark/cache"
FORK = multiprocessing.get_context("fork")
BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate</Message></Error>"
Range = tuple[str, int, int]


class SlowApp:
    """WSGI middleware: delays requests for objects and rejects a share of them."""

    def __init__(self, app: Any, latency: float, errors: float) -> None:
        self.app, self.latency, self.errors, self.random = app, latency, errors, random.Random(0)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "GET" and SHARDS in environ["PATH_INFO"]:
            time.sleep(self.latency)
            if self.random.random() < self.errors:
                start_response("503 Slow Down", [("Content-Type", "application/xml")])
                return [BUSY]
        answer: Iterable[bytes] = self.app(environ, start_response)
        return answer


def serve(latency: float, errors: float, ready: "Connection[Any, Any]") -> None:
    """Run the server in this process."""
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    WSGIRequestHandler.protocol_version = "HTTP/1.1"  # connections are kept, as by S3
    app = SlowApp(DomainDispatcherApplication(create_backend_app), latency, errors)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    ready.send(server.server_port)
    server.serve_forever()


@contextmanager
def running_server(latency: float, errors: float) -> Iterator[None]:
    """Run the server in another process; its address and credentials are in the environment."""
    receiver, sender = FORK.Pipe()
    process = FORK.Process(target=serve, args=(latency, errors, sender), daemon=True)
    process.start()
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{receiver.recv()}", **keys}
    try:
        yield
    finally:
        process.kill()
        process.join()


def ranges_of(manifest: Manifest) -> list[Range]:
    """Return all ranges of all shards."""
    size = remote.RANGE_BYTES
    return [
        (f"{URL}/{SHARDS}/{entry.file}", start, min(start + size, entry.bytes))
        for entry in manifest.shards
        for start in range(0, entry.bytes, size)
    ]


def read_ranges(ranges: list[Range], in_flight: int) -> None:
    """Read ranges with some threads."""

    def read(part: Range) -> int:
        url, start, end = part
        return len(with_retries(url, lambda files, path: files.cat_file(path, start=start, end=end)))

    with ThreadPoolExecutor(in_flight) as pool:
        assert sum(pool.map(read, ranges)) == sum(end - start for _, start, end in ranges)


def plain(manifest: Manifest, processes: int, in_flight: int) -> None:
    """Read all shards with plain range requests."""
    ranges = ranges_of(manifest)
    if processes == 0:
        read_ranges(ranges, in_flight)
    readers = [
        FORK.Process(target=read_ranges, args=(list(islice(ranges, first, None, processes)), in_flight))
        for first in range(processes)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
        assert reader.exitcode == 0


def loader(folder: Path, workers: int, batch: int, window: int) -> None:
    """Read one epoch through the loader, starting with an empty disk cache."""
    data = CachedDataset(RemoteStore(URL, folder, 10**12, window))
    order = data.order(0, {LABEL: 1.0}, lambda resolution: batch, window)
    steps = range(order.steps_per_epoch)
    batches = MicroBatches(data, order, 0, 1, 1)
    batches.prefetch_step(0)  # as training does while the model is loading
    for _ in PipelineDataLoader(batches, None, 1, PassThrough(), num_dataloader_workers=workers, items=steps):
        pass


def seconds(work: Callable[..., None], *arguments: Any) -> float:
    """Return the seconds of a call."""
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def measure(manifest: Manifest, folder: Path, workers: int, args: argparse.Namespace) -> None:
    """Print the throughput of both with some workers."""
    nbytes = sum(entry.bytes for entry in manifest.shards)
    rates: dict[str, list[float]] = {"plain": [], "loader": []}
    for _ in range(args.repeats):
        rates["plain"].append(nbytes / seconds(plain, manifest, workers, args.in_flight))
        rates["loader"].append(nbytes / seconds(loader, folder / "kept", workers, args.batch, args.window))
        shutil.rmtree(folder / "kept")
    ratios = [fast / slow for fast, slow in zip(rates["loader"], rates["plain"], strict=True)]
    figures = "; ".join(f"{name} {[round(rate / 1e6, 1) for rate in values]}" for name, values in rates.items())
    print(f"{workers} workers, {args.in_flight} requests per process: {figures} MB/s; ", end="")
    print(f"loader / plain {statistics.median(ratios):.2f}", flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--latency", type=float, default=50.0, help="milliseconds per request")
    parser.add_argument("--errors", type=float, default=0.01, help="share of requests that fail")
    parser.add_argument("--shards", type=int, default=48)
    parser.add_argument("--samples", type=int, default=32, help="per shard, of 0.35 MB each")
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--range-kib", type=int, default=1024)
    parser.add_argument("--in-flight", type=int, default=8, help="requests of each process")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    remote.RANGE_BYTES, remote.RANGES_IN_FLIGHT = args.range_kib << 10, args.in_flight
    with tempfile.TemporaryDirectory() as folder, running_server(args.latency / 1000, args.errors):
        manifest = build(Path(folder, "cache"), "real", args.shards, args.samples)
        upload(Path(folder, "cache"))
        nbytes = sum(entry.bytes for entry in manifest.shards)
        print(f"{args.shards} shards, {nbytes / 1e6:.0f} MB, {args.latency:g} ms, {args.errors:.1%} errors", flush=True)
        for workers in args.workers:
            measure(manifest, Path(folder), workers, args)


def upload(folder: Path) -> None:
    """Copy a cache to the server."""
    files = fsspec.filesystem("s3")
    files.mkdir("benchmark")
    files.put(str(folder), URL, recursive=True)


if __name__ == "__main__":
    main()
