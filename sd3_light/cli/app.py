"""The `sd3-light` command itself, and what several verbs take."""

from pathlib import Path
from typing import Annotated

import typer

from sd3_light import __version__
from sd3_light.cli.process import enable_tracebacks
from sd3_light.runlog import set_main_process

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
WithVae = Annotated[bool, typer.Option("--vae/--no-vae", help="Single file: with the VAE.")]
WithEncoders = Annotated[
    bool, typer.Option("--text-encoders/--no-text-encoders", help="Single file: with the text encoders.")
]
PadBlocks = Annotated[
    bool,
    typer.Option(
        "--pad-blocks/--no-pad-blocks",
        help="Single file: add identity blocks where there are fewer blocks than heads; ComfyUI loads no other.",
    ),
]


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
    if debug:
        enable_tracebacks()
    set_main_process(True)  # a RANK left over in the shell must not silence a plain command
