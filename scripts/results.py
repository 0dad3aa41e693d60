"""Makes everything that docs/evidence/results.md reports, with the page's commands, start to end, and times each.

    python scripts/results.py OUT [--set icons|clipart] [--seeds 1 2 3] [--minutes 28] [--packages FOLDER]
                              [--vae-minutes 12] [--text-minutes 3] [--judge-minutes 3] [--train KEY=VALUE ...] [--toy]

The order: the set, the 60 prompts of the blind sheet, the VAE, the text encoders, a judge on other captions, the
project, its cache; for each seed training and scores; the joined table, the figure and the blind sheets. All commands
run in OUT. OUT/steps.jsonl lists what ended, with its seconds; a finished step is not repeated.

After `--minutes` the running command gets SIGTERM: parts and training save their state, other commands start again
the next time. The script then exits with code 75, and the same command continues, also on another machine to which OUT
was copied. `--toy` shows on a CPU that all of it fits together: few images, small models, a few steps.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
STEPS, TABLE = "steps.jsonl", "table.md"
JUDGE_SHARE = 0.25
STOPPED = 75
BASELINES = (
    "training image, nearest caption",
    "training image, nearest caption, same folder",
)
SD3_LIGHT = (sys.executable, "-P", "-m", "sd3_light")
_SAVING = 240  # seconds that a command may take to save after SIGTERM


@dataclass(frozen=True)
class Sizes:
    """Additional arguments that make the commands smaller."""

    build: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    evaluate: tuple[str, ...] = ()
    prompts: int = 60


TOY_EVERY = {"icons": "60", "clipart": "16"}
TOY = Sizes(
    build=("--size", "32", "--processes", "2"),
    parts=("--vae-size", "tiny", "--text-size", "tiny", "--vae-steps", "20", "--text-steps", "20",
           "--judge-steps", "20", "--vae-batch", "8", "--text-batch", "16"),
    new=("--resolution", "32"),
    train=("max_steps=12", "warmup_steps=2", "cooldown_steps=2", "micro_batch_size_per_gpu=8",
           "num_dataloader_workers=0"),
    evaluate=("--prompts", "12", "--steps", "2"),
    prompts=8,
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A command; ``resume`` replaces it once ``started`` exists."""

    name: str
    command: tuple[str, ...]
    started: Path | None = None
    resume: tuple[str, ...] = field(default=())


def python(script: str, *arguments: str | Path) -> tuple[str, ...]:
    """Return the command of a script of the repository."""
    return (sys.executable, str(ROOT / script), *map(str, arguments))


def sd3_light(*arguments: str | Path) -> tuple[str, ...]:
    """Return a command of sd3-light."""
    return (*SD3_LIGHT, *map(str, arguments))


def steps(args: argparse.Namespace, sizes: Sizes) -> Iterator[Step]:
    """Yield the steps in their order. Paths are relative to OUT."""
    name = args.set
    script = {"icons": "examples/icons/build.py", "clipart": "examples/icons/clipart.py"}[name]
    every = ("--every", TOY_EVERY[name]) if args.toy else ()
    yield Step("set", python(script, name, "--packages", args.packages.absolute(), *sizes.build, *every))
    fix = ("fix", f"{name}/held_out.toml", "prompts.json", "--count", sizes.prompts)
    yield Step("prompts", python("scripts/blind_sheet.py", *map(str, fix)))
    minutes = ("--vae-minutes", args.vae_minutes, "--text-minutes", args.text_minutes,
               "--judge-minutes", args.judge_minutes, "--judge-share", JUDGE_SHARE)  # fmt: skip
    for part in ("vae", "text", "judge"):
        command = sd3_light("parts", f"{name}/data.toml", "parts", "--only", part, *map(str, minutes), *sizes.parts)
        yield Step(part, command)
    yield Step("new", sd3_light("new", "icons", "--data", f"{name}/train", "--model", "parts", *sizes.new))
    settings = settings_of((*sizes.train, *args.train))
    yield Step("cache", sd3_light("cache", "icons.toml", *settings))
    for seed in args.seeds:
        run = Path("runs", f"seed-{seed}")
        own = settings_of((f"seed={seed}", f"output_dir={run}"))
        train = sd3_light("train", "icons.toml", *settings, *own)
        yield Step(f"train {seed}", train, run / "checkpoints", (*train, "--resume"))
        yield Step(f"scores {seed}", scores(name, run, seed, sizes))
    files = [f"scores-{seed}.json" for seed in args.seeds]
    yield Step("table", python("scripts/join_scores.py", *files, "--out", TABLE))
    for seed in args.seeds:
        yield Step(f"figure {seed}", python("scripts/results_grid.py", f"scores-{seed}.html", f"figure-{seed}.png"))
        model = str(Path("runs", f"seed-{seed}"))
        sheet = (f"images-{seed}", "prompts.json", f"sheet-{seed}", "--model", model, "--other", *BASELINES)
        yield Step(f"sheet {seed}", python("scripts/blind_sheet.py", "write", *sheet))


def settings_of(values: Iterable[str]) -> tuple[str, ...]:
    """Return values of keys as options."""
    return tuple(word for value in values for word in ("--set", value))


def scores(name: str, run: Path, seed: int, sizes: Sizes) -> tuple[str, ...]:
    """Return the command that measures a run. Its noise follows from seed 0, as in the docs."""
    data = ("--against", f"{name}/held_out.toml", "--training", f"{name}/data.toml", "--features", "parts")
    outputs = ("--out", f"scores-{seed}.json", "--page", f"scores-{seed}.html", "--save", f"images-{seed}")
    return sd3_light("evaluate", run, *data, "--guidance", "4", "--batch", "64", *outputs, *sizes.evaluate)


def run_steps(out: Path, todo: Iterator[Step], deadline: float) -> int:
    """Run what has not ended; return the exit code."""
    log = out / STEPS
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    done = {line["step"] for line in map(json.loads, lines) if line["ended"]}
    for step in todo:
        if step.name in done:
            continue
        if time.monotonic() >= deadline:
            print(f"stopped before {step.name}: run the same command again", flush=True)
            return STOPPED
        resumes = step.started is not None and (out / step.started).is_dir()
        command = step.resume if resumes else step.command
        print(f"--- {step.name}: {shlex.join(command)}", flush=True)
        started = time.monotonic()
        code = run_command(command, out, deadline)
        seconds = round(time.monotonic() - started, 1)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step.name, "ended": code == 0, "seconds": seconds}) + "\n")
        if code:
            is_late = time.monotonic() >= deadline
            print(f"{step.name} {'was stopped' if is_late else 'failed'} after {seconds:.0f} s (exit code {code})")
            return STOPPED if is_late or code == STOPPED else code
    return 0


def run_command(command: tuple[str, ...], folder: Path, deadline: float) -> int:
    """Run a command until it ends or the deadline has passed; then it may save. Return its exit code."""
    process = subprocess.Popen(command, cwd=folder)
    try:
        return process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(_SAVING)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def times(out: Path) -> str:
    """Return the minutes of each step as Markdown, over all runs that it took."""
    seconds: dict[str, float] = {}
    for line in map(json.loads, (out / STEPS).read_text(encoding="utf-8").splitlines()):
        seconds[line["step"]] = seconds.get(line["step"], 0) + line["seconds"]
    rows = [f"| {name} | {value / 60:.1f} |" for name, value in seconds.items()]
    return "\n".join(
        ["| step | minutes |", "|---|---:|", *rows, f"| **together** | {sum(seconds.values()) / 60:.1f} |"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", choices=("icons", "clipart"), default="icons")
    parser.add_argument("--seeds", "--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--minutes", type=float, default=28, help="of this run; the same command continues")
    parser.add_argument("--packages", type=Path, default=Path("packages"))
    parser.add_argument("--vae-minutes", type=float, default=12)
    parser.add_argument("--text-minutes", type=float, default=3)
    parser.add_argument("--judge-minutes", type=float, default=3)
    parser.add_argument("--train", nargs="*", default=[], metavar="KEY=VALUE", help="keys of icons.toml")
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    code = run_steps(args.out, steps(args, TOY if args.toy else Sizes()), deadline)
    print(times(args.out), flush=True)
    if code == 0:
        print((args.out / TABLE).read_text(encoding="utf-8"), end="")
    sys.exit(code)


if __name__ == "__main__":
    main()
