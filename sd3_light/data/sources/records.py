"""What a scan yields: records of usable samples, and named rejects.

A record is light: it says where the bytes are and reads them only when asked.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sd3_light.data.preprocess import Reject


class Location(Protocol):
    """Where the bytes of one picture are. Small, immutable and picklable."""

    def read(self) -> bytes:
        """The bytes; raises Reject when they cannot be had."""

    def version(self) -> str:
        """``SIZE-MTIME_NS`` of the file that holds the bytes, a tar's for its members; raises Reject("unreadable")."""


def file_version(path: str) -> str:
    """``SIZE-MTIME_NS`` of a file. Raises Reject("unreadable") when it is not there."""
    # asked anew each time: a stat costs a microsecond or two, and a kept answer could hide a change
    try:
        status = os.stat(path)
    except OSError as fault:
        raise Reject("unreadable", str(fault)) from fault
    return f"{status.st_size}-{status.st_mtime_ns}"


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A whole file."""

    path: str

    def read(self) -> bytes:
        """The file's bytes."""
        try:
            return Path(self.path).read_bytes()
        except OSError as fault:
            raise Reject("unreadable", str(fault)) from fault

    def version(self) -> str:
        """The file's size and time."""
        return file_version(self.path)


@dataclass(frozen=True, slots=True)
class FileRange:
    """``size`` bytes of a file from ``offset`` on: a member of a tar."""

    path: str
    offset: int
    size: int

    def read(self) -> bytes:
        """The bytes of the range."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as fault:
            raise Reject("unreadable", str(fault)) from fault
        if len(data) < self.size:
            raise Reject("truncated", f"{self.path!r} ends {self.size - len(data)} bytes before its member does")
        return data

    def version(self) -> str:
        """Size and time of the file that holds the range."""
        return file_version(self.path)


@dataclass(frozen=True, slots=True)
class Record:
    """One sample of a data set, by reference.

    ``key`` is its stable source key, unique in the data set: ``NAME#N/path/in/the/directory.jpg``. ``captions`` is
    never empty (an empty caption is ``""``) and carries the caption prefix; tags are not shuffled yet.
    """

    key: str
    captions: tuple[str, ...]
    image: Location
    mask: Location | None = None

    def read(self) -> bytes:
        """The picture file's bytes; raises Reject when they cannot be had."""
        return self.image.read()


@dataclass(frozen=True, slots=True)
class Rejected:
    """One input that cannot be used: its key, a code of `preprocess.REASONS`, and what was seen.

    ``image`` says where the picture is, if there is one that may be shown.
    """

    key: str
    reason: str
    detail: str = ""
    image: Location | None = None


ScanItem = Record | Rejected
