"""Verbs that write files beside the images of a dataset: caption, control, mask."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sd3_light.cli.app import Command, ImageBatch, app
from sd3_light.cli.process import command_line, continued_by, echo, given_options, init_process
from sd3_light.formats import listed, plural

if TYPE_CHECKING:
    from sd3_light.cache.images_beside import Written

Data = Annotated[Path, typer.Argument(metavar="DATA", help="Folder of images, or a dataset TOML.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]
ExamplesPage = Annotated[Path | None, typer.Option(help="Write a page with examples to this HTML file.")]
_MODEL = "FOLDER_OR_ID"


@app.command(cls=Command)
def caption(
    context: typer.Context,
    data: Data,
    model: Annotated[
        str, typer.Option(metavar=_MODEL, help="An image-text-to-text model: a folder, or OWNER/NAME on the hub.")
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="What to ask; each prompt adds captions.")] = None,
    captions: Annotated[int, typer.Option(min=1, max=32, help="Captions per prompt; several are drawn at random.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest caption, in tokens of the model.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.01, help="Variety of several captions.")] = 0.7,
    batch: ImageBatch = 8,
    dtype: Annotated[str, typer.Option(help="`auto` (bfloat16 on GPUs), `float32`, `bfloat16` or `float16`.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of captions that are drawn.")] = 0,
    out: ExamplesPage = None,
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
    _report_page(out)


@app.command(cls=Command)
def control(
    context: typer.Context,
    data: Data,
    kind: Annotated[str, typer.Argument(metavar="KIND", help="`edges`, or `depth` with a model.")],
    model: Annotated[
        str | None, typer.Option(metavar=_MODEL, help="A depth-estimation model: a folder, or OWNER/NAME on the hub.")
    ] = None,
    threshold: Annotated[float, typer.Option(min=0.001, max=1, help="Contrast from which an edge is drawn.")] = 0.2,
    resolution: Annotated[
        int, typer.Option(min=16, help="Larger images are scaled down to the area of a square of this side.")
    ] = 1024,
    batch: ImageBatch = 8,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where control images are written. [DATA-KIND]")
    ] = None,
    overwrite: Overwrite = False,
    page: ExamplesPage = None,
) -> None:
    """Draw the edges or the depth of the images of a dataset: references that a model learns to follow."""
    init_process()
    from sd3_light.cache import control as stage

    options = stage.ControlOptions(kind, model, threshold, resolution, batch)
    with continued_by(command_line("control", data, kind, *given_options(context, "overwrite"))):
        for controlled in stage.run(data, options, out, overwrite, page):
            _report_written(controlled.written, "control image")
            if not controlled.is_named:
                _suggest_key(f'references = ["{controlled.written.folder}"]')
    _report_page(page)


@app.command(cls=Command)
def mask(
    context: typer.Context,
    data: Data,
    model: Annotated[
        str, typer.Option(metavar=_MODEL, help="A segmentation model: a folder, or OWNER/NAME on the hub.")
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="What to train on: a text, or a class of the model; several are added. [all but background]"),
    ] = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Probability from which a text is found.")] = 0.5,
    invert: Annotated[bool, typer.Option("--invert", help="Train on everything else.")] = False,
    batch: ImageBatch = 8,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where masks are written. [mask_path, or DATA-masks]")
    ] = None,
    overwrite: Overwrite = False,
    page: ExamplesPage = None,
) -> None:
    """Write masks for the images of a dataset with a segmentation model of transformers: white is trained on."""
    init_process()
    from sd3_light.cache import mask as stage

    options = stage.MaskOptions(tuple(prompt or ()), threshold, invert, batch)
    with continued_by(command_line("mask", data, *given_options(context, "overwrite"))):
        for masked in stage.run(data, model, options, out, overwrite, page):
            covers = "" if masked.covers is None else f"; new ones cover {masked.covers:.0%} of their images"
            _report_written(masked.written, "mask", covers)
            for names, found in ((masked.empty, "nothing found in"), (masked.full, "everything covered in")):
                if names:
                    echo(f"{found} {plural(len(names), 'image')}: {listed(names)}")
            if not masked.is_named:
                _suggest_key(f'mask_path = "{masked.written.folder}"')
    _report_page(page)


def _report_written(written: "Written", kind: str, more: str = "") -> None:
    """Print how many files of a kind were written, and what is missing."""
    from sd3_light.cache.images_beside import REJECTS

    echo(f"{written.folder}: wrote {plural(written.written, kind)}, kept {written.kept:,}{more}")
    if written.rejects:
        echo(f"{plural(len(written.rejects), 'image')} without a {kind}: see {written.folder / REJECTS}")


def _suggest_key(key: str) -> None:
    echo(f"write {key} in the [[directory]] of the images to train with them")


def _report_page(page: Path | None) -> None:
    if page is not None:
        echo(f"wrote {page}")
