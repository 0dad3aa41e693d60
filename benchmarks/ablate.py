"""Fills a table of ablations: one row is one change to the base recipe (`world.toml`), trained with two seeds.

    python benchmarks/ablate.py FOLDER [--rows base joint-dropout ...] [--seeds 1 2] [--minutes 9] [--jobs 1]
                                [--table benchmarks/ablations.toml] [--set KEY=VALUE ...] [--show]

FOLDER comes from `world_prepare.py`. Each finished (row, seed) is one line of FOLDER/results.jsonl; it is skipped the
next time, unless its recipe has changed. After `--minutes` the run in progress saves a checkpoint, from which the next
command continues. All rows get their first seed before any gets its second. `--jobs` runs several rows side by side,
which helps if one does not fill the GPU. `--set` changes all rows. At the end the table of all results is printed and
written to FOLDER/table.md; `--show` only does that.

Reported: the share of held-out prompts whose image is wholly right, at the end and along the way; the validation loss
at fixed t, of the saved average in the table and of all weights in the file; samples until 0.9 of the prompts were
right; minutes of training. A row with `ema_lengths` also scores averages of these lengths, rebuilt from its snapshots.
"""

import argparse
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from world_runs import BASE, Bench, ScoredRun, load, start_judges

from sd3_light.config import UserError
from sd3_light.config.faults import Stopped
from sd3_light.engines import Launch
from sd3_light.evaluate.composition import ScoreOptions, score
from sd3_light.export import verb as export
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.runlog import read_log

TABLE = Path(__file__).parent / "ablations.toml"
RESULTS = "results.jsonl"
TARGET = 0.9


@dataclass(frozen=True)
class Row:
    """One change to the base recipe, as `--set` strings."""

    name: str
    about: str
    overrides: tuple[str, ...] = ()
    ema_lengths: tuple[float, ...] = ()


@dataclass(frozen=True)
class Ablation:
    """One row with one seed in a prepared folder."""

    folder: Path
    row: Row
    seed: int
    more: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """All overrides, without those of the bench."""
        return [*self.more, *self.row.overrides, f"seed={self.seed}", f'output_dir="runs/{self.name}"']

    @property
    def name(self) -> str:
        """Name of the run folder, which changes with the recipe."""
        return f"{self.row.name}-{self.seed}-{self.recipe}"

    @property
    def recipe(self) -> str:
        """A hash of everything that determines the run."""
        facts = [BASE.read_text(encoding="utf-8"), self.more, self.row.overrides, self.seed, self.row.ema_lengths]
        facts.append(vars(Bench.read(self.folder)))
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]

    def run(self, deadline: float | None) -> dict[str, Any] | None:
        """Train and return the result; None if the deadline cut the run."""
        bench = Bench.read(self.folder)
        run = ScoredRun(load(self.folder, self.overrides), bench.prompts)
        end = run.run(deadline)
        if not run.is_finished:
            return None
        last = run.scores[-1]["rates"]
        result = {
            "row": self.row.name, "seed": self.seed, "recipe": self.recipe, "set": [*self.more, *self.row.overrides],
            "right": last["all"], "rates": last, "samples": end.samples, f"samples_to_{TARGET}": run.samples_to(TARGET),
            "fixed": fixed_losses(run.folder), "minutes": round(run.seconds / 60, 3),
            "scores": [[entry["samples"], entry["rates"]["all"]] for entry in run.scores],
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        }  # fmt: skip
        if self.row.ema_lengths:
            result["ema_lengths"] = {str(n): score_length(run, n, bench) for n in self.row.ema_lengths}
        return result


def fixed_losses(run: Path) -> dict[str, float]:
    """Return the last validation loss at fixed t by weights: `raw`, `ema` and other averages."""
    evaluations = [event for event in read_log(run / "log.jsonl") if event["event"] == "eval"]
    return {event["weights"]: round(event["fixed"], 5) for event in evaluations}


def score_length(run: ScoredRun, length: float, bench: Bench) -> float:
    """Return the score of an average of this length, rebuilt from the run's snapshots."""
    out, sampling = run.folder / "average", run.loaded.train.sampling
    shutil.rmtree(out, ignore_errors=True)
    try:
        pipe, policy = open_pipeline(export.run(run.folder, out, ema_length=length), Launch().device())
        options = ScoreOptions(sampling.steps, sampling.guidance, 0, 64, ((bench.side, bench.side),))
        result = score(pipe, run.prompts, policy, options)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return round(result.rates["all"] or 0.0, 4)


# --- the table ---------------------------------------------------------------------------------


def read_rows(table: Path) -> list[Row]:
    """Return the rows of a table file."""
    raw = tomllib.loads(table.read_text(encoding="utf-8"))
    return [
        Row(name, entry.get("about", ""), tuple(entry.get("set", ())), tuple(entry.get("ema_lengths", ())))
        for name, entry in raw["rows"].items()
    ]


def read_results(file: Path) -> list[dict[str, Any]]:
    """Return the results so far; a later line of the same row and seed replaces an earlier one."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return list({(entry["row"], entry["seed"]): entry for entry in map(json.loads, lines)}.values())


def markdown(results: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> str:
    """Return the table of all results: one line per row, the seeds separated by slashes."""
    about = {row.name: row.about for row in rows}
    names = [*about, *(name for name in dict.fromkeys(entry["row"] for entry in results) if name not in about)]
    lines = [
        "| row | change | wholly right | loss at fixed t | million samples to 0.9 | minutes |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        entries = sorted((entry for entry in results if entry["row"] == name), key=lambda entry: entry["seed"])
        if entries:
            lines.append(f"| {name} | {about.get(name, '')} | {' | '.join(_cells(entries))} |")
            lines += _length_lines(name, entries)
    return "\n".join(lines) + "\n"


def _cells(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = (
        [f"{entry['right']:.3f}" for entry in entries],
        [f"{entry['fixed'].get('ema', entry['fixed'].get('raw')):.4f}" for entry in entries],
        [_millions(entry[f"samples_to_{TARGET}"]) for entry in entries],
        [f"{entry['minutes']:.1f}" for entry in entries],
    )
    return [" / ".join(column) for column in columns]


def _millions(samples: int | None) -> str:
    return "-" if samples is None else f"{samples / 1e6:.2f}"


def _length_lines(name: str, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    lengths = dict.fromkeys(length for entry in entries for length in entry.get("ema_lengths", {}))
    rates = {n: " / ".join(f"{e['ema_lengths'][n]:.3f}" for e in entries if "ema_lengths" in e) for n in lengths}
    return [f"| {name} | average of length {length} | {rate} | | | |" for length, rate in rates.items()]


# --- filling it --------------------------------------------------------------------------------


@contextmanager
def claimed(folder: Path, name: str) -> Iterator[bool]:
    """Yield whether no other process is working on this run."""
    locks = folder / "runs"
    locks.mkdir(exist_ok=True)
    with open(locks / f"{name}.lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def fill(folder: Path, ablations: Sequence[Ablation], deadline: float | None) -> list[str]:
    """Run what is missing until the deadline; return the failures."""
    failures = []
    for ablation in ablations:
        with claimed(folder, ablation.name) as is_free:
            done = {(entry["row"], entry["seed"], entry["recipe"]) for entry in read_results(folder / RESULTS)}
            if not is_free or (ablation.row.name, ablation.seed, ablation.recipe) in done:
                continue
            if deadline is not None and time.monotonic() >= deadline:
                break
            try:
                result = ablation.run(deadline)
            except UserError as error:
                failures.append(f"{ablation.name}: {error}")
                continue
            if result is not None:
                with open(folder / RESULTS, "a", encoding="utf-8") as file:
                    file.write(json.dumps(result, ensure_ascii=False) + "\n")
                shutil.rmtree(folder / "runs" / ablation.name / "checkpoints")
                shutil.rmtree(folder / "runs" / ablation.name / "ema", ignore_errors=True)
    return failures


def select(folder: Path, rows: Sequence[Row], args: argparse.Namespace) -> list[Ablation]:
    """Return the chosen rows with all seeds, seed by seed."""
    if unknown := set(args.rows or ()) - {row.name for row in rows}:
        raise UserError(
            f"{args.table} has no row {', '.join(sorted(unknown))}; it has {', '.join(r.name for r in rows)}"
        )
    chosen = [row for row in rows if not args.rows or row.name in args.rows]
    return [Ablation(folder, row, seed, tuple(args.set)) for seed in args.seeds for row in chosen]


def start_jobs(count: int) -> list[subprocess.Popen[bytes]]:
    """Start further processes with the same arguments; each takes the rows that no other works on."""
    command = [sys.executable, __file__, *sys.argv[1:], "--jobs", "1"]
    return [subprocess.Popen(command) for _ in range(count)]


def main() -> None:
    """Fill the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--rows", nargs="+", help="names of rows; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--minutes", type=float, help="stop after this time")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override of all rows")
    parser.add_argument("--show", action="store_true", help="only print the table")
    args = parser.parse_args()
    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    rows, failures = read_rows(args.table), []
    try:
        ablations = select(args.folder, rows, args)
        if not args.show:
            others = start_jobs(args.jobs - 1)
            start_judges()
            failures = fill(args.folder, ablations, deadline)
            failures += [f"a process failed with exit code {job.returncode}" for job in others if job.wait()]
    except (UserError, Stopped) as error:
        sys.exit(f"error: {error}")
    text = markdown(read_results(args.folder / RESULTS), rows)
    (args.folder / "table.md").write_text(text, encoding="utf-8")
    print(text, end="")
    if failures:
        sys.exit("\n".join(f"error: {failure}" for failure in failures))


if __name__ == "__main__":
    main()
