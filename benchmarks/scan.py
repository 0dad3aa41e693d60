"""How fast a directory is listed, and in how much memory: `scan` and `signature` over synthetic files.

    python benchmarks/scan.py [--files 1000000] [--flat] [--tmp FOLDER]

Makes N files (a one-byte .jpg and a short .txt for each picture) in a temporary folder, then measures each part in a
process of its own, with a tenth of the files and with all of them. `scan` reads the caption files; `listing alone` is a
scan whose `subsample_ratio` leaves 999 of 1000 unread; `scan of a table` finds the captions in one metadata.jsonl
instead. Memory is flat when it does not grow from N/10 to N; `imports alone` is what the process takes in any case.
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
from sd3_light.data.sources import scan, signature

FOLDERS = 16


def main() -> None:
    """Parse, make the files, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=1_000_000, help="files to make, two for each picture")
    parser.add_argument("--flat", action="store_true", help="all files in one folder, instead of several")
    parser.add_argument(
        "--tmp", type=Path, default=None, help="where to make them; the system's temporary folder if not given"
    )
    options = parser.parse_args()
    folders = 1 if options.flat else FOLDERS
    print(f"{options.files:,} files in {folders} folder(s)")
    print(f"{'part':16} {'files':>10} {'seconds':>8} {'files/s':>10} {'peak MB':>8}")
    for files in (options.files // 10, options.files):
        with tempfile.TemporaryDirectory(dir=options.tmp, prefix="scan-") as place:
            root = Path(place, "set")
            lay(root, files // 2, folders)
            show("imports alone", 0, lambda: None)
            show("signature", files, partial(signature, directory(root), 0))
            show("listing alone", files, partial(drain, root, 0.001))
            show("scan", files, partial(drain, root))
            table(root, files // 2, folders)
            show("scan of a table", files, partial(drain, root))


def lay(root: Path, pictures: int, folders: int) -> None:
    """Pictures 0 .. pictures - 1 and their captions, dealt to the folders."""
    for folder in range(folders):
        (root / f"{folder:02d}").mkdir(parents=True)
    for number in range(pictures):
        stem = f"{root}/{name(number, folders)}"
        for suffix, content in (("jpg", b"x"), ("txt", f"a synthetic caption, number {number}".encode())):
            with open(f"{stem}.{suffix}", "wb", buffering=0) as file:
                file.write(content)


def table(root: Path, pictures: int, folders: int) -> None:
    """A caption table of all pictures, in the folder above them."""
    with open(root / "metadata.jsonl", "w", encoding="utf-8") as file:
        for number in range(pictures):
            row = {"file_name": f"{name(number, folders)}.jpg", "text": f"a synthetic caption, number {number}"}
            file.write(json.dumps(row) + "\n")


def name(number: int, folders: int) -> str:
    """The name of a picture below the root, without its suffix."""
    return f"{number % folders:02d}/{number:09d}"


def directory(root: Path, ratio: float = 1.0) -> DirectoryConfig:
    """The directory as a data set would name it."""
    return DirectoryConfig(path=root, resolutions=((256, 256),), subsample_ratio=ratio)


def drain(root: Path, ratio: float = 1.0) -> None:
    """Scan all of it, keeping nothing."""
    for _ in scan(directory(root, ratio), 0):
        pass


def show(part: str, files: int, work: Callable[[], object]) -> None:
    """Measure one part in a fresh process and print its line."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_measure, args=(work, theirs))
    process.start()
    seconds, peak = ours.recv()
    process.join()
    rate = f"{files / seconds:10,.0f}" if files else " " * 10
    print(f"{part:16} {files:10,} {seconds:8.2f} {rate} {peak / 1024:8.1f}", flush=True)


def _measure(work: Callable[[], object], results: "Connection[Any, Any]") -> None:
    start = time.perf_counter()
    work()
    results.send((time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


if __name__ == "__main__":
    main()
