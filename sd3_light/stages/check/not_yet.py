"""The one list of keys that the schema knows and training cannot obey yet: they are faults, never ignored."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sd3_light.config import Fault, LoadedConfig, TrainConfig


@dataclass(frozen=True)
class NotYet:
    """A feature that is not there: the key that asks for it, when it does so, and what to write in its place."""

    key: str
    asked: Callable[[TrainConfig], bool]
    instead: str


# One feature a line: delete the line when the feature lands.
NOT_YET: tuple[NotYet, ...] = ()


def not_yet_faults(loaded: LoadedConfig) -> Iterator[Fault]:
    """A fault for each key that asks for what is not there."""
    for line in NOT_YET:
        if line.asked(loaded.train):
            yield Fault(str(loaded.path), line.key, "this version does not have it yet", hint=line.instead)
