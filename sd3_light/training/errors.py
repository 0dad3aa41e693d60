"""Faults of people's own code, which tasks call: one line that says whose they are."""

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sd3_light.config.faults import UserError
from sd3_light.data.loader import worker_exit_error
from sd3_light.engines.processes import lost_peer

_USUAL = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)


@contextmanager
def as_user_error(what: str, remedy: str = "mend it") -> Iterator[None]:
    """What usually goes wrong inside the block is a fault of the user: ``what`` raised it. Its trace is the cause.

    Out of memory, a dead worker and a lost process get the messages of `explain_runtime_errors`.
    """
    try:
        yield
    except _USUAL as error:
        if fault := _nobodys(error, f"{what}: "):
            raise fault from error
        said = str(error).strip().partition("\n")[0]
        raise UserError(f"{what} raised {type(error).__name__}{': ' if said else ''}{said}; {remedy}") from error


@contextmanager
def explain_runtime_errors() -> Iterator[None]:
    """Inside the block too little GPU memory, a dead worker and a lost process are one line each."""
    try:
        yield
    except RuntimeError as error:
        if fault := _nobodys(error):
            raise fault from error
        raise


def _nobodys(error: BaseException, where: str = "") -> UserError | None:
    """The fault where it is not that of the code that happened to run; None for other errors."""
    if isinstance(error, torch.OutOfMemoryError):
        said = ". ".join(str(error).strip().partition("\n")[0].split(". ")[:2]).rstrip(". ")
        return UserError(
            f"{where}{said or 'out of GPU memory'}; lower batch_size (and raise gradient_accumulation_steps) or the "
            "size of the samples, or train an adapter (base_bits=4 needs least)"
        )
    return worker_exit_error(error) or lost_peer(error) if isinstance(error, RuntimeError) else None
