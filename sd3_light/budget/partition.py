"""Where a pipeline's stages begin and end in the list of layers: embed, the joint blocks, output.

Pure arithmetic, for those who must know it without DeepSpeed; tests hold it against DeepSpeed's own.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple


def stage_bounds(weights: Sequence[int], stages: int, method: str, split: Sequence[int] = ()) -> tuple[int, ...]:
    """Bounds of ``stages`` parts: stage s has layers ``bounds[s]`` to ``bounds[s + 1]`` - 1.

    ``method`` is the config's `partition_method`: equal counts, weights as even as DeepSpeed makes them, or the
    config's own ``split``. ``weights`` are those of each layer that train.
    """
    if method == "manual":
        return (0, *split, len(weights))
    return uniform(len(weights), stages) if method == "uniform" else balanced(tuple(weights), stages)


def uniform(count: int, parts: int) -> tuple[int, ...]:
    """Parts of equal counts; the first ones have what does not divide."""
    each, more = divmod(count, parts)
    return tuple(part * each + min(part, more) for part in range(parts + 1))


class _Best(NamedTuple):
    """The best known cut of some first layers into some parts: the spread of its parts, and where the last begins."""

    spread: float
    largest: float
    smallest: float
    start: int


@cache
def balanced(weights: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Parts between the largest and smallest of which there is little difference, as DeepSpeed looks for them.

    It builds on its best cut into one part fewer, and of equal ones takes the cut with the latest start.
    """
    count = len(weights)
    if count <= parts:
        return uniform(count, parts)
    sums = [0, *accumulate(weights)]
    none = _Best(float("inf"), float("inf"), float("inf"), 0)
    known = [_Best(0, 0, float("inf"), 0), *[none] * count]
    starts = []
    for part in range(1, parts + 1):
        known = [none, *(_extended(known, sums, stop) if stop >= part else none for stop in range(1, count + 1))]
        starts.append([best.start for best in known])
    bounds = [count]
    for row in reversed(starts):
        bounds.append(row[bounds[-1]])
    return tuple(reversed(bounds))


def _extended(known: Sequence[_Best], sums: Sequence[int], stop: int) -> _Best:
    """The best cut of the layers before ``stop``, given the best ones with a part fewer."""
    found = _Best(float("inf"), float("inf"), float("inf"), 0)
    for start in range(stop):
        last = sums[stop] - sums[start]
        largest, smallest = max(known[start].largest, last), min(known[start].smallest, last)
        if largest - smallest <= found.spread:
            found = _Best(largest - smallest, largest, smallest, start)
    return found
