"""The verb `mask`: masks for images by a segmentation model."""

from pathlib import Path
from typing import Annotated

import typer

from sd3_light.cli.app import Command, app
from sd3_light.cli.process import command_line, continued_by, echo, given_options, init_process
from sd3_light.formats import listed, plural


@app.command(cls=Command)
def mask(
    context: typer.Context,
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Folder of images, or a dataset TOML.")],
    model: Annotated[
        str, typer.Option(metavar="FOLDER_OR_ID", help="A segmentation model: a folder, or OWNER/NAME on the hub.")
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="What to train on: a text, or a class of the model; several are added. [all but background]"),
    ] = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Probability from which a text is found.")] = 0.5,
    invert: Annotated[bool, typer.Option("--invert", help="Train on everything else.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 8,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where masks are written. [mask_path, or DATA-masks]")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace masks that exist.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write a page with examples to this HTML file.")] = None,
) -> None:
    """Write masks for the images of a dataset with a segmentation model of transformers: white is trained on."""
    init_process()
    from sd3_light.cache import mask as stage
    from sd3_light.cache.images_beside import REJECTS

    options = stage.MaskOptions(tuple(prompt or ()), threshold, invert, batch)
    with continued_by(command_line("mask", data, *given_options(context, "overwrite"))):
        for masked in stage.run(data, model, options, out, overwrite, page):
            folder = masked.written.folder
            covers = "" if masked.covers is None else f"; new ones cover {masked.covers:.0%} of their images"
            echo(f"{folder}: wrote {plural(masked.written.written, 'mask')}, kept {masked.written.kept:,}{covers}")
            for names, found in ((masked.empty, "nothing found in"), (masked.full, "everything covered in")):
                if names:
                    echo(f"{found} {plural(len(names), 'image')}: {listed(names)}")
            if masked.written.rejects:
                count = plural(len(masked.written.rejects), "image")
                echo(f"{count} without a mask: see {folder / REJECTS}")
            if not masked.is_named:
                echo(f'write mask_path = "{folder}" in the [[directory]] of the images to train with them')
    if page is not None:
        echo(f"wrote {page}")
