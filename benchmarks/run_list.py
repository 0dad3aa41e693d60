"""Run a list of commands on a GPU machine within a time limit, and keep what each of them printed and wrote.

    python benchmarks/run_list.py LIST.toml OUT --group NAME [NAME ...] [--minutes 9] [--pack FOLDER] [--mps]

LIST has tables of commands: `[[speed]]` with `run = "python benchmarks/peers.py {out} ..."`, and optionally
`seconds = 200` (its own limit), `lane = "b"` (lanes run at the same time, the commands of one lane one after another),
and `needs = 120` (seconds that must be left for it to start; otherwise it is listed as not started). With `--mps` the
lanes share the GPU under NVIDIA's MPS. `{out}` is the command's separate folder OUT/NUMBER, and `python` the one that
runs the list (`gpu_runs.toml`). All that a command started ends with it. Several groups run one after another.
OUT/summary.txt has a row per command, written as soon as it ends: state, seconds, command, and its last lines. Every
30 s `--pack` copies it to FOLDER, with the texts of OUT in FOLDER/results.tar.gz (those larger than a megabyte empty):
two files to bring back, also from a machine that is taken away.
"""

import argparse
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from common.processes import end, mps

LAST_LINES = 12
SUMMARY = "summary.txt"
PACK_SECONDS = 30
PACKED = (".txt", ".json", ".jsonl", ".md", ".toml", ".log")
PACKED_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """A command of the list, its folder, and its limits in seconds."""

    number: int
    run: str
    folder: Path
    seconds: float = 600
    needs: float = 30
    lane: str = "a"


class Runner:
    """Runs entries until a deadline; several threads may add to its summary."""

    def __init__(self, out: Path, deadline: float, environment: Mapping[str, str]) -> None:
        self.out = out
        self.deadline = deadline
        self.environment = environment
        self._lock = threading.Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def run_lane(self, entries: list[Entry]) -> None:
        """Run the commands of a lane one after another."""
        for entry in entries:
            self._run(entry)

    def end_all(self) -> None:
        """End everything that runs; nothing else starts."""
        self.deadline = 0.0
        with self._lock:
            for process in self._running.values():
                end(process)

    def _run(self, entry: Entry) -> None:
        left = self.deadline - time.monotonic()
        if left < entry.needs:
            self._report(entry, f"not started, {max(0, left):.0f} s left", 0.0, "")
            return
        entry.folder.mkdir(parents=True, exist_ok=True)
        words = shlex.split(entry.run.replace("{out}", str(entry.folder)))
        command = [sys.executable if word == "python" else word for word in words]
        log = entry.folder / "output.txt"
        started = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
            )
        with self._lock:
            self._running[entry.number] = process
        try:
            state = f"exit code {process.wait(min(entry.seconds, left))}"
        except subprocess.TimeoutExpired:
            state = "out of time"
        end(process)
        with self._lock:
            del self._running[entry.number]
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        self._report(entry, state, time.monotonic() - started, "\n".join(lines[-LAST_LINES:]))

    def _report(self, entry: Entry, state: str, seconds: float, tail: str) -> None:
        text = f"## {entry.number} {state}, {seconds:.0f} s: {entry.run}\n{tail}\n\n"
        with self._lock, (self.out / SUMMARY).open("a", encoding="utf-8") as file:
            file.write(text)
            print(text, end="", flush=True)


def pack(out: Path, folder: Path) -> None:
    """Write the summary, and an archive of the small files."""
    files = [path for path in sorted(out.rglob("*")) if path.suffix in PACKED and path.is_file()]
    unfinished = folder / "unfinished"
    with tarfile.open(unfinished, "w:gz") as archive:
        for path in files:
            try:
                content = path.read_bytes() if path.stat().st_size < PACKED_BYTES else b""
            except FileNotFoundError:  # a command has just removed it
                continue
            entry = tarfile.TarInfo(str(path.relative_to(out)))
            entry.size = len(content)
            archive.addfile(entry, BytesIO(content))
    os.replace(unfinished, folder / "results.tar.gz")
    if (out / SUMMARY).is_file():
        shutil.copy(out / SUMMARY, folder / SUMMARY)


@contextmanager
def packing(out: Path, folder: Path | None) -> Iterator[None]:
    """Pack inside the block every `PACK_SECONDS`, and at its end."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(PACK_SECONDS):
            pack(out, folder)

    packer = threading.Thread(target=work, daemon=True)
    packer.start()
    try:
        yield
    finally:
        ended.set()
        packer.join()
        pack(out, folder)


def run_groups(runner: Runner, groups: Sequence[Sequence[Entry]]) -> None:
    """Run groups one after another, the lanes of each side by side."""
    for entries in groups:
        lanes = {entry.lane: [each for each in entries if each.lane == entry.lane] for entry in entries}
        with ThreadPoolExecutor(len(lanes)) as pool:
            list(pool.map(runner.run_lane, lanes.values()))


def _entry(number: int, table: Mapping[str, Any], out: Path) -> Entry:
    return Entry(number=number, folder=out / str(number), **table)


def main() -> None:
    """Run groups of the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path, help="TOML of commands")
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--group", nargs="+", required=True, help="names of tables")
    parser.add_argument("--minutes", type=float, default=9, help="end everything after this time")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="folder for the summary and an archive of results")
    parser.add_argument("--mps", action="store_true", help="share the GPU under NVIDIA's MPS, where it is installed")
    args = parser.parse_args()
    tables = tomllib.loads(args.list.read_text(encoding="utf-8"))
    if unknown := [name for name in args.group if name not in tables]:
        parser.error(f"{args.list} has no [[{unknown[0]}]]; choose from: {', '.join(tables)}")
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.absolute()
    numbers = itertools.count(1)
    groups = [[_entry(next(numbers), table, out) for table in tables[name]] for name in args.group]
    with mps(args.mps) as environment, packing(out, args.pack):
        runner = Runner(out, deadline, environment)
        signal.signal(signal.SIGTERM, lambda *_: (runner.end_all(), sys.exit("ended")))
        run_groups(runner, groups)


if __name__ == "__main__":
    main()
