"""Compares the loader's throughput from an S3 server with that of plain parallel range reads of the same objects.

    python benchmarks/remote_read.py [--latency 50] [--errors 0.01] [--workers 0 1 2] [--range-kib 1024] [--in-flight 8]

Writes a cache of random numbers and uploads it to moto's S3 server in another process. A layer in front of the server
delays every answer by ``--latency`` ms and answers a share of ``--errors`` of the requests for shards with 503. Then it
alternates, ``--repeats`` times:

    plain    each of N processes keeps ``--in-flight`` requests for ranges running, and throws the bytes away
    hashed   the same, but each range is written to a file, and each complete file is hashed
    loader   one epoch in training order with N workers, each with as many requests; the disk cache is empty at first

The main result is loader / plain. All use the same library with the same retries. With 0 workers they run in this
process, which has a connection already; otherwise each measurement starts its processes. Ranges are smaller than those
of training, so that latency limits them and not the CPU, which client and server share here. Where cores are few, the
CPU limits them all the same: the CPU times per MB of the server and of its clients show it, and hashed / plain is the
most that a loader can reach that verifies what it keeps.
"""

import argparse
import hashlib
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
from cache_read import LABEL, PassThrough, build

from sd3_light.data.loader import PipelineDataLoader
from sd3_light.data.manifest import SHARDS, Manifest, ShardEntry
from sd3_light.data.store import RemoteStore, remote
from sd3_light.data.stream import CachedDataset, MicroBatches
from sd3_light.urls import with_retries

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
    WSGIRequestHandler.protocol_version = "HTTP/1.1"  # as S3; but unlike S3, this server closes every connection
    app = SlowApp(DomainDispatcherApplication(create_backend_app), latency, errors)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    ready.send(server.server_port)
    server.serve_forever()


@contextmanager
def running_server(latency: float, errors: float) -> Iterator[int]:
    """Run the server in another process and yield its pid; its address and credentials are in the environment."""
    receiver, sender = FORK.Pipe()
    process = FORK.Process(target=serve, args=(latency, errors, sender), daemon=True)
    process.start()
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{receiver.recv()}", **keys}
    assert process.pid is not None
    try:
        yield process.pid
    finally:
        process.kill()
        process.join()


def ranges_of(entry: ShardEntry) -> list[Range]:
    """Return all ranges of a shard."""
    size = remote.RANGE_BYTES
    return [
        (f"{URL}/{SHARDS}/{entry.file}", start, min(start + size, entry.bytes)) for start in range(0, entry.bytes, size)
    ]


def read_range(part: Range) -> bytes:
    """Return the bytes of a range."""
    url, start, end = part
    data: bytes = with_retries(url, lambda files, path: files.cat_file(path, start=start, end=end))
    assert len(data) == end - start
    return data


def read_shards(entries: Sequence[ShardEntry], in_flight: int, folder: Path | None) -> None:
    """Read shards with some threads. With a folder, write each range to a file, and hash each complete file."""

    def read(part: Range) -> None:
        data = read_range(part)
        if folder is not None:
            with open(folder / os.path.basename(part[0]), "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), data, part[1])

    def check(entry: ShardEntry, parts: list["Future[None]"]) -> None:
        for part in parts:
            part.result()
        if folder is not None:
            with open(folder / entry.file, "rb", buffering=0) as file:
                assert hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256

    with ThreadPoolExecutor(in_flight) as pool, ThreadPoolExecutor(4) as hashing:
        checks = []
        for entry in entries:
            if folder is not None:
                (folder / entry.file).touch()
            checks.append(hashing.submit(check, entry, [pool.submit(read, part) for part in ranges_of(entry)]))
        for future in checks:
            future.result()


def plain(manifest: Manifest, processes: int, in_flight: int, folder: Path | None = None) -> None:
    """Read all shards with plain range requests; with a folder, write and hash them."""
    if folder is not None:
        folder.mkdir()
    if processes == 0:
        read_shards(manifest.shards, in_flight, folder)
    shares = [list(islice(manifest.shards, first, None, processes)) for first in range(processes)]
    readers = [FORK.Process(target=read_shards, args=(share, in_flight, folder)) for share in shares]
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


def cpu_seconds(server: int) -> tuple[float, float]:
    """Return the CPU seconds of the server, and of this process with the children that have ended."""
    ticks = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def measure(manifest: Manifest, folder: Path, workers: int, server: int, args: argparse.Namespace) -> None:
    """Print the throughput and CPU time of each way with some workers."""
    megabytes, kept = sum(entry.bytes for entry in manifest.shards) / 1e6, folder / "kept"
    ways: dict[str, Callable[[], None]] = {
        "plain": lambda: plain(manifest, workers, args.in_flight),
        "hashed": lambda: plain(manifest, workers, args.in_flight, kept),
        "loader": lambda: loader(kept, workers, args.batch, args.window),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, read in ways.items():
            before, started = cpu_seconds(server), time.perf_counter()
            read()
            rates[name].append(megabytes / (time.perf_counter() - started))
            used = zip(before, cpu_seconds(server), strict=True)
            cpu[name].append(tuple((end - start) / megabytes * 1e3 for start, end in used))
            shutil.rmtree(kept, ignore_errors=True)
    print(f"{workers} workers, {args.in_flight} requests per process", flush=True)
    for name, values in rates.items():
        ratio = statistics.median(rate / slow for rate, slow in zip(values, rates["plain"], strict=True))
        by_server, by_clients = (statistics.median(column) for column in zip(*cpu[name], strict=True))
        print(
            f"  {name:7}{ratio:5.2f} of plain, {[round(rate, 1) for rate in values]} MB/s, "
            f"CPU ms per MB: {by_server:.1f} server, {by_clients:.1f} clients",
            flush=True,
        )


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
    with tempfile.TemporaryDirectory() as folder, running_server(args.latency / 1000, args.errors) as server:
        manifest = build(Path(folder, "cache"), "real", args.shards, args.samples)
        upload(Path(folder, "cache"))
        nbytes = sum(entry.bytes for entry in manifest.shards)
        print(f"{args.shards} shards, {nbytes / 1e6:.0f} MB, {args.latency:g} ms, {args.errors:.1%} errors", flush=True)
        for workers in args.workers:
            measure(manifest, Path(folder), workers, server, args)


def upload(folder: Path) -> None:
    """Copy a cache to the server."""
    files = fsspec.filesystem("s3")
    files.mkdir("benchmark")
    files.put(str(folder), URL, recursive=True)


if __name__ == "__main__":
    main()
