"""The fuzz job: `python -m tests.fuzz.run --minutes 5`, or `--replay TARGET:SEED:NUMBER` for one case.

Every case must end with exit code 0 or 2, within limits of time and memory, and leave everything outside its output
folder as it was. A case is a pure function of its target, seed and number. Failures are copied to `fuzz-failures/`.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

from tests.fuzz.targets import TARGETS
from tests.fuzz.world import World
from tests.hostile import MEMORY_BYTES, Outcome, changes, run_cli, snapshot
from tests.project import without_proofs

FAILURES = Path("fuzz-failures")
_PROCESS_SECONDS = 180  # a process starts by importing torch
_OUTPUTS = ("out", "cache")


@dataclass(frozen=True)
class Case:
    target: str
    seed: int
    number: int

    def __str__(self) -> str:
        return f"{self.target}:{self.seed}:{self.number}"


@dataclass(frozen=True)
class Result:
    """The command of a case, its outcome, and what is wrong with it ("" if nothing is)."""

    command: list[str]
    outcome: Outcome
    violation: str


def run_case(world: World, case: Case, folder: Path, in_process: bool = True) -> Result:
    """Write the input of a case into the empty ``folder``, run its command and compare the disk before and after."""
    command = TARGETS[case.target](world, folder, random.Random(str(case)))
    outputs = [folder / name for name in _OUTPUTS]
    before = snapshot(world.root), snapshot(folder, outputs)
    if callable(command[0]):  # pages, which no command writes
        with patch("sd3_light.cli.app", partial(*command)):
            outcome = run_cli()
    elif in_process:
        with without_proofs():
            outcome = run_cli(*command)
    else:
        outcome = _run_process([str(item) for item in command])
    touched = [*changes(before[0], snapshot(world.root)), *changes(before[1], snapshot(folder, outputs))]
    return Result([str(item) for item in command], outcome, _violation(outcome, touched, folder))


def _violation(outcome: Outcome, touched: list[str], folder: Path) -> str:
    touched = [path for path in touched if path not in [str(folder / name) for name in _OUTPUTS]]
    if outcome.code not in (0, 2):
        return "hang" if outcome.code == 124 else f"exit code {outcome.code}"
    if "Traceback" in outcome.err:
        return "a traceback"
    return f"touched {touched[0]}" if touched else ""


def _run_process(arguments: list[str]) -> Outcome:
    # the process needs room for the libraries themselves
    limit = f'ulimit -v {(MEMORY_BYTES + (24 << 30)) >> 10}; exec "$@"'
    command = ["bash", "-c", limit, "bash", sys.executable, "-m", "sd3_light", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROCESS_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(124, "", "")
    return Outcome(done.returncode, done.stdout, done.stderr)


def cases(seed: int, targets: list[str]) -> Iterator[Case]:
    """Yield cases of all targets in turn, without end."""
    number = 0
    while True:
        yield from (Case(target, seed, number) for target in targets)
        number += 1


def _keep(case: Case, result: Result, folder: Path) -> None:
    target = FAILURES / str(case).replace(":", "-")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, symlinks=True)
    facts = {"case": str(case), "command": result.command, "violation": result.violation, "stderr": result.outcome.err}
    (target / "case.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    print(f"VIOLATION {case}: {result.violation}\n  sd3-light {' '.join(result.command)[:500]}")
    print(f"  {result.outcome.err.strip()[-600:]}\n  kept in {target}; again: --replay {case}", flush=True)


def fuzz(world: World, options: argparse.Namespace, scratch: Path) -> int:
    """Run cases until the time or the number is reached; print the counts and return the number of violations."""
    started, counts, codes, violations = time.monotonic(), Counter[str](), Counter[str](), 0
    for total, case in enumerate(cases(options.seed, options.targets)):
        elapsed = time.monotonic() - started
        if elapsed > options.minutes * 60 or total == options.cases:
            break
        folder = scratch / "case"
        folder.mkdir()
        result = run_case(world, case, folder, in_process=total % options.process_every != options.process_every - 1)
        counts[case.target] += 1
        codes[f"{case.target} {result.outcome.code}"] += 1
        if result.violation:
            violations += 1
            _keep(case, result, folder)
        shutil.rmtree(folder)
        if total % 200 == 199:
            print(f"{total + 1} cases, {violations} violations, {elapsed:.0f} s", flush=True)
    accepted = {name: codes[f"{name} 0"] for name in counts}
    for name, count in counts.items():
        print(f"  {name:18} {count:6} cases, exit 0: {accepted[name] / count:4.0%}")
    total, share = sum(counts.values()), sum(accepted.values()) / max(sum(counts.values()), 1)
    print(f"{total} cases (seed {options.seed}), exit 0: {share:.0%}, {violations} violations")
    return violations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--cases", type=int, default=-1, help="stop after this many")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--process_every", type=int, default=500, help="run every Nth case in a separate process")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--replay", help="TARGET:SEED:NUMBER")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="sd3-light-fuzz-") as scratch:
        world = World(Path(scratch, "world"))
        world.root.mkdir()
        for part in ("project", "cached", "run", "single_file", "lora"):
            getattr(world, part)
        if options.replay:
            target, seed, number = options.replay.split(":")
            folder = Path(scratch, "case")
            folder.mkdir()
            result = run_case(world, Case(target, int(seed), int(number)), folder)
            print(result.violation or "no violation", " ".join(result.command), result.outcome, sep="\n")
            sys.exit(bool(result.violation))
        sys.exit(bool(fuzz(world, options, Path(scratch))))


if __name__ == "__main__":
    main()
