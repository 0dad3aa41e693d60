"""The items of a scan: records of usable samples, and rejects with a reason.

A record is small: it has the location of the bytes and reads them on demand.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sd3_light.data.preprocess import Reject


class Location(Protocol):
    """The location of the bytes of one image. Small, immutable and picklable."""

    @property
    def path(self) -> str:
        """The file that contains the bytes."""

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

    def read(self) -> bytes:
        """Read the file."""
        try:
            return Path(self.path).read_bytes()
        except OSError as error:
            raise Reject("unreadable", str(error)) from error


@dataclass(frozen=True, slots=True)
class FileRange:
    """``size`` bytes of a file from ``offset``: a member of a tar."""

    path: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Read the range."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise Reject("unreadable", str(error)) from error
        if len(data) < self.size:
            raise Reject("truncated", f"{self.path!r} ends {self.size - len(data)} bytes before the end of its member")
        return data


@dataclass(frozen=True, slots=True)
class Record:
    """One sample of a dataset, by reference.

    ``key`` is its stable source key, unique in the dataset: ``NAME#N/path/in/the/directory.jpg``. ``captions`` is never
    empty (an empty caption is ``""``) and includes the caption prefix; tags are not shuffled yet.
    """

    key: str
    captions: tuple[str, ...]
    image: Location
    mask: Location | None = None


@dataclass(frozen=True, slots=True)
class Rejected:
    """An input that cannot be used: a code of `preprocess.REASONS`, details, and the location of an image to show."""

    key: str
    reason: str
    detail: str = ""
    image: Location | None = None


ScanItem = Record | Rejected
