"""The items of a scan: records of usable samples, and rejects with a reason.

A record is small: it has the location of the bytes and reads them on demand.
"""

import os
from dataclasses import dataclass
from typing import Protocol

from sd3_light.data.preprocess import Reject
from sd3_light.inputs import open_regular


class Location(Protocol):
    """The location of the bytes of one image. Small, immutable and picklable."""

    @property
    def path(self) -> str:
        """The file that contains the bytes."""

    def num_bytes(self) -> int:
        """Return the number of bytes, 0 if only `read` finds it or why it cannot."""

    def read(self) -> bytes:
        """Read the bytes; raises Reject if that is not possible."""


def file_version(path: str) -> str:
    """Return ``SIZE-MTIME_NS`` of a file. Raises Reject("unreadable") if it is missing."""
    # not cached: a stat takes a microsecond or two, and a cached result could hide a change
    try:
        status = os.stat(path)
    except OSError as error:
        raise Reject("unreadable", str(error)) from error
    return f"{status.st_size}-{status.st_mtime_ns}"


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A whole file."""

    path: str

    def num_bytes(self) -> int:
        """Return the file's size."""
        try:
            return os.stat(self.path).st_size
        except OSError:
            return 0

    def read(self) -> bytes:
        """Read the file."""
        try:
            with open_regular(self.path) as file:
                return file.read()
        except OSError as error:
            raise Reject("unreadable", str(error)) from error


@dataclass(frozen=True, slots=True)
class FileRange:
    """``size`` bytes of a file from ``offset``: a member of a tar."""

    path: str
    offset: int
    size: int

    def num_bytes(self) -> int:
        """Return the size that the tar declares."""
        return self.size

    def read(self) -> bytes:
        """Read the range; nothing is allocated for bytes that the file does not have."""
        try:
            with open_regular(self.path) as file:
                missing = self.offset + self.size - os.fstat(file.fileno()).st_size
                if missing > 0:
                    raise Reject("truncated", f"{self.path!r} ends {missing} bytes before the end of its member")
                file.seek(self.offset)
                return file.read(self.size)
        except OSError as error:
            raise Reject("unreadable", str(error)) from error


@dataclass(frozen=True, slots=True)
class Record:
    """One sample of a dataset, by reference.

    ``key`` is its stable source key, unique in the dataset: ``NAME#N/path/in/the/directory.jpg``. ``captions`` is never
    empty (an empty caption is ``""``) and includes the caption prefix; tags are not shuffled yet. ``attributes`` is the
    JSON of the values that `where` combines with the image's size.
    """

    key: str
    captions: tuple[str, ...]
    image: Location
    mask: Location | None = None
    attributes: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """An input that cannot be used: a code of `preprocess.REASONS`, details, and the location of an image to show."""

    key: str
    reason: str
    detail: str = ""
    image: Location | None = None


ScanItem = Record | Rejected
