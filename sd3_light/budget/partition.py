"""Where a pipeline's stages begin and end in the list of layers: embed, the joint blocks, output.

Pure arithmetic for use without DeepSpeed; tests compare it with DeepSpeed's own partitioning.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple


def stage_bounds(weights: Sequence[int], stages: int, method: str, split: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the bounds of ``stages`` parts: stage s has layers ``bounds[s]`` to ``bounds[s + 1]`` - 1.

    ``method`` is the config's `partition_method`: equal counts, balanced weights as DeepSpeed computes them, or the
    config's ``split``. ``weights`` are the trained parameters per layer.
    """
    if method == "manual":
        return (0, *split, len(weights))
    return uniform(len(weights), stages) if method == "uniform" else balanced(tuple(weights), stages)


def uniform(count: int, parts: int) -> tuple[int, ...]:
    """Return bounds of equal counts; the first parts take the remainder."""
    each, more = divmod(count, parts)
    return tuple(part * each + min(part, more) for part in range(parts + 1))


class _Cut(NamedTuple):
    """The best known cut of the first layers: the spread of its parts, and where the last part begins."""

    spread: float
    largest: float
    smallest: float
    start: int


@cache
def balanced(weights: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Return bounds with a small difference between the largest and smallest part, as DeepSpeed computes them.

    It extends its best cut into one part fewer; among equal cuts the one with the latest start wins.
    """
    count = len(weights)
    if count <= parts:
        return uniform(count, parts)
    sums = [0, *accumulate(weights)]
    none = _Cut(float("inf"), float("inf"), float("inf"), 0)
    known = [_Cut(0, 0, float("inf"), 0), *[none] * count]
    starts = []
    for part in range(1, parts + 1):
        known = [none, *(_extended(known, sums, stop) if stop >= part else none for stop in range(1, count + 1))]
        starts.append([cut.start for cut in known])
    bounds = [count]
    for row in reversed(starts):
        bounds.append(row[bounds[-1]])
    return tuple(reversed(bounds))


def _extended(known: Sequence[_Cut], sums: Sequence[int], stop: int) -> _Cut:
    """Return the best cut of the layers before ``stop``, given the best cuts with one part fewer."""
    best = _Cut(float("inf"), float("inf"), float("inf"), 0)
    for start in range(stop):
        last = sums[stop] - sums[start]
        largest, smallest = max(known[start].largest, last), min(known[start].smallest, last)
        if largest - smallest <= best.spread:
            best = _Cut(largest - smallest, largest, smallest, start)
    return best
