"""Who writes what of that which several processes have alike."""

from collections.abc import Sequence
from heapq import heapify, heapreplace


def assign_writers(sizes: Sequence[int], writers: int) -> list[int]:
    """The writer of each tensor, so that all write about as much: the largest first, each to who has least so far."""
    taken = [(0, writer) for writer in range(writers)]
    heapify(taken)
    found = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):  # of equal ones the first first
        total, writer = taken[0]
        found[number] = writer
        heapreplace(taken, (total + sizes[number], writer))
    return found
