"""Blocks compiled by torch.compile: where their code is kept, and how long it took."""

import logging
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sd3_light.core.model import denoiser_blocks
from sd3_light.runlog import info
from sd3_light.system import COMPILED_CODE

_MOST_VERSIONS = 64
"""Of one class of blocks: for each kind of them and each shape, with and without gradients. After 8, its default, torch
runs further ones as they are."""
_NAMED: set[str] = set()
"""Lines about failures that were printed."""


def compile_blocks(denoiser: nn.Module, per_shape: bool = False, lenient: bool = False) -> None:
    """Compile each block in place; blocks of the same kind share compiled code.

    They are compiled for every shape, or without ``per_shape`` for the first one, then for any. With ``lenient`` a
    block that cannot be compiled runs as it is. Hooks of a block stay outside of it: they may change from pass to pass.
    """
    from torch._dynamo import config  # slow to import, and most runs compile nothing

    config.recompile_limit = max(config.recompile_limit, _MOST_VERSIONS)
    config.suppress_errors = lenient
    warnings.filterwarnings("ignore", "Torchinductor does not support code generation for complex operators")
    if lenient:
        logging.getLogger("torch._dynamo.convert_frame").addFilter(_name_failure)
    for block in denoiser_blocks(denoiser):
        block.forward = torch.compile(block.forward, dynamic=False if per_shape else None)


def _name_failure(record: logging.LogRecord) -> bool:
    """Print one line in place of the traceback of code that cannot be compiled, once for each reason."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None or record.levelno < logging.WARNING:
        return True
    reason = next(iter(str(error).splitlines()), "")
    line = f"blocks: some cannot be compiled and run as they are ({type(error).__name__}: {reason:.200})"
    if line not in _NAMED:
        _NAMED.add(line)
        info(line)
    return False


def why_not_compiled(device: torch.device) -> str | None:
    """Return why torch.compile does not work on this device, or None; it needs Triton and a C compiler, too."""
    try:
        torch.compile(torch.sin)(torch.ones(16, device=device))
    except RuntimeError as error:  # also all errors of the compiler
        return f"torch.compile does not work here ({type(error).__name__})"
    return None


class CompileTime:
    """The seconds that this process spends on compiling from now on; `report` prints them after the steps that did.

    ``then`` is called after that.
    """

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        from torch._dynamo.callback import callback_handler

        self._then = then
        self.seconds = 0.0
        self._reported = 0.0
        self._began = 0.0
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def report(self) -> None:
        """Print the time of what was compiled since the last call, if it took a second or more."""
        seconds = self.seconds - self._reported
        if seconds >= 1:
            self._reported = self.seconds
            folder = os.environ.get(COMPILED_CODE, "torch's cache")
            info(f"blocks: compiled in {seconds:.0f} s; later runs find the code in {folder}")
            self._then()

    def _begin(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._began
