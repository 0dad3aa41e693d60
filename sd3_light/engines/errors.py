"""Errors as one line for the user: those of the user's own code, and those of the machine."""

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sd3_light.config.faults import UserError
from sd3_light.engines.processes import lost_peer

COMMON_ERRORS = (
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
"""The errors that code usually raises when it, or its data, is wrong."""

TASK_OUT_OF_MEMORY = (
    "lower batch_size (and raise gradient_accumulation_steps) or the size of the samples, or train an adapter "
    "(base_bits=4 needs least)"
)


@contextmanager
def as_user_error(source: str, remedy: str = "fix it") -> Iterator[None]:
    """Turn common errors inside the block into a `UserError` that names their ``source``, the user's own code.

    Out of memory and a lost process get the messages of `explain_runtime_errors`.
    """
    try:
        yield
    except COMMON_ERRORS as error:
        if explained := _explained(error, TASK_OUT_OF_MEMORY, f"{source}: "):
            raise explained from error
        message = ": ".join(filter(None, [type(error).__name__, str(error).strip().partition("\n")[0]]))
        raise UserError(f"{source} raised {message}; {remedy}") from error


@contextmanager
def explain_runtime_errors(out_of_memory: str = TASK_OUT_OF_MEMORY) -> Iterator[None]:
    """Turn a full GPU and a lost process inside the block into a `UserError` of one line each.

    ``out_of_memory`` says how to use less GPU memory.
    """
    try:
        yield
    except RuntimeError as error:
        if explained := _explained(error, out_of_memory):
            raise explained from error
        raise


def _explained(error: Exception, out_of_memory: str, source: str = "") -> UserError | None:
    """Return the `UserError` for a full GPU or a lost process; None for other errors."""
    if isinstance(error, torch.OutOfMemoryError):
        sentences = str(error).strip().partition("\n")[0].split(". ")[:2]
        message = ". ".join(sentences).rstrip(". ") or "the GPU is out of memory"
        return UserError(f"{source}{message}; {out_of_memory}")
    return lost_peer(error) if isinstance(error, RuntimeError) else None
