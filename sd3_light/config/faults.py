"""What is wrong with what the user gave: one line each, naming the place and the remedy."""

from collections.abc import Sequence
from dataclasses import dataclass


class UserError(Exception):
    """A fault in what the user gave. Its text is one line that names the thing and the remedy; exit code 2."""


class PeerLost(UserError):
    """Another process of the run is gone. Nothing is wrong with what the user gave: start again; exit code 75."""


class Stopped(Exception):
    """A run was asked to stop, has saved all it needs to go on, and did not fail; exit code 75."""


@dataclass(frozen=True)
class Fault:
    """One fault of a config: where it is, what was given, what is allowed and what to do."""

    file: str
    key: str
    problem: str
    given: str | None = None
    allowed: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        parts = [f"{self.file}: {self.key}: {self.problem}"]
        if self.given is not None:
            parts.append(f"given {self.given}")
        if self.allowed is not None:
            parts.append(f"allowed: {self.allowed}")
        if self.hint is not None:
            parts.append(self.hint)
        return "; ".join(parts)


class ConfigFaults(UserError):
    """All faults of a config in one report (law 7).

    ``partial`` is the config as far as it is sound, with stand-ins for what is not: enough to look for more faults.
    """

    def __init__(self, faults: Sequence[Fault], partial: object = None):
        self.faults = tuple(faults)
        self.partial = partial
        count = len(self.faults)
        head = f"{count} fault{'s' if count != 1 else ''} in the config"
        super().__init__("\n".join([head, *(f"  {fault}" for fault in self.faults)]))
