"""The sides of a script's dataset: the samples to train on, and those that are held out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_NAMES = ("train", "validation", "unused")


@dataclass(frozen=True)
class Sides:
    """The side of every sample of a dataset, by index: "train", "validation" or "unused" (similar to both)."""

    names: tuple[str, ...]

    def indices(self, side: str) -> list[int]:
        """Return the indices of a side."""
        return [index for index, name in enumerate(self.names) if name == side]


def parse_sides(names: Sequence[Any], count: int) -> Sides:
    """Return the sides of ``count`` samples as they were stored. Raises ValueError."""
    if len(names) != count or not set(names) <= set(_NAMES):
        raise ValueError("the sides of its samples are not valid")
    return Sides(tuple(names))


def sides_of(dataset: Any) -> Sides | None:
    """Return the sides of a dataset that is divided; None of others."""
    sides = getattr(dataset, "sides", None)
    if not isinstance(sides, Sides):
        return None
    assert len(sides.names) == len(dataset)
    return sides
