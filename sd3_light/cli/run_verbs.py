"""The verbs of a run: demo, init, check, cache, train."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sd3_light.cli.app import ConfigFile, Overrides, Regenerate, TrustCache, app
from sd3_light.cli.process import echo, load, prepare
from sd3_light.config.faults import UserError

if TYPE_CHECKING:
    from sd3_light.stages.train import Resume


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder to work in; it is made anew.")] = Path("demo_run"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps from scratch (default: two to three minutes).")
    ] = None,
    more_steps: Annotated[int | None, typer.Option(min=1, help="Training steps on from the shipped base.")] = None,
    pictures: Annotated[int, typer.Option(min=1, help="Pictures to draw and train on.")] = 3000,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts each score asks.")] = 96,
) -> None:
    """Draw a captioned world, cache, pretrain, export, sample and score it: the whole journey on two CPU cores."""
    prepare()
    from sd3_light.journeys import run_demo

    run_demo(out, steps, more_steps, pictures, prompts)


@app.command()
def init(config: ConfigFile, out: Annotated[Path, typer.Argument(help="New folder.")], set_: Overrides = None) -> None:
    """Write the folder where a pretraining run starts: frozen parts, and a random denoiser by size and seed."""
    prepare()
    from sd3_light.journeys import checked_init

    echo(f"wrote {checked_init(load(config, set_), out)}")


@app.command()
def check(
    config: ConfigFile,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", "--world", min=1, help="GPUs that will train (default: one, or one a pipeline stage)."
        ),
    ] = None,
    deepspeed: Annotated[
        bool, typer.Option("--deepspeed", help="By the DeepSpeed engine; pipeline stages need it anyway.")
    ] = False,
    set_: Overrides = None,
) -> None:
    """Report every fault of a config at once, or what it will do: parameters, tokens, FLOPs, cache, memory, steps."""
    from sd3_light.stages import check as stage

    Console().print(stage.render(stage.run(load(config, set_), processes, deepspeed)))


@app.command()
def cache(
    config: ConfigFile,
    trust_cache: TrustCache = False,
    regenerate_cache: Regenerate = False,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every shard; damaged ones are encoded again.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Delete files that nothing uses any more.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry_run", help="Say what is fresh, stale, missing; encode nothing.")
    ] = False,
    set_: Overrides = None,
) -> None:
    """Say what is fresh, stale, missing and orphaned, then encode what has to be; what is fresh stays."""
    loaded, launched = load(config, set_, caching=True), prepare()
    from sd3_light.journeys import build_caches
    from sd3_light.stages import inspect as stage
    from sd3_light.stages.cache import CacheOptions

    folders = build_caches(loaded, launched, CacheOptions(trust_cache, regenerate_cache, verify, prune, dry_run))
    for folder in () if dry_run else folders:
        Console().print(stage.render(stage.run(folder)))


@app.command()
def train(
    config: ConfigFile,
    trust_cache: TrustCache = False,
    regenerate_cache: Regenerate = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint of the run.")
    ] = False,
    resume_from: Annotated[Path | None, typer.Option(help="Go on from this checkpoint.")] = None,
    reset_dataloader: Annotated[
        bool, typer.Option("--reset_dataloader", help="On resume: start the data anew.")
    ] = False,
    reset_optimizer: Annotated[
        bool, typer.Option("--reset_optimizer", help="On resume: drop the optimizer's state.")
    ] = False,
    reset_optimizer_params: Annotated[
        bool, typer.Option("--reset_optimizer_params", help="On resume: lr etc. from the config.")
    ] = False,
    set_: Overrides = None,
) -> None:
    """Encode what is missing, then train. `train.py` does the same under torchrun and takes all its flags."""
    loaded, launched = load(config, set_), prepare()
    from sd3_light.journeys import cache_then_train
    from sd3_light.stages.cache import CacheOptions

    resets = (reset_dataloader, reset_optimizer, reset_optimizer_params)
    wish = asked_resume(resume or resume_from is not None, resume_from, resets)
    cache_then_train(loaded, launched, CacheOptions(trust_cache, regenerate_cache), wish)


def asked_resume(wished: bool, checkpoint: Path | None, resets: tuple[bool, bool, bool]) -> "Resume | None":
    """What --resume and the --reset flags ask for; None for a run that begins."""
    from sd3_light.stages.train import Resume

    if any(resets) and not wished:
        raise UserError("--reset_* flags go with --resume (train.py: --resume_from_checkpoint)")
    return Resume(checkpoint, *resets) if wished else None
