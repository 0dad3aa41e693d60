"""The `sd3-light` command and the options that several verbs share."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from sd3_light import __version__
from sd3_light.cli.process import enable_tracebacks, quiet_imports
from sd3_light.runlog import set_main_process


class _PlainSwitches:
    """Shows the switches of a command without a type in its help."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Group(_PlainSwitches, TyperGroup):
    """The class of every group of verbs."""


class Command(_PlainSwitches, TyperCommand):
    """The class of every verb."""


app = typer.Typer(
    cls=Group,
    # --trust-cache is --trust-cache: the launchers' and other trainers' spelling stays valid
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
    help="Pretrain SD3, and fine-tune nine families of image and video models. `sd3-light demo` runs the whole "
    "workflow in minutes.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The train TOML; it names the dataset TOML.")]
ModelFolder = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A diffusers folder, or a run folder: its newest export.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the train TOML, such as model.size=tiny2."),
]
TrustCache = Annotated[
    bool, typer.Option("--trust-cache", help="Do not compare the cache with its sources; shards are still verified.")
]
Regenerate = Annotated[bool, typer.Option("--regenerate-cache", help="Encode everything again.")]
ImageBatch = Annotated[int, typer.Option(min=1, help="Images per batch.")]
WithVae = Annotated[bool, typer.Option("--vae/--no-vae", help="Single file: include the VAE.")]
WithEncoders = Annotated[
    bool, typer.Option("--text-encoders/--no-text-encoders", help="Single file: include the text encoders.")
]
PadBlocks = Annotated[
    bool,
    typer.Option(
        "--pad-blocks/--no-pad-blocks",
        help="Single file: add identity blocks if there are fewer blocks than heads, as ComfyUI requires.",
    ),
]


@app.callback()
def _main(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of errors.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit
    if debug:
        enable_tracebacks()
    quiet_imports()
    set_main_process(True)  # a stale RANK in the shell must not silence a plain command
