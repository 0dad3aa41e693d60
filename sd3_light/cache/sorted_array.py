"""A sorted array on disk, to compare millions of samples in little memory."""

import tempfile
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sd3_light.config.faults import UserError


class SortedArray:
    """Values that are added first and queried afterwards, in a memory-mapped file whose pages the kernel can reclaim.

    Values of type ``S`` are compared as bytes, with zeros at the end of shorter ones.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._sorted: NDArray[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sorted = None
        self._file.close()

    def add(self, values: ArrayLike) -> None:
        """Add values; not allowed after the first query."""
        assert self._sorted is None, "already queried"
        try:
            np.asarray(values, dtype=self._dtype).tofile(self._file)
        except OSError as error:
            hint = "free disk space there, or set TMPDIR to another folder"
            raise UserError(f"cannot write to {tempfile.gettempdir()}: {error}; {hint}") from error

    @property
    def values(self) -> NDArray[Any]:
        """All values, sorted."""
        if self._sorted is None:
            self._sorted = self._sort()
        return self._sorted

    def contains(self, values: ArrayLike) -> NDArray[np.bool_]:
        """Return for each value whether it was added."""
        wanted = np.asarray(values, dtype=self._dtype)
        if not len(self.values):
            return np.zeros(len(wanted), dtype=np.bool_)
        index = np.searchsorted(self.values, wanted).clip(max=len(self.values) - 1)
        matches: NDArray[np.bool_] = self.values[index] == wanted
        return matches

    def _sort(self) -> NDArray[Any]:
        self._file.flush()
        if not self._file.tell():  # an empty file cannot be mapped
            return np.empty(0, dtype=self._dtype)
        values = np.memmap(self._file, dtype=self._dtype, mode="r+")
        values.sort()
        return values
