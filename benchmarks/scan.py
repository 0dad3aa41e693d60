"""Speed and memory of listing a directory: `scan` and `signature` over synthetic files.

    python benchmarks/scan.py [--files 1000000] [--flat] [--tmp FOLDER]

Creates N files (a one-byte .jpg and a short .txt per image) in a temporary folder, then measures each part in its own
process, with a tenth of the files and with all of them. `scan` reads the caption files; `listing only` is a scan whose
`subsample_ratio` skips 999 of 1000; `scan of a table` reads the captions from one metadata.jsonl instead. Memory is
constant if it does not grow from N/10 to N; `imports only` is the baseline of the process.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sd3_light.config import DirectoryConfig
from sd3_light.sources.scan import scan
from sd3_light.sources.signature import signature

FOLDERS = 16


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=1_000_000, help="number of files, two per image")
    parser.add_argument("--flat", action="store_true", help="all files in one folder")
    parser.add_argument("--tmp", type=Path, default=None, help="working folder; default: the system's temporary folder")
    options = parser.parse_args()
    folders = 1 if options.flat else FOLDERS
    print(f"{options.files:,} files in {folders} folder(s)")
    print(f"{'part':16} {'files':>10} {'seconds':>8} {'files/s':>10} {'peak MB':>8}")
    for files in (options.files // 10, options.files):
        with tempfile.TemporaryDirectory(dir=options.tmp, prefix="scan-") as folder:
            root = Path(folder, "set")
            write_files(root, files // 2, folders)
            print_line("imports only", 0, lambda: None)
            print_line("signature", files, partial(signature, directory(root), 0))
            print_line("listing only", files, partial(drain, root, 0.001))
            print_line("scan", files, partial(drain, root))
            table(root, files // 2, folders)
            print_line("scan of a table", files, partial(drain, root))


def write_files(root: Path, images: int, folders: int) -> None:
    """Write the images and their captions, distributed over the folders."""
    for folder in range(folders):
        (root / f"{folder:02d}").mkdir(parents=True)
    for number in range(images):
        stem = f"{root}/{name(number, folders)}"
        for suffix, content in (("jpg", b"x"), ("txt", f"a synthetic caption, number {number}".encode())):
            with open(f"{stem}.{suffix}", "wb", buffering=0) as file:
                file.write(content)


def table(root: Path, images: int, folders: int) -> None:
    """Write a caption table of all images into the parent folder."""
    with open(root / "metadata.jsonl", "w", encoding="utf-8") as file:
        for number in range(images):
            row = {"file_name": f"{name(number, folders)}.jpg", "text": f"a synthetic caption, number {number}"}
            file.write(json.dumps(row) + "\n")


def name(number: int, folders: int) -> str:
    """Return the path of an image below the root, without its suffix."""
    return f"{number % folders:02d}/{number:09d}"


def directory(root: Path, ratio: float = 1.0) -> DirectoryConfig:
    """Return the directory as a dataset would define it."""
    return DirectoryConfig(path=root, resolutions=((256, 256),), subsample_ratio=ratio)


def drain(root: Path, ratio: float = 1.0) -> None:
    """Scan the whole directory without storing anything."""
    for _ in scan(directory(root, ratio), 0):
        pass


def print_line(part: str, files: int, work: Callable[[], object]) -> None:
    """Measure one part in a new process and print its line."""
    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_measure, args=(work, sender))
    process.start()
    seconds, peak = receiver.recv()
    process.join()
    rate = f"{files / seconds:10,.0f}" if files else " " * 10
    print(f"{part:16} {files:10,} {seconds:8.2f} {rate} {peak / 1024:8.1f}", flush=True)


def _measure(work: Callable[[], object], results: "Connection[Any, Any]") -> None:
    start = time.perf_counter()
    work()
    results.send((time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


if __name__ == "__main__":
    main()
