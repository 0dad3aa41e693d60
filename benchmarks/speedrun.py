"""The speedrun: minutes of training from random weights until 0.95 of held-out prompts are wholly right at 128 px.

    python benchmarks/speedrun.py FOLDER --name NAME [--set KEY=VALUE ...] [--target 0.95] [--seed 1] [--minutes 9]

FOLDER comes from `world_prepare.py`; drawing and caching are not counted. Everything that training does is: building
the model, loading the cache, compiling kernels, steps, averages, checkpoints. Drawing and judging images for the score
are not. The recipe is `world.toml` with the `--set` changes; scores come every `sampling.every_n_steps`, so choose
`max_steps` generously and that interval small. After `--minutes` the run saves a checkpoint, and the same command
continues it; the time that a restart takes counts.

When the target is reached, the model is drawn once more for other held-out prompts than those that stopped the run.
The record with that score, the recipe, and what the text encoders were trained on is appended to FOLDER/records.jsonl,
and printed as a row of the table in benchmarks/README.md. A record on harder scenes, from preparation to row:

    python benchmarks/world_prepare.py bench --caches padded &&
    python benchmarks/speedrun.py bench --name hard --set max_steps=20000 --set 'lr_scheduler="constant"'
"""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ablate import MAIN, draw_all
from common.basics import append_line, device_name, parser_of
from common.world import Bench, ScoredRun, load, start_judges, text_encoders

from sd3_light.config import UserError, resolved_toml
from sd3_light.config.faults import Stopped

RECORDS = "records.jsonl"


def record_of(
    run: ScoredRun, name: str, overrides: list[str], bench: Bench, encoders: dict[str, str]
) -> dict[str, Any]:
    """Return the record of a run that reached its target."""
    reported = draw_all(run, {}, bench, None)[MAIN]
    reached = next(score for score in run.scores if score["rates"]["all"] >= (run.target or 0))
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "name": name, "minutes": round(reached["seconds"] / 60, 2),
        "right": reached["rates"]["all"], "target": run.target, "steps": reached["step"],
        "samples": reached["samples"], "scenes": "hard" if bench.hard else "simple", "side": bench.side,
        "num_prompts": bench.num_prompts, "reported": round(reported.count("1") / len(reported), 4),
        "num_report": bench.num_report, "text_encoders": encoders, "seed": run.loaded.train.seed, "set": overrides,
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


def main() -> None:
    """Run or continue the speedrun."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True, help="of the record and the run folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="stop after this time, with a checkpoint")
    args = parser.parse_args()
    deadline = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    start_judges()
    try:
        bench = Bench.read(args.folder)
        encoders = text_encoders(args.folder)
        own = [f"seed={args.seed}", f'output_dir="runs/speedrun-{args.name}-{args.seed}"']
        run = ScoredRun(load(args.folder, [*args.set, *own]), bench.prompts, args.target)
        end = run.run(deadline)
    except (UserError, Stopped) as error:
        sys.exit(f"error: {error}")
    best = max((score["rates"]["all"] for score in run.scores), default=0.0)
    if best < args.target:
        state = "finished" if run.is_finished else "cut by --minutes, continue with the same command"
        sys.exit(f"{best:.3f} of {args.target} after {run.seconds / 60:.2f} minutes, step {end.step}: {state}")
    record = record_of(run, args.name, args.set, bench, encoders)
    append_line(args.folder / RECORDS, record)
    print(as_row(record))


if __name__ == "__main__":
    main()
