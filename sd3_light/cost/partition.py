"""Partition the list of layers (embed, the joint blocks, output) into pipeline stages.

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
    each, remainder = divmod(count, parts)
    return tuple(part * each + min(part, remainder) for part in range(parts + 1))


class _Cut(NamedTuple):
    """The best known cut of the first layers: the spread of its parts, and where the last part begins."""

    spread: float
    largest: float
    smallest: float
    start: int


_NO_CUT = _Cut(float("inf"), float("inf"), float("inf"), 0)


@cache
def balanced(weights: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Return bounds of similar parts as DeepSpeed computes them: of equal cuts the one with the latest start wins."""
    count = len(weights)
    if count <= parts:
        return uniform(count, parts)
    sums = [0, *accumulate(weights)]
    cuts = [_Cut(0, 0, float("inf"), 0), *[_NO_CUT] * count]
    starts = []
    for part in range(1, parts + 1):
        cuts = [_NO_CUT, *(_extended(cuts, sums, stop) if stop >= part else _NO_CUT for stop in range(1, count + 1))]
        starts.append([cut.start for cut in cuts])
    bounds = [count]
    for row in reversed(starts):
        bounds.append(row[bounds[-1]])
    return tuple(reversed(bounds))


def _extended(cuts: Sequence[_Cut], sums: Sequence[int], stop: int) -> _Cut:
    """Return the best cut of the layers before ``stop``, given the best cuts with one part fewer."""
    best = _NO_CUT
    for start in range(stop):
        last = sums[stop] - sums[start]
        largest = max(cuts[start].largest, last)
        smallest = min(cuts[start].smallest, last)
        if largest - smallest <= best.spread:
            best = _Cut(largest - smallest, largest, smallest, start)
    return best
