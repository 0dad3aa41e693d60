"""Fills a table of ablations: one row is one change to the base recipe (`world.toml`), trained with several seeds.

    python benchmarks/ablate.py FOLDER [--rows 'rate-*' base ...] [--best 4] [--seeds 1 2] [--lanes 6] [--minutes 9]
                                [--table benchmarks/ablations.toml] [--tuned ROW] [--results FILE] [--set KEY=VALUE ...]
                                [--slot-minutes 20] [--show]
    python benchmarks/ablate.py FOLDER --gains RESULTS... [--rows 'align-*'] [--score 0.9]
    python benchmarks/ablate.py FOLDER --speedrun NAME [--set KEY=VALUE ...] [--target 0.95] [--seeds 1] [--minutes 9]

FOLDER comes from `world_prepare.py`; rows with a `side` use FOLDER/256px or FOLDER/512px, prepared in the same way.
Each finished (row, seed) is one line of FOLDER/results.jsonl, or of `--results`, and is skipped the next time, unless
its recipe has changed: keep this small file to continue on another machine. `--lanes` trains several rows side by side
on one GPU, under NVIDIA's MPS where it is installed; a lane takes the next row that no other works on. Shortly before
the end of `--minutes` the rows in progress save a checkpoint, from which the next command on this machine continues.
All rows get their first seed before any gets its second; the row that another is compared with is trained too. `--best`
keeps the rows with the highest curves so far. How long the rest takes is estimated first.

A row is compared with the row that it changes (`like`, or `base`): over the same seeds and the same prompts, with the
standard error of the paired difference. *Better* and *worse* need two of them and two seeds. The seeds' part of the
error is at least that of all rows together. Prompts of the result differ from those of the curve, on which the samples
until 0.9 are read: the first point above it, `-` if the points around it are further apart than 100,000 samples. The
curve and the result are drawn with the average of the weights; `draws` of a row are the same training drawn otherwise
(raw weights, another average, another shift of the sampler), compared with the row itself. The table of all results is
printed and written to table.md beside the results; `--show` only does that. Minutes of rows that share a GPU do not
count.

`--gains` reads results of one or several calls, also from several machines of one kind, and prints what a row's base
needs to reach a score, divided by what the row needs, for each seed that both have: in samples and in minutes. The
crossing is read between the two points of the curve around the score; minutes are those of training up to there,
without drawing, and only those of one lane per GPU count.

`--speedrun` counts the minutes of training from random weights until a share of held-out prompts is wholly right.
Drawing the data, caching, and drawing and judging images for the score are not counted. Everything that training does
is: building the model, loading the cache, compiling kernels, steps, averages, checkpoints. The recipe is `world.toml`
with the `--set` changes; scores come every `sampling.every_n_steps`, so choose `max_steps` generously and that interval
small. After `--minutes` the run saves a checkpoint, and the same command continues it; the time that a restart takes
counts. When the target is reached, the model is drawn once more for other held-out prompts than those that stopped the
run. The record with that score, the recipe, and what the text encoders were trained on is appended to
FOLDER/records.jsonl, and printed as a row of the table in README.md.
"""

import argparse
import fcntl
import hashlib
import json
import math
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from common.ablations import (
    MAIN,
    TARGET,
    Draw,
    Row,
    Table,
    gain_table,
    keep_result,
    markdown,
    read_results,
    read_table,
)
from common.basics import append_line, device_name, parser_of, write_json
from common.processes import mps, run_lanes
from common.world import BASE, Bench, ScoredRun, judged, load, start_judges, text_encoders
from torch import Tensor, nn

from sd3_light.config import TrainConfig, UserError, resolved_toml
from sd3_light.config.faults import Stopped
from sd3_light.core.batch import Batch
from sd3_light.core.columns import TEACHER
from sd3_light.core.model import denoiser_blocks
from sd3_light.core.objective import Objectives, Prediction
from sd3_light.core.sampling import ImageRequest
from sd3_light.engines import Launch
from sd3_light.export import verb as export
from sd3_light.export.diffusers_folder import read_facts
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.flow.alignment import FeatureAlignment
from sd3_light.flow.objectives import configured_objective
from sd3_light.flow.scheduler import folder_scheduler
from sd3_light.formats import plural
from sd3_light.model.part_configs import FACTS_FILE
from sd3_light.runlog import read_log
from sd3_light.sample.generate import choose_drawing, generate
from sd3_light.world import Prompt

TABLE = Path(__file__).parent / "ablations.toml"
RESULTS = "results.jsonl"
RECORDS = "records.jsonl"
FINAL = "final"
_BATCH = 64
_SAVE_SECONDS = 45  # between the lanes' deadline and the end of the command
_WAIT_SECONDS = 2.0


@dataclass(frozen=True)
class Ablation:
    """One row with one seed in a prepared folder; ``init`` is the one that it continues."""

    root: Path
    row: Row
    seed: int
    more: tuple[str, ...] = ()
    init: "Ablation | None" = None

    @property
    def folder(self) -> Path:
        """The prepared folder."""
        return self.root if self.row.side is None else self.root / f"{self.row.side}px"

    @property
    def changes(self) -> list[str]:
        """The changes to the base recipe, without seed and names."""
        return [*self.more, *self.row.overrides]

    @property
    def overrides(self) -> list[str]:
        """All overrides, without those of the bench."""
        start = [] if self.init is None else [f"model.init={json.dumps(str(self.init.final.resolve()))}"]
        return [*self.changes, *start, f"seed={self.seed}", f"output_dir={json.dumps(str(self.run_folder.resolve()))}"]

    @property
    def name(self) -> str:
        """Name of the run folder, which changes with the recipe."""
        return f"{self.row.name}-{self.seed}-{self.recipe}"

    @property
    def run_folder(self) -> Path:
        """The folder of the run."""
        return self.root / "runs" / self.name

    @property
    def final(self) -> Path:
        """The export that other rows continue."""
        return self.run_folder / FINAL

    @property
    def recipe(self) -> str:
        """A hash of everything that determines the run."""
        facts = [BASE.read_text(encoding="utf-8"), self.changes, self.seed, [str(draw) for draw in self.row.draws]]
        facts += [True] * self.row.control
        facts += [vars(Bench.read(self.folder)), self.init and self.init.recipe]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]

    def run(self, deadline: float | None, keep: bool = False) -> dict[str, Any] | None:
        """Train and draw; return the result, None if the deadline cut the run. ``keep`` the export for other rows."""
        started = time.monotonic()
        bench = Bench.read(self.folder)
        run = ScoredRun(load(self.folder, self.overrides), bench.prompts)
        if self.row.control:
            run.objective = partial(of_other_images, run.loaded.train)
        end = run.run(deadline)
        if not run.is_finished:
            return None
        right = draw_all(run, dict(self.row.draws), bench, self.final if keep else None)
        return {
            "row": self.row.name, "seed": self.seed, "recipe": self.recipe, "set": self.changes,
            "right": right, "samples": end.samples, "fixed": fixed_losses(run.folder),
            "minutes": round(run.seconds / 60, 3), "lane_minutes": round((time.monotonic() - started) / 60, 3),
            "scores": [[entry["samples"], entry["rates"]["all"]] for entry in run.scores],
            "scenes": "hard" if bench.hard else "simple", "side": bench.side,
            "device": device_name(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        }  # fmt: skip


def of_other_images(config: TrainConfig, denoiser: nn.Module) -> Objectives:
    """Return the objective of a config, with the features of the next image of the batch in place of a sample's own."""
    objective = configured_objective(config, len(denoiser_blocks(denoiser)))
    (aligned,) = (part for part in objective.parts if isinstance(part, FeatureAlignment))
    losses = aligned.losses

    def shifted(out: Prediction, batch: Batch) -> dict[str, Tensor]:
        features = batch.get(TEACHER)
        return losses(out, batch.with_values({TEACHER: None if features is None else features.roll(1, 0)}))

    aligned.losses = shifted  # type: ignore[method-assign]
    return objective


def fixed_losses(run: Path) -> dict[str, float]:
    """Return the last validation loss at fixed t by weights: `raw`, `ema` and other averages."""
    evaluations = [event for event in read_log(run / "log.jsonl") if event["event"] == "eval"]
    return {event["weights"]: round(event["fixed"], 5) for event in evaluations}


# --- drawing ---------------------------------------------------------------------------------------


def draw_all(run: ScoredRun, draws: Mapping[str, Draw], bench: Bench, final: Path | None) -> dict[str, str]:
    """Return for each draw which prompts of the report are right, as a digit 1 or 0 per prompt.

    The export of the average is kept at ``final``, if that is given.
    """
    by_weights: dict[tuple[str | None, float | None], dict[str, Draw]] = {(None, None): {MAIN: Draw()}}
    for name, draw in draws.items():
        by_weights.setdefault((draw.weights, draw.ema_length), {})[name] = draw
    right = {}
    for (weights, length), same in by_weights.items():
        is_final = final is not None and (weights, length) == (None, None)
        out = final if is_final and final is not None else run.folder / "drawn"
        shutil.rmtree(out, ignore_errors=True)
        export.run(run.folder, out, weights=weights, ema_length=length)
        for name, draw in same.items():
            right[name] = draw_export(out, draw, run, bench)
        if not is_final:
            shutil.rmtree(out)
    return right


def draw_export(folder: Path, draw: Draw, run: ScoredRun, bench: Bench) -> str:
    """Draw the prompts of the report with the pipeline of the export, image i from seed i, and judge them."""
    text_facts = None
    if draw.padded:
        text_facts = run.folder / "padded"
        text_facts.mkdir(exist_ok=True)
        facts = read_facts(folder)
        write_json(text_facts / FACTS_FILE, {"text": facts["text"] | {"text_tokens": "padded"}})
    pipe, policy = open_pipeline(folder, Launch().device(), text_facts)
    if draw.shift is not None:
        pipe.scheduler = folder_scheduler(folder, draw.shift)
    prompts: Sequence[Prompt] = bench.report_prompts
    requests = [ImageRequest(prompt.text, seed, bench.side, bench.side) for seed, prompt in enumerate(prompts)]
    sampling = run.loaded.train.sampling
    drawing = choose_drawing(policy, sampling.steps, sampling.guidance, sampling.steps)
    verdicts = judged(prompts, generate(pipe, requests, policy, drawing, _BATCH)).verdicts
    return "".join("1" if verdict.all else "0" for verdict in verdicts)


# --- the rows --------------------------------------------------------------------------------------


def select(
    folder: Path, table: Table, args: argparse.Namespace, results: Sequence[Mapping[str, Any]]
) -> list[Ablation]:
    """Return the chosen rows with all seeds, seed by seed, and before each the rows that it needs."""
    chosen = [name for name in table.rows if any(fnmatch(name, pattern) for pattern in args.rows or ["*"])]
    unknown = [pattern for pattern in args.rows or () if not any(fnmatch(name, pattern) for name in table.rows)]
    if unknown:
        raise UserError(f"{args.table} has no row {', '.join(unknown)}; it has {', '.join(table.rows)}")
    if not args.rows:
        chosen = [name for name in chosen if (side := table.rows[name].side) is None or (folder / f"{side}px").is_dir()]
    if args.best is not None and not args.lane:
        chosen = best(chosen, results, args.best)
    ablations: dict[tuple[str, int], Ablation] = {}

    def add(name: str, seed: int) -> Ablation:
        row = table.rows[name]
        if row.against is not None and (row.against, seed) not in ablations:
            add(row.against, seed)
        init = None if row.init is None else add(row.init, seed)
        return ablations.setdefault((name, seed), Ablation(folder, row, seed, tuple(args.set), init))

    for seed in args.seeds:
        for name in chosen:
            add(name, seed)
    return list(ablations.values())


def best(names: Sequence[str], results: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """Return the rows whose curves end highest. The prompts of the results do not choose, so they stay fair."""
    ends = {
        name: [entry["scores"][-1][1] for entry in results if entry["row"] == name and entry["scores"]]
        for name in names
    }
    if missing := [name for name, values in ends.items() if not values]:
        raise UserError(f"--best needs a result of every row; none of {', '.join(missing)}")
    return sorted(names, key=lambda name: -statistics.mean(ends[name]))[:count]


# --- filling it ------------------------------------------------------------------------------------


def is_done(ablation: Ablation, results: Sequence[Mapping[str, Any]], needed: bool) -> bool:
    """Return whether a row has its result, and if others will continue it, also its export."""
    key = (ablation.row.name, ablation.seed, ablation.recipe)
    has_result = any((entry["row"], entry["seed"], entry["recipe"]) == key for entry in results)
    return has_result and (not needed or ablation.final.is_dir())


def missing(ablations: Sequence[Ablation], results: Sequence[Mapping[str, Any]]) -> list[Ablation]:
    """Return what is not done; a row that only others need is left out once they are done."""
    todo = [each for each in ablations if not is_done(each, results, needed=False)]
    needed = {each.init for each in todo}
    return [each for each in ablations if not is_done(each, results, each in needed)]


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


def fill(ablations: Sequence[Ablation], results: Path, deadline: float | None) -> list[str]:
    """Run what is missing and not claimed until the deadline; return the failures."""
    kept = {each.init for each in ablations}
    failures: dict[str, str] = {}
    while deadline is None or time.monotonic() < deadline:
        todo = [each for each in missing(ablations, read_results(results)) if each.name not in failures]
        ready = [each for each in todo if each.init is None or each.init.final.is_dir()]
        for ablation in ready:
            with claimed(ablation.root, ablation.name) as is_free:
                if not is_free or ablation not in missing(ablations, read_results(results)):
                    continue
                try:
                    result = ablation.run(deadline, ablation in kept)
                except UserError as error:
                    failures[ablation.name] = f"{ablation.name}: {error}"
                    break
                if result is None:
                    return list(failures.values())
                keep_result(results, result)
                shutil.rmtree(ablation.run_folder / "checkpoints", ignore_errors=True)
                shutil.rmtree(ablation.run_folder / "ema", ignore_errors=True)
            break
        else:
            if not any(each.init and each.init.name not in failures for each in todo if each not in ready):
                break
            time.sleep(_WAIT_SECONDS)  # another lane trains what they continue
    return list(failures.values())


def estimate(
    todo: Sequence[Ablation], results: Sequence[Mapping[str, Any]], table: Table, lanes: int, slot: float
) -> str:
    """Return how long what is missing takes, from what finished rows took in their lanes."""
    if not todo:
        return "every row is done"
    known: dict[str, list[float]] = {}
    for entry in results:
        known.setdefault(entry["row"], []).append(entry["lane_minutes"])
    usual = statistics.mean([value for values in known.values() for value in values]) if known else table.minutes

    def minutes(ablation: Ablation) -> float:
        values = known.get(ablation.row.name)
        return statistics.mean(values) if values else ablation.row.minutes or usual

    def chain(ablation: Ablation) -> float:
        before = chain(ablation.init) if ablation.init is not None and ablation.init in todo else 0.0
        return minutes(ablation) + before

    total = sum(map(minutes, todo))
    wall = max(total / lanes, *map(chain, todo))
    slots = math.ceil(wall / slot)
    return (
        f"missing: {plural(len(todo), 'run')}, {total:.0f} minutes in all, {wall:.0f} with {plural(lanes, 'lane')}: "
        f"{plural(slots, 'slot')} of {slot:g} minutes"
    )


def run_all(args: argparse.Namespace, ablations: Sequence[Ablation], end: Callable[[float], float | None]) -> list[str]:
    """Fill the table in this process, or in lanes beside it. ``end(seconds)`` is the end less these seconds."""
    args.results.parent.mkdir(parents=True, exist_ok=True)
    if args.lanes == 1 or args.lane:
        start_judges(args.lanes)
        return fill(ablations, args.results, end(_SAVE_SECONDS))
    names = dict.fromkeys(each.row.name for each in ablations)
    command = [sys.executable, __file__, *sys.argv[1:], "--lane", "--rows", *names]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    with mps() as environment:
        return run_lanes(command, args.lanes, end(0), {**environment, "OMP_NUM_THREADS": "1"})


# --- the speedrun ----------------------------------------------------------------------------------


def record_of(run: ScoredRun, args: argparse.Namespace, bench: Bench, encoders: dict[str, str]) -> dict[str, Any]:
    """Return the record of a run that reached its target."""
    reported = draw_all(run, {}, bench, None)[MAIN]
    reached = next(score for score in run.scores if score["rates"]["all"] >= (run.target or 0))
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "name": args.speedrun,
        "minutes": round(reached["seconds"] / 60, 2),
        "right": reached["rates"]["all"], "target": run.target, "steps": reached["step"],
        "samples": reached["samples"], "scenes": "hard" if bench.hard else "simple", "side": bench.side,
        "num_prompts": bench.num_prompts, "reported": round(reported.count("1") / len(reported), 4),
        "num_report": bench.num_report, "text_encoders": encoders, "seed": run.loaded.train.seed, "set": args.set,
        "device": device_name(),
        "recipe": resolved_toml(run.loaded), "scores": run.scores,
    }  # fmt: skip


def as_row(record: dict[str, Any]) -> str:
    """Return the record as a row of the table in benchmarks/README.md."""
    changes = ", ".join(f"`{change}`" for change in record["set"]) or "the base recipe"
    return (
        f"| {record['date']} | {record['name']} | {record['minutes']:.2f} | {record['right']:.3f} | "
        f"{record['reported']:.3f} | {_supervision(record['text_encoders'])} | "
        f"{record['samples'] / 1e6:.2f} | {record['scenes']}, {record['side']} px | {record['device']} | {changes} |"
    )


def _supervision(encoders: dict[str, str]) -> str:
    """Return what the text encoders were trained on, those that agree together, without hashes."""
    names: dict[str, list[str]] = {}
    for name, stated in encoders.items():
        names.setdefault(stated.split(" (sha256")[0], []).append(f"`{name}`")
    return "; ".join(f"{', '.join(members)}: {supervision}" for supervision, members in names.items())


def speedrun(args: argparse.Namespace, deadline: float | None) -> None:
    """Run or continue the speedrun, and print its record."""
    start_judges()
    bench = Bench.read(args.folder)
    encoders = text_encoders(args.folder)
    seed = args.seeds[0]
    own = [f"seed={seed}", f'output_dir="runs/speedrun-{args.speedrun}-{seed}"']
    run = ScoredRun(load(args.folder, [*args.set, *own]), bench.prompts, args.target)
    end = run.run(deadline)
    best_rate = max((score["rates"]["all"] for score in run.scores), default=0.0)
    if best_rate < args.target:
        state = "finished" if run.is_finished else "cut by --minutes, continue with the same command"
        sys.exit(f"{best_rate:.3f} of {args.target} after {run.seconds / 60:.2f} minutes, step {end.step}: {state}")
    record = record_of(run, args, bench, encoders)
    append_line(args.folder / RECORDS, record)
    print(as_row(record))


# --- the command -----------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--rows", nargs="+", help="names of rows, or patterns; default: all")
    parser.add_argument("--best", type=int, help="of these, only the rows with the highest curves so far")
    parser.add_argument("--tuned", help="the row that rows like `tuned` change; default: that of the table")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--minutes", type=float, help="stop after this time")
    parser.add_argument("--lanes", type=int, default=1, help="rows side by side")
    parser.add_argument("--results", type=Path, help="default: FOLDER/results.jsonl")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an override of all rows")
    parser.add_argument("--slot-minutes", type=float, default=20, help="for the estimate: training time of a slot")
    parser.add_argument("--show", action="store_true", help="only print the table")
    parser.add_argument("--gains", type=Path, nargs="+", metavar="RESULTS", help="only print the gains of `--rows`")
    parser.add_argument("--score", type=float, default=TARGET, help="for the gains")
    parser.add_argument("--speedrun", metavar="NAME", help="only run the base recipe until `--target`: a record")
    parser.add_argument("--target", type=float, default=0.95, help="of the speedrun")
    parser.add_argument("--lane", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.results = args.results or args.folder / RESULTS
    return args


def main() -> None:
    """Fill the table."""
    args = parse()
    started = time.monotonic()
    failures: list[str] = []

    def end(less: float) -> float | None:
        return None if args.minutes is None else started + max(0.0, 60 * args.minutes - less)

    try:
        table = read_table(args.table, args.tuned)
        if args.gains:
            entries = [entry for file in args.gains for entry in read_results(file)]
            print(gain_table(entries, table, args.rows or ["*"], args.score))
            return
        if args.speedrun is not None:
            speedrun(args, end(0))
            return
        results = read_results(args.results)
        if not args.show:
            ablations = select(args.folder, table, args, results)
            if not args.lane:
                todo = missing(ablations, results)
                print(estimate(todo, results, table, args.lanes, args.slot_minutes), flush=True)
            failures = run_all(args, ablations, end)
    except (UserError, Stopped) as error:
        sys.exit(f"error: {error}")
    if not args.lane:
        text = markdown(read_results(args.results), table, args.set)
        (args.results.parent / "table.md").write_text(text, encoding="utf-8")
        print(text, end="")
    if failures:
        sys.exit("\n".join(f"error: {failure}" for failure in failures))


if __name__ == "__main__":
    main()
