"""Messages to the user, printed by the main process only."""

import logging
import os
from contextlib import suppress

from rich.console import Console, RenderableType

# The only console: lines printed while a progress bar is shown appear above it.
console = Console(stderr=True)

CONSOLE = "console.txt"
"""The file in a run's folder with the messages of a run that another process started."""

_main_process: bool | None = None


def set_main_process(main: bool) -> None:
    """Set whether this is the main process; by default the launcher's RANK decides."""
    global _main_process
    _main_process = main


def is_main_process() -> bool:
    """Return whether this process prints messages and writes the log."""
    return os.environ.get("RANK", "0") == "0" if _main_process is None else _main_process


def info(text: str) -> None:
    """Print an unstyled line to stderr on the main process; a full disk or a closed terminal is ignored."""
    if is_main_process():
        with suppress(OSError):
            console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def show(table: RenderableType) -> None:
    """Print a table to stderr; other ranks print nothing."""
    if is_main_process():
        console.print(table, crop=False)


def quiet_libraries() -> None:
    """Disable the loading bars of diffusers and transformers, which break ours, and the warnings of DeepSpeed, which
    transformers imports to save a model."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # its import sets the level, and keeps filters


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
