"""Verbs of a run: demo, init, check, cache, train."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sd3_light.cli.app import Command, ConfigFile, Overrides, Regenerate, TrustCache, app
from sd3_light.cli.process import command_line, continued_by, echo, init_process, load_checked, suggest, torchrun_line
from sd3_light.config.faults import UserError
from sd3_light.runlog import info, print_table

if TYPE_CHECKING:
    from sd3_light.train.verb import Resume

_RAY_ADDRESS = re.compile(r"auto|local|(ray://)?[^/\s]+:\d+")


@app.command(cls=Command)
def demo(
    out: Annotated[Path, typer.Option(help="Working folder; an earlier demo in it is replaced.")] = Path("demo_run"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps from scratch (default: three to five minutes).")
    ] = None,
    more_steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps that continue from the shipped base.")
    ] = None,
    images: Annotated[
        int, typer.Option("--images", "--pictures", min=1, help="Number of training images to draw.")
    ] = 3000,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts per score.")] = 96,
) -> None:
    """Draw captioned images, cache, pretrain, export, sample and score: the whole workflow on two CPU cores."""
    init_process()
    from sd3_light.journeys import run_demo
    from sd3_light.world import draw_prompts

    run_demo(out, steps, more_steps, images, prompts)
    held_out = draw_prompts(2, 0, held_out=True, kinds=("single",), language="mixed")
    suggest(
        ("sample", out / "continue", *(prompt.text for prompt in held_out)),
        ("report", out / "pretrain", "--out", out / "report.html"),
        ("inspect", out / "cache", "--out", out / "cache.html"),
    )


@app.command(cls=Command)
def init(config: ConfigFile, out: Annotated[Path, typer.Argument(help="New folder.")], set_: Overrides = None) -> None:
    """Write the initial folder of a pretraining run: frozen parts, and a random denoiser from size and seed."""
    init_process()
    from sd3_light.journeys import checked_init

    echo(f"wrote {checked_init(load_checked(config, set_), out)}")
    suggest(("train", config, *_set_options(set_), "--set", f"model.diffusers_path={out.absolute()}"))


@app.command(cls=Command)
def check(
    config: ConfigFile,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", "--world", min=1, help="Number of training GPUs (default: one, or one per pipeline stage)."
        ),
    ] = None,
    deepspeed: Annotated[
        bool, typer.Option("--deepspeed", help="Check for the DeepSpeed engine; implied by pipeline stages.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Kind of GPU, such as H200 (default: that of this machine).")
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", min=1, help="Memory of each GPU, for a run on another machine (default: as here)."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show all numbers with their formulas.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes and seconds as JSON, for programs.")] = False,
    set_: Overrides = None,
) -> None:
    """Report all problems of a config, or whether its run fits, how long it takes and how much disk it needs.

    Exits with 2 if the config has a problem or the run does not fit.
    """
    from sd3_light.check import verb as stage
    from sd3_light.cost.device_peaks import require_known_gpu
    from sd3_light.system import Gpu, visible_gpus

    if gpu is not None:
        require_known_gpu(gpu)
    loaded = load_checked(config, set_)
    estimate = stage.run(loaded, processes, deepspeed)
    is_other = gpu is not None or gpu_memory is not None
    memory = None if gpu_memory is None else int(gpu_memory * 2**30)
    gpus = [Gpu(gpu or "the GPU", memory)] if is_other else visible_gpus()
    on_cpu = not (gpus or processes or estimate.setup.deepspeed)
    speed = stage.cpu_speed(loaded, set_ or (), estimate) if on_cpu and not as_json else None
    target = stage.Target(gpus[0] if gpus else None, on_cpu, is_other or not (gpus or on_cpu), speed)
    conclusion = stage.conclude(loaded.train, estimate, target)
    if as_json:
        echo(json.dumps(stage.figures(loaded.train, estimate, target, conclusion), indent=1))
    else:
        print_table(stage.render(estimate, conclusion, explain, target.on_cpu))
    if exceeded := stage.what_does_not_fit(conclusion):
        raise UserError(f"{config}: the run does not fit ({'; '.join(exceeded)}); the lines above say what to change")
    suggest(("cache", config, *_set_options(set_)), ("train", config, *_set_options(set_)))
    if processes is not None and processes > 1 and not estimate.setup.deepspeed:
        command = torchrun_line(processes, config, *_set_options(set_))
        info(f"on all {processes} GPUs: {command}")


class _CacheCommand(Command):
    """`--ray` takes an address if one follows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        pairs = zip(args, [*args[1:], ""], strict=True)
        bare = [arg == "--ray" and not _RAY_ADDRESS.fullmatch(following) for arg, following in pairs]
        return super().parse_args(ctx, ["--ray=" if is_bare else arg for arg, is_bare in zip(args, bare, strict=True)])


@app.command(cls=_CacheCommand)
def cache(
    config: ConfigFile,
    trust_cache: TrustCache = False,
    regenerate_cache: Regenerate = False,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every shard; damaged ones are encoded again.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Delete files that are no longer used.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report what is fresh, stale or missing without encoding.")
    ] = False,
    part: Annotated[
        str, typer.Option(metavar="I/N", help="Build part I (from 0) of N, for array jobs; then use --finish.")
    ] = "",
    finish: Annotated[bool, typer.Option("--finish", help="Write the manifest when all parts are built.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(metavar="[HOST:PORT]", help="Encode on a Ray cluster (default: RAY_ADDRESS, or the local one)."),
    ] = None,
    ray_actors: Annotated[
        int | None, typer.Option(min=1, help="Encoders on the Ray cluster (default: one per GPU, or per CPU).")
    ] = None,
    set_: Overrides = None,
) -> None:
    """Report what is fresh, stale, missing or orphaned, then encode what is stale or missing."""
    loaded = load_checked(config, set_, caching=True)
    launch = init_process()
    from sd3_light.cache.verb import CacheOptions
    from sd3_light.journeys import build_caches
    from sd3_light.report.inspect import verb as stage

    share = parse_part(part)
    if share and (finish or prune):
        raise UserError("--part builds a part of the cache; --finish and --prune come after all parts")
    if ray is None and ray_actors is not None:
        raise UserError("--ray-actors needs --ray")
    if ray is not None and (share or finish):
        raise UserError("--ray divides the work and writes the manifest itself; give it without --part and --finish")
    options = CacheOptions(trust_cache, regenerate_cache, verify, prune, dry_run, part=share, finish=finish)
    options = replace(options, ray=ray, ray_actors=ray_actors)
    parts = [*(["--part", part] if share else []), *(["--finish"] if finish else []), *_ray_options(ray, ray_actors)]
    with continued_by(command_line("cache", config, *_set_options(set_), *parts)):
        folders = build_caches(loaded, launch, options)
    is_stale = dry_run and bool(folders)
    folders = [] if dry_run or share else folders
    for folder in folders:
        print_table(stage.render(stage.run(folder)))
    pages = (("inspect", folder, "--out", folder.with_suffix(".html")) for folder in folders[:1])
    following = ("cache", config) if is_stale else ("cache", config, "--finish") if share else ("train", config)
    suggest(*pages, (*following, *_set_options(set_)))


def _ray_options(address: str | None, actors: int | None) -> list[str]:
    if address is None:
        return []
    return ["--ray", *([address] if address else []), *(["--ray-actors", str(actors)] if actors else [])]


def parse_part(text: str) -> tuple[int, int] | None:
    """Return (I, N) of ``I/N``, None of "". Raises a UserError unless 0 <= I < N."""
    if not text:
        return None
    index, _, count = text.partition("/")
    if index.isdecimal() and count.isdecimal() and int(index) < int(count):
        return int(index), int(count)
    raise UserError(f"--part {text}: write I/N with I from 0 to N - 1, such as 0/8")


@app.command(cls=Command)
def train(
    config: ConfigFile,
    trust_cache: TrustCache = False,
    regenerate_cache: Regenerate = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest complete checkpoint of the run.")
    ] = False,
    resume_from: Annotated[Path | None, typer.Option(help="Resume from this checkpoint.")] = None,
    reset_dataloader: Annotated[bool, typer.Option("--reset-dataloader", help="On resume: restart the data.")] = False,
    reset_optimizer: Annotated[
        bool, typer.Option("--reset-optimizer", help="On resume: discard the optimizer state.")
    ] = False,
    reset_optimizer_params: Annotated[
        bool, typer.Option("--reset-optimizer-params", help="On resume: take lr etc. from the config.")
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Start again; set existing checkpoints aside.")] = False,
    set_: Overrides = None,
) -> None:
    """Encode what is missing, then train. `train.py` does the same under torchrun and other launchers."""
    loaded = load_checked(config, set_)
    launch = init_process()
    from sd3_light.cache.verb import CacheOptions
    from sd3_light.journeys import cache_then_train

    resets = (reset_dataloader, reset_optimizer, reset_optimizer_params)
    request = parse_resume(resume or resume_from is not None, resume_from, resets, restart)
    again = command_line("train", config, *_set_options(set_), *(["--trust-cache"] if trust_cache else []), "--resume")
    with continued_by(again):
        cache_then_train(loaded, launch, CacheOptions(trust_cache, regenerate_cache), request)
    suggest_after_training(loaded.train.output_dir, again)


def _set_options(overrides: Sequence[str] | None) -> list[str]:
    return [part for override in overrides or () for part in ("--set", override)]


def suggest_after_training(run: Path, again: str) -> None:
    """Print the commands that follow a run that has ended; ``again`` continues one that stopped before any export."""
    has_export = any((run / "exports").glob("step-*"))
    if not has_export:
        info(f"there is no export yet; continue with: {again}")
    sample: list[tuple[str | Path, ...]] = [("sample", run, "a prompt")] if has_export else []
    suggest(*sample, ("report", run, "--out", run / "report.html"))


def parse_resume(
    requested: bool, checkpoint: Path | None, resets: tuple[bool, bool, bool], restart: bool
) -> "Resume | None":
    """Return the request of --resume, the --reset flags and --restart, or None for a new run."""
    from sd3_light.train.verb import Resume

    if any(resets) and not requested:
        raise UserError("--reset-* flags need --resume or --resume-from")
    if restart and requested:
        raise UserError("--restart starts from the beginning, --resume from a checkpoint; give one of them")
    return Resume(checkpoint, *resets, restart) if requested or restart else None
