"""A sorted array in memory, to compare millions of samples."""

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray


class SortedArray:
    """Values that are added first and queried afterwards.

    Values of type ``S`` are compared as bytes, with zeros at the end of shorter ones.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self._added = [np.empty(0, dtype)]

    def add(self, values: ArrayLike) -> None:
        """Add values; not allowed after the first query."""
        assert "values" not in vars(self), "already queried"
        self._added.append(np.asarray(values, self._added[0].dtype))

    @cached_property
    def values(self) -> NDArray[Any]:
        """All values, sorted."""
        values = np.concatenate(self._added)
        del self._added[1:]
        values.sort()
        return values

    def contains(self, values: ArrayLike) -> NDArray[np.bool_]:
        """Return for each value whether it was added."""
        wanted = np.asarray(values, self.values.dtype)
        if not len(self.values):
            return np.zeros(len(wanted), dtype=np.bool_)
        index = np.searchsorted(self.values, wanted).clip(max=len(self.values) - 1)
        matches: NDArray[np.bool_] = self.values[index] == wanted
        return matches
