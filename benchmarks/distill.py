"""How good are few calls of a distilled denoiser, beside its teacher's? Judged on held-out prompts of a world.

    python benchmarks/distill.py OUT --seed N [--method steps|guidance] [--calls 1 2 4] [--minutes M | --train-steps S]
    python benchmarks/distill.py OUT --world FOLDER --prepare [--train-steps 4000]
    python benchmarks/distill.py OUT --world FOLDER --seed N ...
    python benchmarks/distill.py OUT --join [MORE.json ...]

The teacher is the demo's shipped base, which draws its simple world in four calls. With `--world`, a folder of
`world_prepare.py --scenes hard`, it is the model that `--prepare` trains on it (OUT/base, or `--base`). Its sampler is
28 steps of two passes each, with guidance. `--method steps` trains one student for each number of calls, `--method
guidance` one without guidance for the teacher's 28 steps. The exact judge counts the images in which everything is
right. A seed draws the order of training and the noise of all images; its rows are in OUT/seed-N.json, where finished
ones are skipped the next time. The rows:

    teacher, 28 x 2              what is distilled
    teacher, N x 2 and N x 1     the same number of calls, with and without guidance, at the student's times
    continued, N x 1             the teacher after flow matching for a student's time, without distillation
    student, N x 1               after training

The fair controls of a student are the rows without guidance in as many calls. The teacher at the student's times is
better than at those of stock diffusers, whose last call is at t = 0.001. `--minutes` are shared by the runs that train,
by the speed of 30 steps of each. A student is a checkpoint in OUT/runs, which `sd3-light export` makes a model.
`--join` prints the means over seeds with standard errors. On two busy CPU cores
`--calls 1 2 --train-steps 60 --prompts 96 --images 600 --batch 16 --teacher-steps 4` takes about 15 minutes.
"""

import argparse
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.basics import device_name, parser_of, read_lines, spread, write_json
from common.world import Bench as World
from common.world import judged, start_judges
from common.world import load as load_world

from sd3_light.assets import DEMO
from sd3_light.checkpoint.progress import Progress
from sd3_light.config import LoadedConfig, UserError, load_config
from sd3_light.engines import Launch
from sd3_light.journeys import build_caches
from sd3_light.recipes import FOLDER as RECIPES
from sd3_light.sample.in_training import Sampler
from sd3_light.sample.loop import Denoise
from sd3_light.train import verb as train
from sd3_light.world import draw_prompts, write_dataset

TEACHER_STEPS = 28
PROMPT_SEED = 5
_BATCH = 64  # images that are drawn at a time
_SPEED_STEPS = 30
_KEYS = (
    'lr_scheduler="cosine"',
    "model.enable_uncond_text_dropout=false",
    "eval_datasets=[]",
    "save_every_n_steps=1000000",
    "checkpoint_every_n_steps=1000000",
    "sampling.every_n_steps=1000000",
)


@dataclass(frozen=True)
class Drawing:
    """Calls of the denoiser per image, and the guidance scale; 1 takes one pass per call."""

    calls: int
    guidance: float = 1.0

    @property
    def name(self) -> str:
        """The drawing in a table."""
        return f"{self.calls} x {2 if self.guidance > 1 else 1}"


@dataclass(frozen=True)
class Bench:
    """Where the rows of a seed are, and what they have in common."""

    args: argparse.Namespace

    @property
    def file(self) -> Path:
        """The rows of the seed."""
        return Path(self.args.out / f"seed-{self.args.seed}.json")

    def rows(self) -> dict[str, float]:
        """Return the finished rows."""
        return json.loads(self.file.read_text(encoding="utf-8"))["rows"] if self.file.is_file() else {}

    def add(self, rows: dict[str, float], seconds: float) -> None:
        """Write more rows."""
        device = device_name()
        names = ("seed", "guidance", "train_steps", "teacher_steps", "batch", "lr", "prompts", "images")
        facts = {name: getattr(self.args, name) for name in names}
        earlier = json.loads(self.file.read_text(encoding="utf-8"))["seconds"] if self.file.is_file() else 0.0
        record = {**facts, "device": device, "seconds": round(earlier + seconds, 1), "rows": {**self.rows(), **rows}}
        write_json(self.file, record)

    def load(self, name: str, steps: int, *keys: str) -> LoadedConfig:
        """Draw the images unless they exist; return the config of a run."""
        args, folder = self.args, self.args.out
        prompts = [prompt.text for prompt in self.prompts]
        own = (
            f'output_dir="{folder.absolute()}/runs/{name}"',
            f"seed={args.seed}",
            f"micro_batch_size_per_gpu={args.batch}",
            f"optimizer.lr={args.lr}",
            f"max_steps={max(1, steps)}",
            f"warmup_steps={max(1, steps // 20)}",
            f"sampling.prompts={json.dumps(prompts, ensure_ascii=False)}",
        )
        if args.world is not None:
            init = (f'model.init="{self.base()}"', f"sampling.size={World.read(args.world).side}", "ema.decay=0.99")
            return load_world(args.world, [*_KEYS, *own, *init, *keys])
        if not (folder / "data.toml").is_file():
            write_dataset(folder / "data" / "train", args.images, 1)
            for recipe in ("continue.toml", "data.toml"):
                shutil.copy(RECIPES / "demo" / recipe, folder)
        init = (f'model.diffusers_path="{DEMO}"', f'model.init="{DEMO}"', "sampling.size=64")
        return load_config(folder / "continue.toml", [*_KEYS, *own, *init, *keys])

    def base(self) -> Path:
        """Return the teacher in a world that was prepared."""
        folder = self.args.base or self.args.out / "base"
        exports = [folder] if (folder / "model_index.json").is_file() else sorted(folder.glob("exports/step-*"))
        if not exports:
            raise UserError(f"{folder} has no export; run this benchmark with --prepare, or name another with --base")
        return exports[-1].absolute()

    @property
    def prompts(self) -> Any:
        """The held-out prompts, in English and Chinese; those of a world's report."""
        if self.args.world is not None:
            return World.read(self.args.world).report_prompts[: self.args.prompts]
        return draw_prompts(self.args.prompts, PROMPT_SEED, held_out=True, language="mixed")

    def affordable(self, name: str, keys: Sequence[str], minutes: float) -> int:
        """Return the steps of a run that fit into the minutes, by the speed of the last of 30."""
        loaded = self.load(f"{name}-speed", _SPEED_STEPS, "logging_steps=10", *keys)
        build_caches(loaded, Launch())
        train.run(loaded, resume=train.Resume(restart=True), on_sample=lambda *_: None)
        events = [event for event in read_lines(loaded.train.output_dir / "log.jsonl") if event["event"] == "step"]
        return max(_SPEED_STEPS, round(60 * minutes * events[-1]["samples_per_second"] / self.args.batch))

    def score(self, sampler: Sampler, denoise: Denoise, drawing: Drawing) -> float:
        """Return the share of images in which everything is right."""
        last = 1 / drawing.calls if 1 < drawing.calls < TEACHER_STEPS else 0.0
        model = sampler.config.model.model_copy(update={"last_time": last})
        config = sampler.config.model_copy(update={"model": model})
        first = 100_000 * self.args.seed
        requests = tuple(
            replace(request, seed=first + index, steps=drawing.calls, guidance=drawing.guidance)
            for index, request in enumerate(sampler.requests)
        )
        own = replace(sampler, config=config, requests=requests, batch_size=_BATCH)
        rate = judged(self.prompts, [image for _, image in own.draw(denoise)]).rates["all"]
        assert rate is not None
        return rate

    def train(self, name: str, keys: Sequence[str], drawings: dict[str, Drawing], share: float) -> None:
        """Train for a share of the minutes, or the given steps, and score the rows that are missing."""
        if all(row in self.rows() for row in drawings):
            return
        args = self.args
        steps = args.train_steps if args.minutes is None else self.affordable(name, keys, share * args.minutes)
        self.run(name, keys, steps, drawings)

    def run(self, name: str, keys: Sequence[str], steps: int, drawings: dict[str, Drawing]) -> None:
        """Train and score the rows that are missing."""
        missing = {row: drawing for row, drawing in drawings.items() if row not in self.rows()}
        if not missing:
            return
        loaded = self.load(name, steps, *keys)
        build_caches(loaded, Launch())
        started = time.monotonic()

        def on_sample(progress: Progress, sampler: Sampler, denoise: Denoise) -> None:
            if progress.step != steps:
                return
            trained = time.monotonic() - started
            rows = {row: self.score(sampler, denoise, drawing) for row, drawing in missing.items()}
            print(f"{rows}, trained in {trained:.0f} s", flush=True)
            self.add(rows, trained if steps else 0.0)

        table = loaded.train.sampling.model_copy(update={"before_first_step": steps == 0})
        config = replace(loaded, train=loaded.train.model_copy(update={"sampling": table}))
        train.run(config, resume=train.Resume(restart=True), on_sample=on_sample)


def run(args: argparse.Namespace) -> None:
    """Score the teacher, then train and score every student."""
    bench = Bench(args)
    start_judges()
    guidance = args.guidance
    drawings = [Drawing(TEACHER_STEPS, guidance)]
    if args.method == "guidance":
        drawings.append(Drawing(TEACHER_STEPS))
    else:
        drawings += [Drawing(calls, scale) for calls in args.calls for scale in (guidance, 1.0)]
    teacher = {f"teacher, {drawing.name}": drawing for drawing in drawings}
    bench.run(f"teacher-{args.seed}", ("optimizer.lr=1e-9",), 0, teacher)
    shared = (f"objective.distill.guidance={guidance}", *args.set)
    if args.method == "guidance":
        student = {"student of guidance, 28 x 1": Drawing(TEACHER_STEPS)}
        bench.train(f"guidance-{args.seed}", shared, student, 0.5)
        continued = {"continued, 28 x 1": Drawing(TEACHER_STEPS)}
        bench.train(f"continued-{args.seed}", args.set, continued, 0.5)
        return
    share = 1 / (1 + len(args.calls))
    for calls in args.calls:
        own = (f"objective.distill.steps={calls}", f"objective.distill.teacher_steps={args.teacher_steps}")
        student = {f"student, {Drawing(calls).name}": Drawing(calls)}
        bench.train(f"steps-{calls}-{args.seed}", (*shared, *own), student, share)
    continued = {f"continued, {Drawing(calls).name}": Drawing(calls) for calls in args.calls}
    bench.train(f"continued-{args.seed}", args.set, continued, share)


def prepare(args: argparse.Namespace) -> None:
    """Train the teacher of a prepared world; an interrupted training continues."""
    keys = [*_KEYS, f'output_dir="{args.out.absolute()}/base"', "checkpoint_every_n_minutes=2", *args.set]
    keys = [key for key in keys if not key.startswith(("checkpoint_every_n_steps", "model.enable_uncond"))]
    saved = any((args.out / "base" / "checkpoints").glob("step-*"))
    loaded = load_world(args.world, [*keys, f"max_steps={args.train_steps}"])
    train.run(loaded, resume=train.Resume() if saved else None)


def table_of(files: Iterable[Path]) -> str:
    """Return a table of means over seeds, with standard errors."""
    found: dict[str, list[float]] = defaultdict(list)
    for file in files:
        for row, rate in json.loads(file.read_text(encoding="utf-8"))["rows"].items():
            found[row].append(rate)
    lines = ["| model, calls x passes | right | seeds |", "|---|---:|---:|"]
    for row, rates in found.items():
        lines.append(f"| {row} | {spread(rates, 3)} | {len(rates)} |")
    return "\n".join(lines)


def main() -> None:
    """Run a seed, or join the results of several."""
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--method", choices=("steps", "guidance"), default="steps")
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--train-steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="of training, in place of --train-steps")
    parser.add_argument("--world", type=Path, help="a folder of world_prepare.py")
    parser.add_argument("--base", type=Path, help="the teacher in that world: an export")
    parser.add_argument("--prepare", action="store_true", help="train the teacher")
    parser.add_argument("--teacher-steps", type=int, default=TEACHER_STEPS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--join", type=Path, nargs="*", metavar="MORE")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.join is not None:
        print(table_of([*sorted(args.out.glob("seed-*.json")), *args.join]))
        return
    (prepare if args.prepare else run)(args)


if __name__ == "__main__":
    main()
