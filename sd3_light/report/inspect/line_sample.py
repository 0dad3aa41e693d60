"""Lists of a cache, one JSON object per line: all lines are counted, some of each group are chosen at random."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sd3_light.inputs import lines_of, open_regular, parse_json
from sd3_light.randomness import stream


@dataclass
class LineSample:
    """The number of lines per group, those chosen (the largest group first), and the number of damaged lines."""

    counts: Counter[str] = field(default_factory=Counter)
    chosen: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    damaged: int = 0


def sample_lines(path: Path, group_name: str, most: int, seed: int, purpose: str) -> LineSample:
    """Count the lines of a list, if it exists, and choose at most ``most``: at random, spread evenly over the groups.

    Lines have a ``key``, by which those chosen are sorted, and the name of their group.
    """
    sample = LineSample()
    if not path.is_file():
        return sample
    reservoirs: dict[str, list[dict[str, Any]]] = {}
    rng = stream(seed, purpose, 0, 0, 0)
    for line in _lines(path):
        item = _parse_line(line.decode(errors="backslashreplace"), group_name)
        if item is None:
            sample.damaged += 1
            continue
        group = item[group_name]
        sample.counts[group] += 1
        slot = int(rng.integers(sample.counts[group]))
        _add_to_reservoir(item, reservoirs.setdefault(group, []), most, slot)
    shares = _even_shares({group: len(items) for group, items in reservoirs.items()}, most)
    for group, _ in sample.counts.most_common():
        sample.chosen[group] = sorted(reservoirs[group][: shares[group]], key=lambda item: str(item["key"]))
    return sample


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines, and an empty one in the place of the rest if that is too long to be read."""
    with open_regular(path) as file:
        try:
            yield from lines_of(file)
        except ValueError:
            yield b""


def _parse_line(line: str, group_name: str) -> dict[str, Any] | None:
    try:
        item = parse_json(line)
    except ValueError:
        return None
    is_valid = isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("key", group_name))
    return item if is_valid else None


def _add_to_reservoir(item: dict[str, Any], reservoir: list[dict[str, Any]], most: int, slot: int) -> None:
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
