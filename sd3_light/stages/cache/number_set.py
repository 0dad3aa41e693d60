"""A set of 63-bit numbers on disk: what millions of samples were is compared with what they are in little memory."""

import tempfile
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sd3_light.config.faults import UserError


class NumberSet:
    """Filled first, then asked. Lies in an unnamed file of the system's temporary folder, gone with the process.

    Its pages are the file's, which the kernel takes back where memory is short.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._sorted: NDArray[np.int64] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sorted = None
        self._file.close()

    def add(self, numbers: ArrayLike) -> None:
        """Put numbers into the set."""
        assert self._sorted is None, "asked already"
        try:
            np.asarray(numbers, dtype=np.int64).tofile(self._file)
        except OSError as error:
            hint = "free some space there, or name another folder in TMPDIR"
            raise UserError(f"cannot write to {tempfile.gettempdir()}: {error}; {hint}") from error

    def holds(self, numbers: ArrayLike) -> NDArray[np.bool_]:
        """Which of the numbers are in the set."""
        wanted = np.asarray(numbers, dtype=np.int64)
        if self._sorted is None:
            self._sorted = self._sort()
        if not len(self._sorted):
            return np.zeros(len(wanted), dtype=np.bool_)
        at = np.searchsorted(self._sorted, wanted).clip(max=len(self._sorted) - 1)
        found: NDArray[np.bool_] = self._sorted[at] == wanted
        return found

    def _sort(self) -> NDArray[np.int64]:
        self._file.flush()
        if not self._file.tell():  # nothing cannot be mapped
            return np.empty(0, dtype=np.int64)
        numbers = np.memmap(self._file, dtype=np.int64, mode="r+")
        numbers.sort()
        return numbers
