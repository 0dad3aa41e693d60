"""The command line: one verb a stage. It parses, calls and exits: 2 for a fault in what was given, 1 for ours."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sd3_light import __version__
from sd3_light.config.faults import Stopped, UserError
from sd3_light.runlog import quiet_libraries, set_main_process

if TYPE_CHECKING:
    from sd3_light.config import LoadedConfig
    from sd3_light.engines import Launch
    from sd3_light.stages.train import Resume

RESUMABLE = 75
"""Exit code of a run that was asked to stop and can go on: EX_TEMPFAIL of sysexits.h, "try again"."""

app = typer.Typer(
    help="Pretrain and fine-tune SD3-style text-to-image models. `sd3-light demo` shows the whole way in minutes.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The train TOML; it names the dataset TOML.")]
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="A diffusers folder, such as RUN/exports/step-N.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the train TOML, such as model.size=tiny2."),
]
TrustCache = Annotated[
    bool, typer.Option("--trust_cache", help="Do not look at the sources; shards are still verified.")
]
Regenerate = Annotated[bool, typer.Option("--regenerate_cache", help="Encode everything anew.")]


@app.callback()
def _main(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and quit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
    _debug(debug)
    set_main_process(True)  # a RANK left over in the shell must not silence a plain command


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
    _prepare()
    from sd3_light.journeys import run_demo

    run_demo(out, steps, more_steps, pictures, prompts)


@app.command()
def init(config: ConfigFile, out: Annotated[Path, typer.Argument(help="New folder.")], set_: Overrides = None) -> None:
    """Write the folder where a pretraining run starts: frozen parts, and a random denoiser by size and seed."""
    _prepare()
    from sd3_light.journeys import checked_init

    _say(f"wrote {checked_init(_load(config, set_), out)}")


@app.command()
def check(
    config: ConfigFile,
    world: Annotated[int, typer.Option(help="Processes that will train.")] = 1,
    set_: Overrides = None,
) -> None:
    """Report every fault of a config at once, or what it will do: parameters, tokens, FLOPs, cache, memory, steps."""
    from sd3_light.stages import check as stage

    Console().print(stage.render(stage.run(_load(config, set_), world)))


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
    loaded, launched = _load(config, set_, caching=True), _prepare()
    from sd3_light.journeys import only_cache
    from sd3_light.stages import inspect as stage
    from sd3_light.stages.cache import Wishes

    folders = only_cache(loaded, launched, Wishes(trust_cache, regenerate_cache, verify, prune, dry_run))
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
    loaded, launched = _load(config, set_), _prepare()
    from sd3_light.journeys import cache_then_train
    from sd3_light.stages.cache import Wishes

    resets = (reset_dataloader, reset_optimizer, reset_optimizer_params)
    wish = _resume(resume or resume_from is not None, resume_from, resets)
    cache_then_train(loaded, launched, Wishes(trust_cache, regenerate_cache), wish)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder (its output_dir).")],
    out: Annotated[Path, typer.Argument(help="New folder.")],
    checkpoint: Annotated[Path | None, typer.Option(help="Another checkpoint than the newest.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="`raw`, `ema` or a track's name; default: `ema` where there is one.")
    ] = None,
    push_to_hub: Annotated[str | None, typer.Option(help="Upload to this Hugging Face repository, USER/NAME.")] = None,
    ema_length: Annotated[
        float | None,
        typer.Option(help="Rebuild an average of this length (a share of the training) from the power tracks."),
    ] = None,
) -> None:
    """A diffusers folder from a checkpoint, reloaded and compared before it is announced."""
    _prepare()
    from sd3_light.stages import export as stage

    _say(f"wrote and proved {stage.run(run, out, checkpoint, weights, ema_length, push_to_hub)}")


@app.command()
def sample(
    model: ModelFolder,
    prompt: Annotated[list[str] | None, typer.Argument(help="One or more prompts.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="A text file with a prompt a line, or a .csv with the columns prompt, seed, negative_prompt, width, "
            "height, steps, guidance (all but prompt may be left out)."
        ),
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(min=0, max=2**63 - 1, help="Seeds; each prompt is drawn with each.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for 00000.png, ... and grid.png; none of them may be there yet.")
    ] = Path("samples"),
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Sampler steps.")] = 28,
    guidance: Annotated[float, typer.Option(min=0, help="Guidance scale; 1 or less turns it off.")] = 4.0,
    width: Annotated[int, typer.Option(min=0, help="Pixels; 0: the model's own.")] = 0,
    height: Annotated[int, typer.Option(min=0, help="Pixels; 0: the model's own.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time; on a CPU, side by side on its cores.")] = 8,
    negative_prompt: Annotated[str, typer.Option(help="What to steer away from.")] = "",
    sampler: Annotated[str, typer.Option(help="`euler`, `heun` (two model calls a step) or `dpm++`.")] = "euler",
    dtype: Annotated[
        str, typer.Option(help="`float32`, or `bfloat16` for denoiser and text encoders on GPUs; the VAE is float32.")
    ] = "float32",
    lora: Annotated[
        list[str] | None, typer.Option(metavar="FILE[:STRENGTH]", help="A LoRA; several act together.")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid/--no-grid", help="All pictures on one sheet, too.")] = True,
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads for one picture. Other numbers than 1 change its last bits.")
    ] = 1,
) -> None:
    """Draw pictures; the same prompt and seed give the picture that stock diffusers gives. Under torchrun the
    processes share the work."""
    launched = _prepare()
    from sd3_light.sampling.lora import Lora
    from sd3_light.sampling.requests import Row, read_rows
    from sd3_light.stages import sample as stage

    rows = [*map(Row, prompt or []), *(read_rows(file) if file is not None else [])]
    loras = tuple(map(Lora.parse, lora or []))
    wishes = stage.Wishes(steps, guidance, width, height, batch, negative_prompt, sampler, dtype, loras, grid, threads)
    look = stage.run(model, rows, seed or [0], out, wishes, launched)
    if launched.is_main:
        _say(f"look at {look}")


@app.command()
def evaluate(
    model: ModelFolder,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts to draw and judge.")] = 96,
    seen: Annotated[bool, typer.Option("--seen", help="Combinations that training saw, not held-out ones.")] = False,
    language: Annotated[str, typer.Option(help="`en`, `zh` or `mixed`.")] = "mixed",
    steps: Annotated[int, typer.Option(min=1, help="Sampler steps.")] = 20,
    guidance: Annotated[float, typer.Option(help="Guidance scale.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and noise.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the numbers to this JSON file.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A train TOML: the validation loss of its eval_datasets, and no pictures.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """The validation loss of a config's evaluation sets (--config), or a judgement of a model of the demo world: does
    the picture show the objects, colours, counts and relations asked for?"""
    launched = _prepare()
    from sd3_light.stages import evaluate as stage

    if config is not None:
        from sd3_light.journeys import cache_then_validate

        table = cache_then_validate(_load(config, set_), model, launched, out)
        if launched.is_main:
            Console().print(table)
        return
    from sd3_light.journeys import score_table

    result = stage.run(model, prompts, not seen, language, steps, guidance, seed, out=out)
    of = "of combinations seen in training" if seen else "of held-out combinations"
    Console().print(score_table({str(model): result}, of))


@app.command()
def inspect(
    cache: Annotated[str, typer.Argument(metavar="CACHE", help="A cache folder.")],
    out: Annotated[Path | None, typer.Option(help="Write a page with pictures to this HTML file.")] = None,
    samples: Annotated[int, typer.Option(min=0, max=1000, help="Samples that the page shows.")] = 48,
    seed: Annotated[int, typer.Option(help="Which samples are drawn.")] = 0,
    vae: Annotated[
        Path | None, typer.Option(help="A diffusers folder with the cache's VAE, if it is not where it was.")
    ] = None,
) -> None:
    """What a data set became: counts, buckets, captions, rejects; with --out, samples beside their originals too."""
    from sd3_light.config.base import is_url
    from sd3_light.stages import inspect as stage

    if is_url(cache):
        raise UserError(f"{cache}: inspect reads a folder of this machine; copy the cache to one")
    if out is None:
        Console().print(stage.render(stage.run(Path(cache), seed)))
        return
    _prepare()
    from sd3_light.stages.inspect.page import write_page

    for note in write_page(Path(cache), out, samples, seed, vae).notes:
        _say(f"note: {note}")
    _say(f"look at {out}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    out: Annotated[Path | None, typer.Option(help="Write a page with curves and samples to this HTML file.")] = None,
) -> None:
    """A run on one screen: loss, speed, checkpoints, exports; with --out, a page with its curves and samples."""
    from sd3_light.stages import report as stage

    if out is None:
        Console().print(stage.render(stage.run(run)))
        return
    for note in stage.write_page(run, out):
        _say(f"note: {note}")
    _say(f"look at {out}")


def main() -> None:
    """The `sd3-light` command."""
    sys.exit(_guarded(app))


def launch(arguments: Sequence[str]) -> int:
    """What train.py does with its flags; returns the exit code."""
    return _guarded(lambda: _launch(_flags().parse_args(arguments)))


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train.py", description="Cache, then train. See `sd3-light train --help`.")
    parser.add_argument("--config", type=Path, required=True, help="train TOML (it names the dataset TOML)")
    parser.add_argument("--cache_only", action="store_true", help="build the cache and quit")
    parser.add_argument("--trust_cache", action="store_true", help="do not check sources against the cache")
    parser.add_argument("--regenerate_cache", action="store_true", help="encode everything anew")
    parser.add_argument("--resume_from_checkpoint", nargs="?", const="", metavar="DIR", help="no value: the newest")
    parser.add_argument("--reset_dataloader", action="store_true", help="on resume: start the data anew")
    parser.add_argument("--reset_optimizer", action="store_true", help="on resume: drop the optimizer's state")
    parser.add_argument("--reset_optimizer_params", action="store_true", help="on resume: lr etc. from the config")
    parser.add_argument("--deepspeed", action="store_true", help="the DeepSpeed engine")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="set by launchers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the train TOML")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _launch(flags: argparse.Namespace) -> None:
    _debug(flags.debug)
    if flags.deepspeed and not flags.cache_only:
        raise UserError("--deepspeed: this version trains with torch's own engine; launch with torchrun, without it")
    loaded, launched = _load(flags.config, flags.set, flags.cache_only), _prepare(flags.local_rank)
    from sd3_light.journeys import cache_then_train, only_cache
    from sd3_light.stages.cache import Wishes

    wishes = Wishes(flags.trust_cache, flags.regenerate_cache)
    if flags.cache_only:
        only_cache(loaded, launched, wishes)
        return
    place = Path(flags.resume_from_checkpoint) if flags.resume_from_checkpoint else None
    resets = (flags.reset_dataloader, flags.reset_optimizer, flags.reset_optimizer_params)
    cache_then_train(loaded, launched, wishes, _resume(flags.resume_from_checkpoint is not None, place, resets))


def _resume(wished: bool, checkpoint: Path | None, resets: tuple[bool, bool, bool]) -> "Resume | None":
    from sd3_light.stages.train import Resume

    if any(resets) and not wished:
        raise UserError("--reset_* flags go with --resume (train.py: --resume_from_checkpoint)")
    return Resume(checkpoint, *resets) if wished else None


def _prepare(local_rank: int | None = None) -> "Launch":
    """Who this process is; it speaks if it is the main one. Called before anything heavy is imported."""
    # torch's threads wait by spinning for long, which makes a CPU that others use too many times slower
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    if not _DEBUG:
        quiet_libraries()
    from sd3_light.engines import Launch

    launched = Launch.detect(local_rank)
    set_main_process(launched.is_main)
    return launched


def _guarded(work: Callable[[], object]) -> int:
    """Run; a known fault is one line (or one report) and exit code 2, anything else exit code 1."""
    try:
        work()
    except UserError as fault:
        return _fail(str(fault), 2)
    except Stopped as stop:
        _say_stopped(str(stop))
        return RESUMABLE
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except Exception as error:  # the last resort of the program: everything unknown is ours
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        return _fail(f"{type(error).__name__}: {error} (our fault, at {where}; --debug shows the whole way)", 1)
    return 0


def _say_stopped(text: str) -> None:
    from sd3_light.runlog import say

    say(f"stopped: {text}")


def _fail(text: str, code: int) -> int:
    if _DEBUG:
        traceback.print_exc()
    Console(stderr=True).print(f"error: {text}", style="red", highlight=False, markup=False, soft_wrap=True)
    return code


_DEBUG = bool(os.environ.get("SD3_LIGHT_DEBUG"))


def _debug(wish: bool) -> None:
    global _DEBUG
    _DEBUG = _DEBUG or wish


def _load(path: Path, overrides: Sequence[str] | None, caching: bool = False) -> "LoadedConfig":
    from sd3_light.stages import check

    return check.load(path, overrides or (), caching)


def _say(text: str) -> None:
    Console().print(text, highlight=False, markup=False, soft_wrap=True)
