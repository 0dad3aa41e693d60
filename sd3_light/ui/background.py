"""Work in threads of the server that pages follow: numbered, and with its error as text."""

import itertools
import threading
import traceback
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from sd3_light.config.faults import UserError


class _Work(Protocol):
    @property
    def id(self) -> int: ...

    @property
    def is_done(self) -> bool: ...


Work = TypeVar("Work", bound=_Work)


class Numbered(Generic[Work]):
    """Pieces of work by number: ``most`` in progress, and the last ``most`` of those that are done."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._work: dict[int, Work] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()

    def get(self, number: int) -> Work:
        """Return the work with a number. Raises UserError where there is none."""
        work = self._work.get(number)
        if work is None:
            raise UserError(f"there is no {self._name} {number}; make it again")
        return work

    def add(self, make: Callable[[int], Work]) -> Work:
        """Add what ``make`` returns for a new number. Raises UserError where too much is in progress."""
        with self._lock:
            done = [number for number, each in self._work.items() if each.is_done]
            if len(self._work) - len(done) >= self._most:
                raise UserError(f"{self._most} {self._name}s wait already; try again when one of them is done")
            for old in done[: -self._most]:
                del self._work[old]
            work = make(next(self._ids))
            self._work[work.id] = work
            return work


def error_of(work: Callable[[], object]) -> str:
    """Do the work of a thread. Return why it failed, "" if it did not: a page would wait for ever for a dead thread."""
    try:
        work()
    except (UserError, OSError) as error:
        return str(error) or type(error).__name__
    except BaseException as error:  # the top level of a thread; a panic of a library in Rust is not an Exception
        traceback.print_exc()
        return f"{type(error).__name__}; this is a bug in sd3-light, see the server's terminal"
    return ""
