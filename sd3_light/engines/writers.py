"""Which rank writes which of the tensors that several ranks hold as equal copies."""

from collections.abc import Sequence
from heapq import heapify, heapreplace


def assign_writers(sizes: Sequence[int], writers: int) -> list[int]:
    """Return the writer of each tensor, balanced by size: each, largest first, goes to the least loaded writer."""
    totals = [(0, writer) for writer in range(writers)]
    heapify(totals)
    assigned = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):  # stable: ties keep their order
        total, writer = totals[0]
        assigned[number] = writer
        heapreplace(totals, (total + sizes[number], writer))
    return assigned
