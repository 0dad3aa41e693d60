"""The only module that chains stages: cache then train, and the demo."""

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from sd3_light.assets import DEMO
from sd3_light.cache import verb as cache
from sd3_light.check import verb as check
from sd3_light.checkpoint.lock import is_locked
from sd3_light.checkpoint.progress import Progress
from sd3_light.config import LoadedConfig, load_config
from sd3_light.config.faults import UserError
from sd3_light.engines import Launch, deepspeed
from sd3_light.engines.cpu_threads import limit_threads
from sd3_light.evaluate import verb as evaluate
from sd3_light.evaluate.composition import DEMANDS, CompositionScore, ScoreOptions
from sd3_light.export import init
from sd3_light.other_process import train_beside
from sd3_light.recipes import FOLDER as RECIPES
from sd3_light.runlog import ResultTable, info, print_table, progress
from sd3_light.system import usable_cores
from sd3_light.train import verb as train
from sd3_light.world import write_dataset

_DEMO_MARKER = ".sd3_light_demo"
# more guidance distorts the colours of a model early in training; the base is not affected
_OPTIONS = ScoreOptions(guidance=2.0)


def cache_then_train(
    loaded: LoadedConfig,
    launch: Launch,
    options: cache.CacheOptions | None = None,
    resume: train.Resume | None = None,
    by_deepspeed: bool = False,
) -> Progress:
    """Encode what is missing, then train with the torch or the DeepSpeed engine."""
    check.require(loaded)
    deepspeed.require(loaded.train, launch, by_deepspeed)
    train.require_start(loaded, resume)
    options = replace(options or cache.CacheOptions(), review=train.order_review(loaded, launch, resume))
    cache.run(loaded, launch, options)
    return train.run(loaded, launch, resume, by_deepspeed)


def build_caches(loaded: LoadedConfig, launch: Launch, options: cache.CacheOptions | None = None) -> list[Path]:
    """Encode what is missing, also at URLs, and return the local cache folders; a dry run those that lack something."""
    check.require(loaded, caching=True)
    reports = cache.run(loaded, launch, replace(options or cache.CacheOptions(), at_url=True))
    if options is not None and options.dry_run:
        return [report.folder for report in reports if report.missing]
    locations = [dataset.cache_dir for dataset in (loaded.dataset, *loaded.eval_datasets.values())]
    return [location for location in locations if isinstance(location, Path)]


def cache_then_validate(loaded: LoadedConfig, model: Path, launch: Launch, out: Path | None = None) -> ResultTable:
    """Compute the validation loss of a model on a config's evaluation sets, which are encoded first if needed."""
    evaluate.require_eval_sets(loaded)
    check.require(loaded)
    cache.run(loaded, launch)
    losses_by_set = evaluate.validation_losses(loaded, model, launch)
    if out is not None and launch.is_main:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(losses_by_set, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    table = ResultTable("loss", title="validation", caption=model.name)
    for name in losses_by_set:
        table.add_column(name, justify="right")
    for key in next(iter(losses_by_set.values())):
        table.add_row(key, *(f"{losses[key]:.5f}" for losses in losses_by_set.values()))
    return table


def checked_init(loaded: LoadedConfig, out: Path) -> Path:
    """Check the config, then write the initial folder of a run."""
    check.require(loaded)
    return init.run(loaded, out)


def run_demo(out: Path, steps: int | None, more_steps: int | None, images: int, prompts: int) -> Path:
    """Run the whole demo, print the table of scores and return the path of the image grid."""
    started = time.monotonic()
    _prepare_demo(out, images)
    scratch = load_config(out / "pretrain.toml", _steps(steps))
    base = load_config(out / "continue.toml", _steps(more_steps))

    check.require(scratch)
    check.require(base)
    cache.run(scratch)  # alone: another number of threads would change the last bits of what it encodes
    # pretraining uses one core, and everything else up to half of them at the same time
    neighbours = 1 if usable_cores() > 1 else 0
    limit_threads(1 + neighbours)
    pretraining = train_beside(scratch, _steps(steps), "pretrain") if neighbours else None
    with pretraining or nullcontext(lambda: train.run(scratch).samples) as finish:
        info("scoring random weights")
        untrained = evaluate.run(init.run(scratch, out / "untrained"), prompts, options=_OPTIONS)
        info("continuing from the shipped base (trained on a GPU; see sd3_light/assets/demo/NOTE.md)")
        base_samples = train.run(base, Launch(neighbours=neighbours)).samples
        final = _score_last_export(base.train.output_dir, prompts)
        scratch_samples = finish()
    pretrained = _score_last_export(scratch.train.output_dir, prompts)

    grid = out / "grid.png"
    final.as_grid(title="held-out prompts, drawn by the shipped base after further training here").save(grid)
    rows = {
        "untrained: random weights": untrained,
        f"pretrained here from random weights: {scratch_samples:,} samples": pretrained,
        f"shipped base, then trained here: {base_samples:,} samples": final,
    }
    print_table(score_table(rows))
    minutes = (time.monotonic() - started) / 60
    Console().print(f"took {minutes:.1f} minutes; open {grid}", highlight=False, soft_wrap=True)
    return grid


def score_table(rows: Mapping[str, CompositionScore], of: str = "of held-out combinations") -> ResultTable:
    """Return a table of scores in percent, one column per model."""
    num_prompts = next(iter(rows.values())).num_prompts
    table = ResultTable("correct", title=f"{num_prompts} prompts {of}: % of images that match the prompt")
    for name in rows:
        table.add_column(name, justify="right")
    for demand in DEMANDS:
        table.add_row("everything" if demand == "all" else demand, *(_percent(r.rates[demand]) for r in rows.values()))
    # the first thing a model learns, so this row shows progress early in training
    singles = (result.by_kind.get("single", {}).get("colour") for result in rows.values())
    table.add_row("colour, one object", *map(_percent, singles))
    return table


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.0f}"


def _score_last_export(run: Path, prompts: int) -> CompositionScore:
    exports = sorted((run / "exports").glob("step-*"))
    return evaluate.run(exports[-1], prompts, options=_OPTIONS, out=run / "score.json")


def _steps(count: int | None) -> list[str]:
    return [] if count is None else [f"max_steps={count}"]


def _prepare_demo(out: Path, images: int) -> None:
    """Draw the images and copy the shipped model and recipes next to them. Replaces an earlier demo only."""
    if out.exists():
        if not (out / _DEMO_MARKER).is_file():
            raise UserError(f"{out} exists and is not an earlier demo; choose another folder with --out")
        for run in ("pretrain", "continue"):
            if is_locked(out / run):
                raise UserError(f"a process trains in {out / run}; stop it, or choose another folder with --out")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / _DEMO_MARKER).touch()
    for name, count, seed, held_out in (("train", images, 1, False), ("held_out", min(images, 96), 2, True)):
        with progress(f"draw {name}", count, "images") as bar:
            write_dataset(out / "data" / name, count, seed, held_out=held_out, on_progress=bar.set_done)
    shutil.copytree(DEMO, out / "model")
    for recipe in (RECIPES / "demo").glob("*.toml"):
        shutil.copy(recipe, out)
