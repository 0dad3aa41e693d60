"""The verbs that only look: inspect, report."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sd3_light.cli.app import app
from sd3_light.cli.process import echo, prepare
from sd3_light.config.faults import UserError


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
    prepare()
    from sd3_light.stages.inspect.page import write_page

    for note in write_page(Path(cache), out, samples, seed, vae).notes:
        echo(f"note: {note}")
    echo(f"look at {out}")


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
        echo(f"note: {note}")
    echo(f"look at {out}")
