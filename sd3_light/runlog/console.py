"""Plain words to the person who watches, from the main process only."""

import os
from contextlib import suppress

from rich.console import Console, RenderableType

# The one console: lines that are printed while a bar is shown go above it.
console = Console(stderr=True)

_main_process: bool | None = None


def set_main_process(main: bool) -> None:
    """Say whether this process is the one that speaks; until then a launcher's RANK decides."""
    global _main_process
    _main_process = main


def is_main_process() -> bool:
    """Whether this process is the one that speaks and keeps the log."""
    return os.environ.get("RANK", "0") == "0" if _main_process is None else _main_process


def info(text: str) -> None:
    """Print a plain line to stderr, unwrapped and unstyled; other ranks are silent.

    Where nothing can be printed (a file on a full disk, a terminal that is gone) work goes on without words.
    """
    if is_main_process():
        with suppress(OSError):
            console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def show(table: RenderableType) -> None:
    """Print a table to stderr; other ranks are silent."""
    if is_main_process():
        console.print(table)


def quiet_libraries() -> None:
    """Keep diffusers' and transformers' own bars and hints off the screen; call before they are imported.

    Their loading bars tear ours apart, and their hints are about parts that SD3 does not use.
    """
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
