"""Errors caused by user input: one line each, naming the location and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass


class UserError(Exception):
    """An error in what the user provided. Its text is one line that says what is wrong and what to do. Exit code 2."""


class PeerLost(UserError):
    """Another process of the run is gone. The input is valid; starting again is enough. Exit code 75."""


RESUMABLE = 75
"""Exit code of a run that stopped on request and can be resumed: EX_TEMPFAIL of sysexits.h, "try again"."""


class Stopped(Exception):
    """A run stopped on request and saved everything needed to resume. The exit code is `RESUMABLE`."""


@dataclass(frozen=True)
class Fault:
    """One fault of a config: its location, the value, what is allowed and what to do."""

    file: str
    key: str
    problem: str
    value: str | None = None
    allowed: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        parts = [f"{self.file}: {self.key}: {self.problem}"]
        if self.value is not None:
            parts.append(f"got {self.value}")
        if self.allowed is not None:
            parts.append(f"allowed: {self.allowed}")
        if self.hint is not None:
            parts.append(self.hint)
        return "; ".join(parts)


MOST_SHOWN = 100
"""Faults that a report lists; it only counts the rest."""


class ConfigFaults(UserError):
    """All faults of a config in one report (law 7); ``partial`` is the config with placeholders for faulty keys."""

    def __init__(self, faults: Sequence[Fault], partial: object = None):
        self.faults = tuple(faults)
        self.partial = partial
        count = len(self.faults)
        head = f"{count} problem{'s' if count != 1 else ''} in the config"
        lines = [f"  {fault}" for fault in self.faults[:MOST_SHOWN]]
        if count > MOST_SHOWN:
            lines.append(f"  ... and {count - MOST_SHOWN:,} more")
        super().__init__("\n".join([head, *lines]))
