"""Does a LoRA from 20 images learn a word, or its captions? A sweep of learning rate, rank and steps, with seeds.

    python benchmarks/lora_concept.py FOLDER [--lr 1e-4 2e-4 ...] [--rank 4 16 ...] [--steps 200 400 ...]
                                      [--batch 4 ...] [--seeds 1 2 3] [--lanes 4] [--minutes 25]
                                      [--set KEY=VALUE ...] [--toy]
    python benchmarks/lora_concept.py FOLDER --plan
    python benchmarks/lora_concept.py FOLDER --show [OTHER_FOLDER ...]

The demo's base learns "zorb", a word it never saw for a pair of colour and shape it never drew, with
`recipes/lora.toml` and the values of `DEMO_KEYS`. The 20 images show one or two large zorbs on two of the four
backgrounds. The exact judge of the world counts the images in which everything is right, for prompts of these groups:

    captions      the captions of the images: memorising is enough
    backgrounds   one or two zorbs on the other backgrounds
    sizes         a small zorb
    counts        three or four zorbs
    beside        a zorb left of, right of, above or below another object
    rest          the demo's held-out prompts, without the word: what the model forgets

`word` is the mean of the four groups between `captions` and `rest`. A cell is one learning rate, rank, number of steps,
batch and seed; the seed also draws the images. Alpha is the rank. `--lanes` cells train at the same time, each in a
separate process, on the same GPU: the demo model leaves most of it idle. `--plan` only says how many cells are
missing and how long they take by those that are finished.

A finished cell is a file in FOLDER/cells and is skipped the next time, unless the recipe or `--set` changed. After
`--minutes` the cells that train are ended and not recorded, so a sweep needs as many calls as its time; all cells get
their first seed first. The table of all cells, also those of other folders, is printed and written to FOLDER/table.md:
means and standard errors over seeds, the best `word` less what is forgotten first. `--toy` shows on a CPU that it
works.
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any

from common.basics import device_name, parser_of, spread
from common.world import judged, start_judges

from sd3_light.assets import DEMO
from sd3_light.checkpoint.progress import Progress
from sd3_light.config import LoadedConfig, load_config
from sd3_light.engines import Launch
from sd3_light.files import write_atomically
from sd3_light.journeys import build_caches
from sd3_light.randomness import stream
from sd3_light.recipes import FOLDER as RECIPES
from sd3_light.sample.in_training import Sampler
from sd3_light.sample.loop import Denoise
from sd3_light.train import verb as train
from sd3_light.world import Prompt, draw_prompts, render_scene, scene_captions
from sd3_light.world.scene import ALL_PAIRS, BACKGROUNDS, RELATIONS, Item, Scene, pick

WORD = "zorb"
COLOUR = "red"
SHAPE = "triangle"
GROUNDS = ("white", "grey")  # of the training images
IMAGES = 20
CELLS = "cells"
WORD_GROUPS = ("backgrounds", "sizes", "counts", "beside")
GROUPS = ("captions", *WORD_GROUPS, "rest")
DEMO_KEYS = (
    "model.t5_max_length=16",
    'model.dtype="float32"',
    "model.shift=1.0",
    "num_dataloader_workers=0",
    "activation_checkpointing=false",
    "compile=false",
    "save_every_n_steps=1000000",
    "checkpoint_every_n_steps=1000000",
    "logging_steps=20",
    "sampling.every_n_steps=1000000",
    "sampling.guidance=2.0",
)
_PAIR = (COLOUR, SHAPE)
_BATCH = 256  # images that are drawn at a time


@dataclass(frozen=True)
class Cell:
    """One run; a cell without steps is the base."""

    lr: float
    rank: int
    steps: int
    batch: int
    seed: int

    @property
    def keys(self) -> list[str]:
        """The overrides of its run."""
        shared = (f"micro_batch_size_per_gpu={self.batch}", f"seed={self.seed}", f"optimizer.lr={self.lr}")
        lengths = (f"max_steps={max(1, self.steps)}", f"warmup_steps={self.steps // 20}")
        return [*shared, *lengths, f"adapter.rank={self.rank}", f"adapter.alpha={float(self.rank)}"]

    @property
    def name(self) -> str:
        """The name of its run and of its result."""
        return "-".join(str(value) for value in asdict(self).values())


@dataclass(frozen=True)
class Bench:
    """Where cells train, with how many prompts per group and sampler steps, and which other keys."""

    folder: Path
    prompts: int
    sampler_steps: int
    lanes: int = 1
    more: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        """A hash of everything that cells have in common."""
        text = (RECIPES / "lora.toml").read_text(encoding="utf-8")
        facts = (text, DEMO_KEYS, self.prompts, self.sampler_steps, self.more)
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]

    def groups(self) -> list[tuple[str, Prompt]]:
        """Return all prompts with their groups."""
        chosen: list[tuple[str, Prompt]] = []
        for name in GROUPS[:-1]:
            scenes = [_group_scene(name, index) for index in range(self.prompts)]
            chosen += [(name, Prompt(caption(scene), scene)) for scene in scenes]
        rest = draw_prompts(2 * self.prompts, 0, held_out=True, language="mixed")
        return [*chosen, *(("rest", prompt) for prompt in rest)]

    def load(self, cell: Cell) -> LoadedConfig:
        """Write the images of a seed and the recipe unless they exist; return the config of a cell."""
        home = self.folder / f"seed-{cell.seed}"
        if not (home / "lora.toml").is_file():
            write_images(home / "data" / "concept", cell.seed)
            data = (RECIPES / "lora_data.toml").read_text(encoding="utf-8")
            (home / "lora_data.toml").write_text(data.replace("[1024]", "[64]"), encoding="utf-8")
            recipe = (RECIPES / "lora.toml").read_text(encoding="utf-8")
            (home / "lora.toml").write_text(recipe, encoding="utf-8")
        texts = json.dumps([prompt.text for _, prompt in self.groups()], ensure_ascii=False)
        own = (f'output_dir="runs/{cell.name}-{self.recipe}"', f'model.diffusers_path="{DEMO}"')
        drawn = (f"sampling.prompts={texts}", f"sampling.steps={self.sampler_steps}")
        return load_config(home / "lora.toml", [*DEMO_KEYS, *own, *drawn, *cell.keys, *self.more])


def caption(scene: Scene) -> str:
    """Return the caption of a scene with the new word in place of its colour and shape."""
    return scene_captions(scene)["en"].replace(f"{COLOUR} {SHAPE}", WORD)


def _scene(count: int, ground: str, size: str = "large") -> Scene:
    """Return one zorb of a size, or several."""
    if count == 1:
        return Scene("single", (Item(SHAPE, COLOUR, size),), None, 1, ground)
    return Scene("count", (Item(SHAPE, COLOUR),), None, count, ground)


def _group_scene(group: str, index: int) -> Scene:
    """Return scene ``index`` of a group; small groups repeat, with other noise."""
    rng = stream(7, f"concept {group}", 0, 0, index)
    ground = pick(rng, tuple(BACKGROUNDS))
    if group == "captions":
        return _scene(1 + index % 2, GROUNDS[index // 2 % 2])
    if group == "backgrounds":
        return _scene(1 + index % 2, pick(rng, tuple(name for name in BACKGROUNDS if name not in GROUNDS)))
    if group == "sizes":
        return _scene(1, ground, "small")
    if group == "counts":
        return _scene(3 + index % 2, ground)
    others = tuple(pair for pair in ALL_PAIRS if COLOUR not in pair and SHAPE not in pair)
    colour, shape = pick(rng, others)
    items = (Item(SHAPE, COLOUR), Item(shape, colour))
    return Scene("pair", items if index % 2 else items[::-1], pick(rng, RELATIONS), 2, ground)


def write_images(folder: Path, seed: int) -> None:
    """Write the captioned images, whose positions and sizes vary with the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(IMAGES):
        scene = _group_scene("captions", index)
        render_scene(scene, 64, 64, stream(seed, "concept", 0, 0, index)).save(folder / f"{index:03d}.png")
        (folder / f"{index:03d}.txt").write_text(caption(scene), encoding="utf-8")


def run_cell(bench: Bench, cell: Cell) -> dict[str, Any]:
    """Train and score a cell; return its line of the results."""
    loaded = bench.load(cell)
    build_caches(loaded, Launch())
    groups = bench.groups()
    rates: dict[str, float] = {}
    started = time.monotonic()

    def on_sample(progress: Progress, sampler: Sampler, denoise: Denoise) -> None:
        if progress.step != cell.steps:
            return
        requests = tuple(replace(request, seed=index) for index, request in enumerate(sampler.requests))
        images = [image for _, image in replace(sampler, requests=requests, batch_size=_BATCH).draw(denoise)]
        verdicts = judged([prompt for _, prompt in groups], images).verdicts
        for name in GROUPS:
            own = [verdict.all for (group, _), verdict in zip(groups, verdicts, strict=True) if group == name]
            rates[name] = sum(own) / len(own)

    table = loaded.train.sampling.model_copy(update={"before_first_step": cell.steps == 0})
    config = replace(loaded, train=loaded.train.model_copy(update={"sampling": table}))
    train.run(config, resume=train.Resume(restart=True), on_sample=on_sample)
    device = device_name()
    facts = {"recipe": bench.recipe, "seconds": round(time.monotonic() - started, 1), "device": device}
    facts["lanes"] = bench.lanes
    return {**asdict(cell), "groups": rates, **facts, "date": datetime.now(UTC).strftime("%Y-%m-%d")}


# --- lanes ---------------------------------------------------------------------------------------


def run_lanes(bench: Bench, cells: Sequence[Cell], lanes: int, deadline: float) -> None:
    """Train cells in ``lanes`` processes until all are finished or until the deadline of `time.monotonic`."""
    queue = iter(cells)
    with ThreadPoolExecutor(lanes) as pool:
        for lane in [pool.submit(_run_lane, bench, queue, number, deadline) for number in range(lanes)]:
            lane.result()


def _run_lane(bench: Bench, queue: Iterator[Cell], number: int, deadline: float) -> None:
    """Train cells of the queue, one after another, in one process; a cell that ends it is named and left out."""
    lane: _Lane | None = None
    for cell in queue:  # a step of an iterator is atomic: it holds the interpreter's lock
        lane = lane or _Lane(bench, number)
        line = lane.run(cell, deadline)
        if line is None:
            lane.close()
            lane = None
            if time.monotonic() >= deadline:
                return
            print(f"{cell.name} failed; see {bench.folder / f'lane-{number}.log'}", flush=True)
            continue
        write_atomically(bench.folder / CELLS / f"{cell.name}-{bench.recipe}.json", json.dumps(line).encode())
        rates = ", ".join(f"{group} {rate:.2f}" for group, rate in line["groups"].items())
        print(f"lane {number}: {cell.name}, {line['seconds']:.0f} s: {rates}", flush=True)
    if lane is not None:
        lane.close()


class _Lane:
    """A process that trains one cell at a time; what it prints is in a file."""

    def __init__(self, bench: Bench, number: int) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA cannot be forked
        self._connection, theirs = context.Pipe()
        log = bench.folder / f"lane-{number}.log"
        self._process = context.Process(target=_serve, args=(bench, theirs, log))
        self._process.start()
        theirs.close()

    def run(self, cell: Cell, deadline: float) -> dict[str, Any] | None:
        """Return the result of a cell; None if the process ended, or at the deadline."""
        try:
            self._connection.send(cell)
            if self._connection.poll(max(0.0, deadline - time.monotonic())):
                line: dict[str, Any] = self._connection.recv()
                return line
        except (EOFError, OSError):
            pass
        return None

    def close(self) -> None:
        """End the process and its judges, also while it trains."""
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGTERM)
        self._process.terminate()  # also before it leads a group
        self._process.join()


def _serve(bench: Bench, connection: Connection, log: Path) -> None:
    """Train the cells that come, until the other side closes."""
    os.setpgid(0, 0)
    with log.open("a") as file:
        for stream_number in (1, 2):
            os.dup2(file.fileno(), stream_number)
    start_judges(bench.lanes)
    while True:
        try:
            cell = connection.recv()
        except EOFError:
            return
        connection.send(run_cell(bench, cell))


# --- results -------------------------------------------------------------------------------------


def read_results(folders: Iterable[Path], recipe: str | None = None) -> dict[Cell, dict[str, Any]]:
    """Return the finished cells of folders, of one recipe or all."""
    found = {}
    for path in (path for folder in folders for path in sorted((folder / CELLS).glob("*.json"))):
        line = json.loads(path.read_text(encoding="utf-8"))
        if recipe is None or line["recipe"] == recipe:
            found[Cell(*(line[name] for name in Cell.__dataclass_fields__))] = line
    return found


def plan_of(missing: Sequence[Cell], results: dict[Cell, dict[str, Any]], lanes: int) -> str:
    """Return how many cells and steps are missing, and their time by those that are finished with as many lanes."""
    steps = sum(cell.steps for cell in missing)
    text = f"{len(missing)} cells are missing, {steps:,} steps"
    known = [(cell.steps, line["seconds"]) for cell, line in results.items() if line["lanes"] == lanes and cell.steps]
    if not known or not missing:
        return text
    # a cell takes a time for its steps, and one for loading, drawing and judging
    if len({length for length, _ in known}) > 1:
        slope, start = linear_regression(*zip(*known, strict=True))
    else:
        slope, start = sum(seconds for _, seconds in known) / sum(length for length, _ in known), 0.0
    minutes = max(0.0, slope * steps + start * len(missing)) / lanes / 60
    return f"{text}: about {minutes:.1f} minutes in {lanes} lanes, by {len(known)} finished cells"


def table_of(results: dict[Cell, dict[str, Any]]) -> str:
    """Return a table of means over seeds, the best first; the base is its first row."""
    rows: dict[tuple[Any, ...], list[dict[str, float]]] = defaultdict(list)
    for cell, line in results.items():
        groups = line["groups"]
        word = mean(groups[name] for name in WORD_GROUPS)
        rows[(cell.lr, cell.rank, cell.steps, cell.batch)].append({**groups, "word": word})
    base = [row["rest"] for key, seeds in rows.items() if key[2] == 0 for row in seeds]
    kept = mean(base) if base else 1.0

    def rank(item: tuple[tuple[Any, ...], list[dict[str, float]]]) -> tuple[bool, float]:
        key, seeds = item
        return key[2] > 0, -mean(row["word"] + min(0.0, row["rest"] - kept) for row in seeds)

    names = ("word", *GROUPS)
    lines = [f"| lr | rank | steps | batch | seeds | {' | '.join(names)} |", "|---:" * (5 + len(names)) + "|"]
    for key, seeds in sorted(rows.items(), key=rank):
        lr, size, steps, batch = key
        head = "| base | | 0 | |" if steps == 0 else f"| {lr:g} | {size} | {steps} | {batch} |"
        cells = [spread([row[name] for row in seeds], 2) for name in names]
        lines.append(f"{head} {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def show(folder: Path, others: Sequence[Path] = (), recipe: str | None = None) -> None:
    """Print the table of all results and write it."""
    text = table_of(read_results([folder, *others], recipe))
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def main() -> None:
    """Run the cells that are missing, then print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-4, 2e-4, 5e-4, 1e-3])
    parser.add_argument("--rank", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 400, 800, 1600])
    parser.add_argument("--batch", type=int, nargs="+", default=[4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--prompts", type=int, default=64, help="per group")
    parser.add_argument("--sampler-steps", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=1, help="cells at the same time, on one GPU")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--show", type=Path, nargs="*", metavar="OTHER_FOLDER")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    (args.folder / CELLS).mkdir(parents=True, exist_ok=True)
    if args.show is not None:
        show(args.folder, args.show)
        return
    bench = Bench(args.folder, args.prompts, args.sampler_steps, args.lanes, tuple(args.set))
    values = (args.seeds, args.steps, args.lr, args.rank, args.batch)  # all settings get their first seed first
    if args.toy:
        bench = replace(bench, prompts=2, sampler_steps=2)
        values = ([1], [2, 4], [1e-3], [4], [4])
    cells = [Cell(lr, rank, steps, batch, seed) for seed, steps, lr, rank, batch in itertools.product(*values)]
    done = read_results([args.folder], bench.recipe)
    missing = [cell for cell in (Cell(1e-9, 1, 0, 1, cells[0].seed), *cells) if cell not in done]
    print(plan_of(missing, done, args.lanes), flush=True)
    if args.plan:
        return
    for cell in {cell.seed: cell for cell in missing}.values():  # so that lanes do not build a cache at the same time
        build_caches(bench.load(cell), Launch())
    run_lanes(bench, missing, args.lanes, deadline)
    show(args.folder, recipe=bench.recipe)


if __name__ == "__main__":
    main()
