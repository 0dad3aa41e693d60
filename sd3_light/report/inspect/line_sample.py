"""Lists of a cache, one JSON object per line: all lines are counted, some of each group are shown, chosen at random."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from numpy.random import Generator

from sd3_light.inputs import lines_of, open_regular, parse_json

Card = TypeVar("Card")
Line = dict[str, Any]


@dataclass(frozen=True)
class LineGroup(Generic[Card]):
    """The lines of one group: how many there are, and those that are shown."""

    name: str
    total: int
    shown: list[Card]


@dataclass(frozen=True)
class LineSample(Generic[Card]):
    """All lines by group, the largest group first, and the number of damaged lines."""

    groups: list[LineGroup[Card]]
    damaged: int = 0

    @property
    def shown(self) -> list[Card]:
        """The lines of all groups that are shown."""
        return [card for group in self.groups for card in group.shown]


def sample_lines(
    path: Path, group_name: str, most: int, rng: Generator, card: Callable[[Line], Card]
) -> LineSample[Card]:
    """Count the lines of a list, if it exists, and show at most ``most``: at random, spread evenly over the groups.

    Lines have a ``key``, by which those shown are sorted, and the name of their group.
    """
    counts: Counter[str] = Counter()
    reservoirs: dict[str, list[Line]] = {}
    damaged = 0
    for line in _lines(path) if path.is_file() else ():
        item = _parse_line(line.decode(errors="backslashreplace"), group_name)
        if item is None:
            damaged += 1
            continue
        group = item[group_name]
        counts[group] += 1
        slot = int(rng.integers(counts[group]))
        _add_to_reservoir(item, reservoirs.setdefault(group, []), most, slot)
    shares = _even_shares({group: len(items) for group, items in reservoirs.items()}, most)
    groups = []
    for group, total in counts.most_common():
        chosen = sorted(reservoirs[group][: shares[group]], key=lambda item: str(item["key"]))
        groups.append(LineGroup(group, total, [card(item) for item in chosen]))
    return LineSample(groups, damaged)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines, and an empty one in the place of the rest if that is too long to be read."""
    with open_regular(path) as file:
        try:
            yield from lines_of(file)
        except ValueError:
            yield b""


def _parse_line(line: str, group_name: str) -> Line | None:
    try:
        item = parse_json(line)
    except ValueError:
        return None
    is_valid = isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("key", group_name))
    return item if is_valid else None


def _add_to_reservoir(item: Line, reservoir: list[Line], most: int, slot: int) -> None:
    """Reservoir sampling: ``slot`` is uniform over all items so far, so each stays with the same probability."""
    if len(reservoir) < most:
        reservoir.append(item)
        # a random slot, so that any prefix of the list is a random choice too
        reservoir[slot], reservoir[-1] = reservoir[-1], reservoir[slot]
    elif slot < most:
        reservoir[slot] = item


def _even_shares(sizes: Mapping[str, int], most: int) -> dict[str, int]:
    """Return how many of each group are chosen: equal shares, and what a small one leaves goes to the larger ones."""
    shares = {}
    left = most
    for index, name in enumerate(sorted(sizes, key=lambda name: sizes[name])):
        shares[name] = min(sizes[name], left // (len(sizes) - index))
        left -= shares[name]
    return shares
