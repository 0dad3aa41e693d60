"""A tree that divides thumbnails by their colours, so that few of them need to be compared.

An inner node compares one colour with a limit. Thumbnails are similar if no colour differs by more than a tolerance, so
those that are similar to a given one are in its own leaf, and beyond the nodes whose limit is within the tolerance of
its colour. A full leaf is divided by the colour and limit that leave the fewest comparisons. The leaves' contents are
kept by the caller: the tree takes a few hundred bytes per leaf.
"""

from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 12
"""Largest difference of a colour (0 to 255) in the thumbnails of similar images; measured, see docs/evidence/LOG.md."""

LEAF_ROWS = 256
"""Thumbnails of a leaf that is divided; of one that no limit divides well, twice as many each time."""

_MIN_FREE = 16  # thumbnails that a new leaf takes at least before it is divided
_WORTH = 0.97  # a split leaves at most this share of the comparisons
_BIN = 4  # limits that are tried are this far apart; divides TOLERANCE
_REACH = TOLERANCE // _BIN
_BINS = 256 // _BIN


class Split(NamedTuple):
    """Thumbnails whose colour at ``column`` is at most ``limit`` are below ``low``, the others below ``high``."""

    column: int
    limit: int
    low: int
    high: int


class ThumbnailTree:
    """Nodes are numbers. Thumbnails of different lengths, with and without a mask, have separate roots."""

    def __init__(self) -> None:
        self._numbers = count()
        self._roots: dict[int, int] = {}
        self._splits: dict[int, Split] = {}
        self._free: dict[int, int] = {}

    def leaves(self, thumbnail: bytes, tolerance: int = TOLERANCE) -> list[int]:
        """Return the leaves of all thumbnails whose colours differ by at most ``tolerance``; of 0, its own leaf."""
        if len(thumbnail) not in self._roots:
            self._roots[len(thumbnail)] = self._add_leaf(0)
        leaves = []
        nodes = [self._roots[len(thumbnail)]]
        while nodes:
            split = self._splits.get(node := nodes.pop())
            if split is None:
                leaves.append(node)
                continue
            colour = thumbnail[split.column]
            if colour - tolerance <= split.limit:
                nodes.append(split.low)
            if colour + tolerance > split.limit:
                nodes.append(split.high)
        return leaves

    def take(self, leaf: int) -> bool:
        """Count a thumbnail that is added to a leaf; return whether the leaf is full."""
        self._free[leaf] -= 1
        return self._free[leaf] <= 0

    def divide(self, leaf: int, rows: int, sample: NDArray[np.uint8]) -> Split | None:
        """Divide a full leaf of ``rows`` thumbnails by the best limit of a ``sample``; None if it stays a leaf."""
        best = best_limit(sample)
        if best is None:
            self._free[leaf] = rows
            return None
        column, limit, share = best
        del self._free[leaf]
        low = round(share * rows)
        self._splits[leaf] = split = Split(column, limit, self._add_leaf(low), self._add_leaf(rows - low))
        return split

    def _add_leaf(self, rows: int) -> int:
        leaf = next(self._numbers)
        self._free[leaf] = max(_MIN_FREE, LEAF_ROWS - rows)
        return leaf


def best_limit(thumbnails: NDArray[np.uint8]) -> tuple[int, int, float] | None:
    """Return (column, limit, share of the thumbnails below it) with the fewest comparisons; None if none saves enough.

    The comparisons are counted as if the next thumbnails were distributed as these.
    """
    rows, columns = thumbnails.shape
    bins = (thumbnails // _BIN).astype(np.int64) + _BINS * np.arange(columns)
    below = np.bincount(bins.ravel(), minlength=columns * _BINS).reshape(columns, _BINS).cumsum(1)
    sides = ((0, 0), (_REACH, _REACH))
    padded = np.pad(below, sides, constant_values=((0, 0), (0, rows)))
    search_low = padded[:, 2 * _REACH :]
    search_high = rows - padded[:, : -2 * _REACH]
    comparisons = search_low * below + search_high * (rows - below)
    best = int(comparisons.argmin())
    if comparisons.flat[best] > _WORTH * rows**2:
        return None
    column, number = divmod(best, _BINS)
    return column, number * _BIN + _BIN - 1, float(below[column, number] / rows)
