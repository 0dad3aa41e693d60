"""The verb `control`: control images for those of a dataset."""

from pathlib import Path
from typing import Annotated

import typer

from sd3_light.cli.app import Command, app
from sd3_light.cli.process import command_line, continued_by, echo, given_options, init_process
from sd3_light.formats import plural


@app.command(cls=Command)
def control(
    context: typer.Context,
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Folder of images, or a dataset TOML.")],
    kind: Annotated[str, typer.Argument(metavar="KIND", help="`edges`, or `depth` with a model.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER_OR_ID", help="A depth-estimation model: a folder, or OWNER/NAME on the hub."),
    ] = None,
    threshold: Annotated[float, typer.Option(min=0.001, max=1, help="Contrast from which an edge is drawn.")] = 0.2,
    resolution: Annotated[
        int, typer.Option(min=16, help="Larger images are scaled down to the area of a square of this side.")
    ] = 1024,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 8,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where control images are written. [DATA-KIND]")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace control images that exist.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write a page with examples to this HTML file.")] = None,
) -> None:
    """Draw the edges or the depth of the images of a dataset: references that a model learns to follow."""
    init_process()
    from sd3_light.cache import control as stage
    from sd3_light.cache.images_beside import REJECTS

    options = stage.ControlOptions(kind, model, threshold, resolution, batch)
    with continued_by(command_line("control", data, kind, *given_options(context, "overwrite"))):
        for controlled in stage.run(data, options, out, overwrite, page):
            written = controlled.written
            echo(f"{written.folder}: wrote {plural(written.written, 'control image')}, kept {written.kept:,}")
            if written.rejects:
                echo(f"{plural(len(written.rejects), 'image')} without one: see {written.folder / REJECTS}")
            if not controlled.is_named:
                echo(f'write references = ["{written.folder}"] in the [[directory]] of the images to train with them')
    if page is not None:
        echo(f"wrote {page}")
