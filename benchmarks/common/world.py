"""Training runs on a folder of `world_prepare.py` that are scored on held-out prompts while they train.

A run is the train stage with its checkpoints and without exports. Its scores are in scores.jsonl of its folder, so that
a run that was cut continues from its checkpoint with its scores.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import torch
from PIL import Image

from common.hard.dataset import draw_hard_prompts
from sd3_light.checkpoint.progress import Progress
from sd3_light.checkpoint.requests import SAVE_QUIT
from sd3_light.checkpoint.store import step_of
from sd3_light.config import LoadedConfig, UserError, load_config
from sd3_light.config.faults import Stopped
from sd3_light.evaluate.composition import CompositionScore
from sd3_light.export.background_saves import newest_usable
from sd3_light.sample.in_training import Sampler
from sd3_light.sample.loop import Denoise
from sd3_light.system import usable_cores
from sd3_light.train import verb as train
from sd3_light.train.state import MakeObjective
from sd3_light.world import Prompt, draw_prompts
from sd3_light.world.judge import Verdict

BASE = Path(__file__).parents[1] / "world.toml"
BENCH_FILE = "bench.json"
REAL_CACHE = ('model.text_tokens="real"', 'cache_dir="cache-real"')
"""Overrides of a run on real text tokens."""
PROMPT_SEED, REPORT_SEED = 3, 5
ENCODERS_FILE = "encoders.json"
_SCORES = "scores.jsonl"
_SAMPLE_BATCH = 256
_MAX_JUDGES = 8
_GRID = 64  # images of last.png
_MAX_DEMO_SIDE = 256  # where the position table of the size `demo` ends
_LARGE_TABLE = ('size = "demo"', "shape = { num_layers = 4, num_heads = 4 }")  # the same size with a larger table


@dataclass(frozen=True)
class Bench:
    """What a prepared folder contains: images of a side, and prompts to watch training and to report its result."""

    hard: bool
    side: int
    num_prompts: int
    num_report: int = 512

    @staticmethod
    def read(folder: Path) -> "Bench":
        """Return the bench of a folder."""
        file = folder / BENCH_FILE
        if not file.is_file():
            raise UserError(f"{folder} has no {BENCH_FILE}; prepare it with benchmarks/world_prepare.py")
        return Bench(**json.loads(file.read_text(encoding="utf-8")))

    @property
    def prompts(self) -> list[Prompt]:
        """The held-out prompts of a run's curve, by which it is tuned and stopped, in English and Chinese."""
        return self._drawn(self.num_prompts, PROMPT_SEED)

    @property
    def report_prompts(self) -> list[Prompt]:
        """The held-out prompts of a run's result, none of which is in `prompts`."""
        used = {prompt.text for prompt in self.prompts}
        drawn = {prompt.text: prompt for prompt in self._drawn(2 * (self.num_report + self.num_prompts), REPORT_SEED)}
        chosen = [prompt for text, prompt in drawn.items() if text not in used][: self.num_report]
        if len(chosen) < self.num_report:
            raise UserError(f"only {len(chosen)} held-out prompts are left for the report; choose fewer with --report")
        return chosen

    def _drawn(self, count: int, seed: int) -> list[Prompt]:
        draw = draw_hard_prompts if self.hard else draw_prompts
        return draw(count, seed, held_out=True, language="mixed")

    def overrides(self, overrides: Sequence[str]) -> list[str]:
        """Return the overrides of a run after those of the bench."""
        texts = json.dumps([prompt.text for prompt in self.prompts], ensure_ascii=False)
        return [f"model.t5_max_length={24 if self.hard else 16}", f"sampling.prompts={texts}", *overrides]


def load(folder: Path, overrides: Sequence[str] = (), base: Path = BASE) -> LoadedConfig:
    """Return the base recipe with overrides, for a prepared folder.

    Above 256 px, and with overrides of `model.shape`, it has a shape in place of the size `demo`.
    """
    bench = Bench.read(folder)
    path = folder / base.name
    text = base.read_text(encoding="utf-8")
    if bench.side > _MAX_DEMO_SIDE or any(override.startswith("model.shape.") for override in overrides):
        path = path.with_stem(f"{base.stem}-shape")
        text = text.replace(*_LARGE_TABLE)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        own = path.with_suffix(f".{os.getpid()}")  # lanes write the same file
        own.write_text(text, encoding="utf-8")
        own.replace(path)
    return load_config(path, bench.overrides(overrides))


def text_encoders(folder: Path) -> dict[str, str]:
    """Return which text encoders a prepared folder has, and from what they learned."""
    file = folder / ENCODERS_FILE
    if not file.is_file():
        raise UserError(f"{folder} has no {ENCODERS_FILE}; run benchmarks/world_prepare.py again, which writes it")
    stated: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return stated


@dataclass
class ScoredRun:
    """One training run with its scores along the way; `run` starts or continues it.

    ``seconds`` is the time of training: building and loading everything, steps, evaluation and checkpoints, without
    drawing and judging images. ``target`` ends the run at the first score that reaches it. ``objective`` replaces that
    of the config.
    """

    loaded: LoadedConfig
    prompts: Sequence[Prompt]
    target: float | None = None
    objective: MakeObjective | None = None
    scores: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    is_finished: bool = False
    _started: float = 0.0
    _sampler: Sampler | None = None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.loaded.train.output_dir

    def run(self, deadline: float | None = None) -> Progress:
        """Train until the end, the target or the deadline (of `time.monotonic`), where a checkpoint is saved."""
        checkpoint = newest_usable(self.folder, "delete the folder")
        self._read_scores(0 if checkpoint is None else step_of(checkpoint))
        (self.folder / SAVE_QUIT).unlink(missing_ok=True)
        self._started = time.monotonic() - self.seconds
        resume = train.Resume() if checkpoint else None
        try:
            with self._stopping_at(deadline):
                end = train.run(self.loaded, resume=resume, on_sample=self._score, objective=self.objective)
        except Stopped:
            saved = newest_usable(self.folder, "delete the folder")
            self._write_time(0 if saved is None else step_of(saved))
            raise
        self._sampler = None
        self._write_time(end.step)
        self.is_finished = end.step == self.loaded.train.max_steps or self._has_reached_target()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return end

    def _has_reached_target(self) -> bool:
        return self.target is not None and any(score["rates"]["all"] >= self.target for score in self.scores)

    def _read_scores(self, step: int) -> None:
        """Read what earlier calls wrote, up to the checkpoint's step."""
        file = self.folder / _SCORES
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        kept = [entry for entry in map(json.loads, lines) if entry["step"] <= step]
        self.scores = list({entry["step"]: entry for entry in kept if "rates" in entry}.values())
        self.seconds = max((entry["seconds"] for entry in kept), default=0.0)

    def _write_time(self, step: int) -> None:
        self.seconds = time.monotonic() - self._started
        self._write(step=step, seconds=self.seconds)

    def _write(self, **entry: Any) -> None:
        with open(self.folder / _SCORES, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    @contextmanager
    def _stopping_at(self, deadline: float | None) -> Iterator[None]:
        """Ask the run to save and quit at the deadline."""
        timer = Timer(max(0.0, (deadline or 0.0) - time.monotonic()), self._stop)
        timer.daemon = True
        if deadline is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _stop(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / SAVE_QUIT).touch()

    def _score(self, progress: Progress, sampler: Sampler, denoise: Denoise) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        paused = time.monotonic()
        seconds = paused - self._started
        if self._sampler is None:  # keeps its VAE
            requests = tuple(replace(request, seed=index) for index, request in enumerate(sampler.requests))
            self._sampler = replace(sampler, requests=requests, batch_size=_SAMPLE_BATCH)
        score = judged(self.prompts, [image for _, image in self._sampler.draw(denoise)])
        rates = {name: None if rate is None else round(rate, 4) for name, rate in score.rates.items()}
        entry = {**progress.counts(), "seconds": seconds, "rates": rates}
        self.scores.append(entry)
        self._write(**entry)
        print(f"{self.folder.name}: step {progress.step}, {rates['all']:.3f} wholly right", flush=True)
        if self._has_reached_target():
            self._stop()
        shown = CompositionScore(*(part[:_GRID] for part in (score.prompts, score.images, score.verdicts)))
        shown.as_grid(scale=1, title=f"step {progress.step:,}").save(self.folder / "last.png")
        self._started += time.monotonic() - paused


_judges: list[ProcessPoolExecutor] = []


def start_judges(lanes: int = 1) -> None:
    """Start processes that judge images, if there are cores for them in each of ``lanes`` processes.

    They are forked: call it before CUDA is used.
    """
    count = min(_MAX_JUDGES, usable_cores() // lanes - (2 if lanes == 1 else 0))
    if count >= 2 and not _judges:
        pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"))
        list(pool.map(abs, range(count)))
        _judges.append(pool)


def judged(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> CompositionScore:
    """Return the score of the images."""
    apply = partial(_judges[0].map, chunksize=8) if _judges else map
    return CompositionScore(tuple(prompts), tuple(images), tuple(apply(_verdict, prompts, images)))


def _verdict(prompt: Prompt, image: Image.Image) -> Verdict:
    return prompt.judge(image)
