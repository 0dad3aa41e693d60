"""Run a list of commands on a GPU machine within a time limit, and keep what each of them printed and wrote.

    python benchmarks/run_list.py LIST.toml OUT --group NAME [--minutes 9] [--mps]

LIST has tables of commands: `[[speed]]` with `run = "python benchmarks/peers.py {out} ..."`, and optionally
`seconds = 200` (its own limit), `lane = "b"` (lanes run at the same time, the commands of one lane one after another),
and `needs = 120` (seconds that must be left for it to start; otherwise it is listed as not started). With `--mps` the
lanes share the GPU under NVIDIA's MPS. `{out}` is the command's separate folder OUT/NUMBER, and `python` the one that
runs the list (`gpu_runs.toml`). All that a command started ends with it. OUT/summary.txt has a row per command, written
as soon as it ends: state, seconds, command, and its last lines.
"""

import argparse
import shlex
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lanes import end, mps

LAST_LINES = 12


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
        """End everything that runs."""
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
        with self._lock, (self.out / "summary.txt").open("a", encoding="utf-8") as file:
            file.write(text)
            print(text, end="", flush=True)


def main() -> None:
    """Run a group of the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path, help="TOML of commands")
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--group", required=True, help="name of the table")
    parser.add_argument("--minutes", type=float, default=9, help="end everything after this time")
    parser.add_argument("--mps", action="store_true", help="share the GPU under NVIDIA's MPS, where it is installed")
    args = parser.parse_args()
    groups = tomllib.loads(args.list.read_text(encoding="utf-8"))
    if args.group not in groups:
        parser.error(f"{args.list} has no [[{args.group}]]; choose from: {', '.join(groups)}")
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out.absolute()
    entries = [
        Entry(number, **{**table, "folder": out / str(number)})
        for number, table in enumerate(groups[args.group], start=1)
    ]
    lanes = {entry.lane: [each for each in entries if each.lane == entry.lane] for entry in entries}
    with mps(args.mps) as environment:
        runner = Runner(out, time.monotonic() + 60 * args.minutes, environment)
        signal.signal(signal.SIGTERM, lambda *_: (runner.end_all(), sys.exit("ended")))
        with ThreadPoolExecutor(len(lanes)) as pool:
            list(pool.map(runner.run_lane, lanes.values()))


if __name__ == "__main__":
    main()
