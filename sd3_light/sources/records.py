"""The items of a scan: records of usable samples, and rejects with a reason, which `Rejects` counts.

A record is small: it has the location of the bytes and reads them on demand.
"""

import io
from collections import Counter
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from sd3_light.config.base import is_url
from sd3_light.sources.access import file_size, open_file, read_file, read_range, version_of
from sd3_light.sources.preprocess import REASONS, Reject


class Location(Protocol):
    """The location of the bytes of one image. Small, immutable and picklable."""

    @property
    def path(self) -> str:
        """The file that contains the bytes."""

    def num_bytes(self) -> int:
        """Return the number of bytes, 0 if only `read` finds it or why it cannot."""

    def read(self) -> bytes:
        """Read the bytes; raises Reject if that is not possible."""


def open_location(location: Location) -> BinaryIO:
    """Open the bytes for reading; those of a file on disk are read piece by piece, others at once. Raises Reject."""
    if not isinstance(location, FileBytes) or is_url(location.path):
        return io.BytesIO(location.read())
    try:
        return open_file(location.path)
    except OSError as error:
        raise Reject("unreadable", str(error)) from error


def location_version(location: Location) -> str:
    """Return the `version_of` the file that contains the bytes. Raises Reject("unreadable") if it is missing."""
    if isinstance(location, FileBytes) and location.listed:
        return location.listed
    try:
        return version_of(location.path)
    except OSError as error:
        raise Reject("unreadable", str(error)) from error


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A whole file. ``listed`` is its version in the listing of a store, which saves requests; "" if unknown."""

    path: str
    listed: str = field(default="", compare=False)

    def num_bytes(self) -> int:
        """Return the file's size."""
        try:
            return int(self.listed.partition("-")[0]) if self.listed else file_size(self.path)
        except OSError:
            return 0

    def read(self) -> bytes:
        """Read the file."""
        try:
            return read_file(self.path)
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
            return read_range(self.path, self.offset, self.size)
        except EOFError as error:
            raise Reject("truncated", f"{self.path!r} ends {error} bytes before the end of its member") from error
        except OSError as error:
            raise Reject("unreadable", str(error)) from error


@dataclass(frozen=True, slots=True)
class Record:
    """One sample of a dataset, by reference.

    ``key`` is its stable source key, unique in the dataset: ``NAME#N/path/in/the/directory.jpg``. ``captions`` is never
    empty (an empty caption is ``""``) and includes the caption prefix; tags are not shuffled yet. ``attributes`` is the
    JSON of the values that `where` combines with the image's size. ``rejected`` is a worse image of the same caption,
    ``references`` are images that the model sees beside it, in their order.
    """

    key: str
    captions: tuple[str, ...]
    image: Location
    mask: Location | None = None
    attributes: str = ""
    rejected: Location | None = None
    references: tuple[Location, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """An input that cannot be used: a code of `preprocess.REASONS`, details, and the location of an image to show."""

    key: str
    reason: str
    detail: str = ""
    image: Location | None = None


ScanItem = Record | Rejected


_SHOWN = 3


@dataclass
class Rejects:
    """Counts by reason, and the keys of the first inputs of each.

    ``uncaptioned`` says of the first image without a caption which files were found and why they were not read.
    """

    counts: Counter[str] = field(default_factory=Counter)
    keys: dict[str, list[str]] = field(default_factory=dict)
    uncaptioned: str = ""

    def add(self, reason: str, key: str, detail: str = "") -> None:
        """Count one input."""
        self.counts[reason] += 1
        if reason == "no_caption":
            self.uncaptioned = self.uncaptioned or detail
        if self.counts[reason] <= _SHOWN:
            self.keys.setdefault(reason, []).append(key)

    def lines(self) -> list[str]:
        """Return one line per reason, the most frequent first."""
        return [self._line(*item) for item in sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))]

    def _line(self, reason: str, count: int) -> str:
        line = f"rejected {count:,}: {reason} ({REASONS[reason]})"
        keys = self.keys.get(reason, [])
        more = f" and {count - len(keys):,} more" if count > len(keys) else ""
        line = f"{line}: {', '.join(keys)}{more}" if keys else line
        return f"{line}: {self.uncaptioned}" if reason == "no_caption" and self.uncaptioned else line


def reject_line(key: str, reason: str, detail: str, image: str) -> dict[str, str]:
    """Return one line of rejects.jsonl."""
    return {"key": key, "reason": reason, "detail": detail, "image": image}
