"""A set of 63-bit numbers on disk, to compare millions of samples in little memory."""

import tempfile
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sd3_light.config.faults import UserError


class NumberSet:
    """A set that is filled first and queried afterwards, in a memory-mapped file whose pages the kernel can reclaim."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._sorted: NDArray[np.int64] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sorted = None
        self._file.close()

    def add(self, numbers: ArrayLike) -> None:
        """Add numbers to the set; not allowed after the first query."""
        assert self._sorted is None, "already queried"
        try:
            np.asarray(numbers, dtype=np.int64).tofile(self._file)
        except OSError as error:
            hint = "free disk space there, or set TMPDIR to another folder"
            raise UserError(f"cannot write to {tempfile.gettempdir()}: {error}; {hint}") from error

    def contains(self, numbers: ArrayLike) -> NDArray[np.bool_]:
        """Return for each number whether it is in the set."""
        queries = np.asarray(numbers, dtype=np.int64)
        if self._sorted is None:
            self._sorted = self._sort()
        if not len(self._sorted):
            return np.zeros(len(queries), dtype=np.bool_)
        index = np.searchsorted(self._sorted, queries).clip(max=len(self._sorted) - 1)
        matches: NDArray[np.bool_] = self._sorted[index] == queries
        return matches

    def _sort(self) -> NDArray[np.int64]:
        self._file.flush()
        if not self._file.tell():  # an empty file cannot be mapped
            return np.empty(0, dtype=np.int64)
        numbers = np.memmap(self._file, dtype=np.int64, mode="r+")
        numbers.sort()
        return numbers
