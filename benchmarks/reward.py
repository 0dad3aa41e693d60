"""Does training towards a score draw more prompts right than other ways to spend the same time?

    python benchmarks/reward.py OUT --seed N [--minutes M] [--rows ROW ...] [--base FOLDER]
    python benchmarks/reward.py OUT --world FOLDER --base EXPORT --seed N ...
    python benchmarks/reward.py OUT --join

The demo's `pretrain` recipe trains a small denoiser from random weights with the demo's text encoders and VAE; it is
kept in OUT/base and not counted. With `--world`, a folder of `world_prepare.py --scenes hard`, `--base` is an export
that `distill.py --prepare` trained on it. It is then trained for M minutes of CPU time (on a GPU of the clock) in each
row:

    reward        [reward] with the world's judge, on seen prompts
    supervised    flow matching on the images of pretraining
    best of n     flow matching on its best of 8 images of every seen prompt; drawing them takes half of the time
    shuffled      [reward] with the scores of the images of a draw in a random order
    preferences   [objective.dpo] on the best and the worst of these 8 images, for the other half of the time
    chosen        flow matching on the best of them alone, for the same steps as `preferences`

Every row, and the start, draws held-out prompts without guidance, one image each, and the judge counts those in which
everything is right; the start also with guidance 2. `diversity` is the mean distance of 8 images of a prompt, in pixels
from 0 to 1. Each row is OUT/seed-N-ROW.json; a finished row is skipped. `--join` prints the table of all seeds: means,
and standard errors over seeds, or by the number of prompts with one seed.
"""

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from common.basics import parser_of, percent, steps_that_fit, write_json
from common.hard.dataset import draw_hard_prompts
from common.world import Bench as World
from common.world import load as load_world
from PIL import Image

from sd3_light.assets import DEMO
from sd3_light.cache import verb as cache
from sd3_light.config import LoadedConfig, load_config
from sd3_light.core.sampling import ImageRequest
from sd3_light.engines import Launch
from sd3_light.evaluate.rewards import Images, Reward
from sd3_light.export.open_pipeline import open_pipeline
from sd3_light.recipes import FOLDER as RECIPES
from sd3_light.sample.generate import generate
from sd3_light.train import verb as train
from sd3_light.world import draw_prompts, write_dataset

ROWS = ("reward", "supervised", "best of n", "shuffled", "preferences", "chosen")
PAIRED = ("best of n", "preferences", "chosen")
SEEN = 400
"""Seen prompts, at most."""
HELD_OUT = 192
DIVERSE = 8
"""Prompts of which 8 images are compared."""
STEPS = 10
"""Sampler steps, in training and in the scores."""
CALIBRATION = (4, 20)
"""Lengths of two runs whose times tell the time of a step."""
KEYS = (
    "eval_datasets=[]",
    "eval_every_n_steps=1000000",
    "checkpoint_every_n_steps=1000000",
    "save_every_n_steps=1000000",
    "cooldown_steps=0",
    "compile=false",
    "num_dataloader_workers=0",
    "micro_batch_size_per_gpu=64",
    "optimizer.lr=5e-4",
)
REWARD = (
    'reward.score="python"',
    "reward.prompts_per_draw=8",
    "reward.images_per_prompt=8",
    "reward.every_n_steps=8",
    f"reward.steps={STEPS}",
)


def seconds() -> float:
    """Return the time that counts: of the clock on a GPU, of this process on a CPU, which others may share."""
    return time.monotonic() if torch.cuda.is_available() else time.process_time()


def prepare(out: Path, base: Path | None) -> Path:
    """Return the weights of pretraining, which are trained if they are not there."""
    folder = base or out / "base"
    if not list((folder / "pretrain" / "exports").glob("step-*")):
        write_dataset(folder / "data" / "train", 3000, 1)
        write_dataset(folder / "data" / "held_out", 16, 2, held_out=True)
        for name in ("pretrain", "data", "eval"):
            (folder / f"{name}.toml").write_text((RECIPES / "demo" / f"{name}.toml").read_text(encoding="utf-8"))
        if not (folder / "model").exists():
            (folder / "model").symlink_to(DEMO)
        loaded = load_config(folder / "pretrain.toml", KEYS[:2])
        cache.run(loaded)
        train.run(loaded)
    return folder


class Bench:
    """One seed in a folder."""

    def __init__(self, args: argparse.Namespace, out: Path, base: Path) -> None:
        self.out = out
        self.base = base
        self.seed: int = args.seed
        self.minutes: float = args.minutes
        self.world: Path | None = args.world
        world = None if self.world is None else World.read(self.world)
        self.side = 64 if world is None else world.side
        self.start = base if world is not None else sorted((base / "pretrain" / "exports").glob("step-*"))[-1]
        draw = draw_hard_prompts if world is not None and world.hard else draw_prompts
        seen = draw(SEEN, 1000 + self.seed, held_out=False)
        self.prompts = {prompt.english: prompt for prompt in seen}
        self.seen = list(self.prompts)
        self.held_out = draw(HELD_OUT, 2000 + self.seed, held_out=True)
        self._generator = np.random.default_rng(self.seed)

    def reward(self, images: Images, prompts: Sequence[str]) -> list[float]:
        """Return the share of a prompt's requirements that each image meets."""
        each = []
        for image, prompt in zip(images, prompts, strict=True):
            verdict = self.prompts[prompt].judge(Image.fromarray(image))
            met = [value for value in vars(verdict).values() if value is not None]
            each.append(sum(met) / len(met))
        return each

    def shuffled(self, images: Images, prompts: Sequence[str]) -> Any:
        """Return rewards in a random order: they say nothing about an image."""
        return self._generator.permutation(self.reward(images, prompts))

    @property
    def work(self) -> Path:
        """The folder of the seed's runs."""
        return self.out / f"seed-{self.seed}"

    def run(self, row: str) -> None:
        """Train and score a row, unless its result is there."""
        result = self.out / f"seed-{self.seed}-{row.replace(' ', '-')}.json"
        if result.is_file():
            return
        steps, model = 0, self.start
        facts: dict[str, Any] = {}
        if row == "start":
            facts["guided"] = self.right(self.start, guidance=2.0)
        else:
            loaded, reward = self.config(row)
            steps = self.affordable(loaded, reward, 0.5 if row in PAIRED else 1.0)
            model, facts["minutes"] = self.trained(loaded, reward, steps)
        scored = {"right": self.right(model), "diversity": self.diversity(model)}
        values = {"row": row, "seed": self.seed, "steps": steps, "prompts": len(self.held_out), **scored, **facts}
        write_json(result, values)
        print(json.dumps(values), flush=True)

    def config(self, row: str) -> tuple[LoadedConfig, Reward | None]:
        """Return the config of a row, whose cache is built, and its reward."""
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "prompts.txt").write_text("\n".join(self.seen), encoding="utf-8")
        name = row.replace(" ", "-")
        keys = [*KEYS, f"seed={self.seed}", "warmup_steps=8", "ema.decay=0.9", "ema.update_every=8", "max_steps=1"]
        keys += [f'output_dir="{self.work / name}"', f'model.init="{self.start}"']
        if row in PAIRED:
            self.draw_pairs()
            keys += [f'dataset="{self.work / "pairs.toml"}"', f'cache_dir="{self.work / "cache-pairs"}"']
        if row in ("reward", "shuffled"):
            keys += [*REWARD, f'reward.prompts="{self.work / "prompts.txt"}"']
        if row == "preferences":
            keys += ["objective.dpo.beta=500.0", 'objective.dpo.teacher="start"']
        reward = {"reward": self.reward, "shuffled": self.shuffled}.get(row)
        if self.world is not None:
            loaded = load_world(self.world, [*keys, "sampling.every_n_steps=1000000", "sampling.after_last_step=false"])
        else:
            path = self.base / f"{name}-{self.seed}.toml"  # without the size, which is that of the weights
            text = (self.base / "pretrain.toml").read_text(encoding="utf-8")
            path.write_text(text.replace('size = "tiny2"\n', ""), encoding="utf-8")
            loaded = load_config(path, keys)
        cache.run(loaded)
        return loaded, reward

    def affordable(self, loaded: LoadedConfig, reward: Reward | None, share: float) -> int:
        """Return the steps that take a share of the minutes, by the times of two short runs."""

        def seconds_of(steps: int) -> float:
            began = seconds()
            self.trained(loaded, reward, steps)
            return seconds() - began

        return steps_that_fit(seconds_of, CALIBRATION, share * self.minutes)

    def trained(self, loaded: LoadedConfig, reward: Reward | None, steps: int) -> tuple[Path, float]:
        """Train and return the export and the minutes, with loading and exporting."""
        began = seconds()
        config = loaded.train.model_copy(
            update={"max_steps": steps, "output_dir": self.work / f"{loaded.train.output_dir.name}-{steps}"}
        )
        whole = LoadedConfig(**{**vars(loaded), "train": config})
        train.run(whole, reward=reward, resume=train.Resume(restart=True))
        (export,) = sorted((config.output_dir / "exports").glob("step-*"))[-1:]
        return export, round((seconds() - began) / 60, 2)

    def draw_pairs(self) -> None:
        """Write the best and the worst of 8 images of seen prompts, for half of the time."""
        folder = self.work / "pairs"
        if (self.work / "pairs.toml").is_file():
            return
        (folder / "rejected").mkdir(parents=True, exist_ok=True)
        began, captions = seconds(), {}
        for number, prompt in enumerate(self.seen):
            if seconds() - began > 30 * self.minutes:
                break
            images = self.images(self.start, [prompt] * 8, first=8 * number)
            scored = self.reward(np.stack([np.asarray(image) for image in images]), [prompt] * 8)
            if max(scored) > min(scored):
                images[int(np.argmax(scored))].save(folder / f"{number:04d}.png")
                images[int(np.argmin(scored))].save(folder / "rejected" / f"{number:04d}.png")
                captions[f"{number:04d}.png"] = prompt
        (folder / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
        sizes = f"size_buckets = [[{self.side}, {self.side}]]"
        text = f'{sizes}\n[[directory]]\npath = "pairs"\nrejected = "pairs/rejected"\n'
        (self.work / "pairs.toml").write_text(text, encoding="utf-8")

    # --- scores ------------------------------------------------------------------------------------

    def images(self, model: Path, prompts: Sequence[str], first: int = 0, guidance: float = 1.0) -> list[Image.Image]:
        """Return an image of every prompt, with seeds from ``first`` on."""
        key = str(model)
        if key not in self._opened:
            self._opened.clear()
            self._opened[key] = open_pipeline(model, Launch().device())
        pipe, policy = self._opened[key]
        requests = [ImageRequest(text, first + number, self.side, self.side) for number, text in enumerate(prompts)]
        return generate(pipe, requests, policy, (STEPS, guidance))

    _opened: dict[str, Any] = {}  # noqa: RUF012

    def right(self, model: Path, guidance: float = 1.0) -> float:
        """Return the share of held-out prompts in which everything is right."""
        images = self.images(model, [prompt.text for prompt in self.held_out], guidance=guidance)
        return mean(prompt.judge(image).all for prompt, image in zip(self.held_out, images, strict=True))

    def diversity(self, model: Path) -> float:
        """Return the mean distance of two of 8 images of a held-out prompt."""
        distances = []
        for prompt in self.held_out[:DIVERSE]:
            images = self.images(model, [prompt.text] * 8)
            pixels = torch.stack([torch.from_numpy(np.asarray(image) / 255).flatten() for image in images])
            distances.append(float(torch.pdist(pixels).mean()) / math.sqrt(pixels.shape[1]))
        return round(mean(distances), 4)


def join(out: Path) -> str:
    """Return the table of all results in a folder."""
    by_row: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(out.glob("seed-*.json")):
        values = json.loads(path.read_text(encoding="utf-8"))
        by_row[values["row"]].append(values)
    start = by_row["start"]
    lines = [
        "| row | right, % | diversity, % of the start | steps | CPU minutes | seeds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    if start and "guided" in start[0]:
        guided = percent([each["guided"] for each in start], start[0]["prompts"])
        lines.append(f"| start, guidance 2 | {guided} | | | | {len(start)} |")
    first = {each["seed"]: each["diversity"] for each in start}
    for row in ("start", *ROWS):
        results = by_row[row]
        if results:
            kept = mean(each["diversity"] / first[each["seed"]] for each in results)
            steps = mean(each["steps"] for each in results)
            minutes = mean(each.get("minutes", 0) for each in results)
            right = percent([each["right"] for each in results], results[0]["prompts"])
            lines.append(f"| {row} | {right} | {kept:.0%} | {steps:.0f} | {minutes:.1f} | {len(results)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the rows of a seed, or print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS[:4])
    parser.add_argument("--base", type=Path, help="a folder that another run prepared; with --world an export")
    parser.add_argument("--world", type=Path, help="a folder of world_prepare.py")
    parser.add_argument("--join", action="store_true")
    options = parser.parse_args()
    if options.world is not None and options.base is None and not options.join:
        parser.error("--world needs --base, an export of a model of that world")
    out = options.out.absolute()
    if not options.join:
        out.mkdir(parents=True, exist_ok=True)
        named = options.base and options.base.absolute()
        base = prepare(out, named) if options.world is None else named
        bench = Bench(options, out, base)
        for row in ("start", *options.rows):
            bench.run(row)
    print(join(out))


if __name__ == "__main__":
    main()
