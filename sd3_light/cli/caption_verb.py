"""The verb caption."""

from pathlib import Path
from typing import Annotated

import typer

from sd3_light.cli.app import Command, app
from sd3_light.cli.process import command_line, continued_by, echo, given_options, init_process


@app.command(cls=Command)
def caption(
    context: typer.Context,
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Folder of images, or a dataset TOML.")],
    model: Annotated[
        str,
        typer.Option(metavar="FOLDER_OR_ID", help="An image-text-to-text model: a folder, or OWNER/NAME on the hub."),
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="What to ask; each prompt adds captions.")] = None,
    captions: Annotated[int, typer.Option(min=1, max=32, help="Captions per prompt; several are drawn at random.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest caption, in tokens of the model.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.01, help="Variety of several captions.")] = 0.7,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 8,
    dtype: Annotated[str, typer.Option(help="`auto` (bfloat16 on GPUs), `float32`, `bfloat16` or `float16`.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of captions that are drawn.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write a page with examples to this HTML file.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the captions of earlier runs.")] = False,
) -> None:
    """Caption the images of a dataset with a model of transformers, into tables that the dataset reads."""
    init_process()
    from sd3_light.cache import caption as stage

    prompts = tuple(prompt) if prompt else (stage.PROMPT,)
    options = stage.CaptionOptions(prompts, captions, max_tokens, temperature, seed, dtype, batch)
    with continued_by(command_line("caption", data, *given_options(context, "restart"))):
        for table in stage.run(data, model, options, out, restart):
            echo(f"wrote {table}")
    if out is not None:
        echo(f"wrote {out}")
