"""Read-only verbs: inspect, report."""

from pathlib import Path
from typing import Annotated

import typer

from sd3_light.cli.app import Command, app
from sd3_light.cli.process import echo, init_process, suggest
from sd3_light.runlog import print_table


@app.command(cls=Command)
def inspect(
    cache: Annotated[str, typer.Argument(metavar="CACHE", help="A cache folder or URL.")],
    out: Annotated[Path | None, typer.Option(help="Write a page with images to this HTML file.")] = None,
    samples: Annotated[int, typer.Option(min=0, max=1000, help="Number of samples on the page.")] = 48,
    seed: Annotated[int, typer.Option(help="Seed of the sample selection.")] = 0,
    vae: Annotated[Path | None, typer.Option(help="Diffusers folder with the cache's VAE, if it has moved.")] = None,
) -> None:
    """Show the content of a cache: counts, buckets, captions, rejects. --out adds samples next to their originals."""
    from sd3_light.report.inspect import verb as stage
    from sd3_light.report.inspect.fetched import opened

    if out is None:
        with opened(cache, 0, seed) as (folder, counted):
            print_table(stage.render(stage.run(folder, seed, counted), cache))
        suggest(("inspect", cache, "--out", "cache.html"))
        return
    init_process()
    from sd3_light.report.inspect.cache_page import write_cache_page

    with opened(cache, samples, seed) as (folder, counted):
        for note in write_cache_page(folder, out, samples, seed, vae, counted).notes:
            echo(f"note: {note}")
    echo(f"wrote {out}")
    if Path(cache).is_dir():
        suggest(("ui", Path(cache).parent))


@app.command(cls=Command)
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    out: Annotated[Path | None, typer.Option(help="Write a page with curves and samples to this HTML file.")] = None,
) -> None:
    """Summarize a run: loss, speed, checkpoints, exports. --out writes a page with its curves and samples."""
    from sd3_light.report import verb as stage

    if out is None:
        print_table(stage.render(stage.run(run)))
        suggest(("report", run, "--out", "report.html"))
        return
    for note in stage.write_run_page(run, out):
        echo(f"note: {note}")
    echo(f"wrote {out}")
    suggest(("ui", run))
