"""Faults of people's own code, which tasks call: one line that says whose they are."""

from collections.abc import Iterator
from contextlib import contextmanager

from sd3_light.config.faults import UserError

_USUAL = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


@contextmanager
def blame(what: str, remedy: str = "mend it") -> Iterator[None]:
    """What usually goes wrong inside the block is a fault of the user: ``what`` raised it. Its trace is the cause."""
    try:
        yield
    except _USUAL as error:
        said = str(error).strip().partition("\n")[0]
        raise UserError(f"{what} raised {type(error).__name__}{': ' if said else ''}{said}; {remedy}") from error
