"""The verb ui."""

from pathlib import Path
from typing import Annotated

import typer

from sd3_light.cli.app import Command, app
from sd3_light.cli.process import echo, init_process
from sd3_light.config.faults import UserError


@app.command(cls=Command)
def ui(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders, or folders that contain runs and caches; default: here."),
    ] = None,
    model: Annotated[
        list[Path] | None, typer.Option(help="A model folder for the playground, beside the runs' exports.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the images of the playground.")] = Path("playground"),
    host: Annotated[str, typer.Option(help="Address to listen on; others than this machine's need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 7860,
    token: Annotated[
        str | None, typer.Option(envvar="SD3_LIGHT_UI_TOKEN", help="Require this token, also on this machine.")
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Only show: no page that starts or writes anything exists.")
    ] = False,
) -> None:
    """Serve a web page: watch, compare, start and stop runs, work on datasets, and draw images with their exports."""
    from sd3_light.ui.server import Site, serve

    for folder in (*(runs or ()), *(model or ())):
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; pass run folders, or folders that contain runs")
    site = Site.of_folders(runs or [Path()], model or [], out, init_process)
    site.is_read_only = read_only
    serve(site, host, port, token or None, lambda address: echo(f"open {address} (Ctrl-C stops the server)"))
