"""Groups of images that must not be divided between training and evaluation.

Images that share a name, such as a content hash, or have similar thumbnails are in one group, also through others.
"""

import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from sd3_light.sources.earlier_images import Thumbnails
from sd3_light.sources.temporary_database import temporary_database

Indices = NDArray[np.int64]
Hashes = NDArray[np.uint64]


def group_images(images: Iterable[tuple[Sequence[str], bytes]]) -> Indices:
    """Return for each image, given by its names and thumbnail, the index of the first image of its group.

    An empty thumbnail is similar to none.
    """
    with open_groups() as groups:
        count = 0
        for count, (names, thumbnail) in enumerate(images, start=1):
            groups.add(count - 1, names, thumbnail)
        return groups.roots(count)


@contextmanager
def open_groups() -> Iterator["Groups"]:
    """Yield groups without images, on disk in the system's temp folder."""
    with closing(temporary_database()) as database:
        yield Groups(database)


class Groups:
    """Groups of images by index; memory grows by about 10 bytes per image."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._thumbnails = Thumbnails(database)
        self._parents = _Parents()
        database.execute("CREATE TABLE names (name BLOB PRIMARY KEY, image INT) WITHOUT ROWID")

    def add(self, image: int, names: Sequence[str], thumbnail: bytes) -> None:
        """Unite an image with those added before that share a name or have a similar thumbnail, and add it."""
        for name in names:
            self._parents.unite(image, self._first(_encoded(name), image))
        if not thumbnail:
            return
        # what is similar to an equal thumbnail is in its group already
        first = self._first(_digest(thumbnail), image)
        self._parents.unite(image, first)
        if first == image:
            self._unite_similar(image, thumbnail)
            self._thumbnails.add(image + 1, thumbnail)

    def join(self, image: int, names: Sequence[str], thumbnail: bytes) -> None:
        """Unite an image with those that were added, without adding it: others are not compared with it."""
        for name in names:
            self._parents.unite(image, self._known(_encoded(name), image))
        if thumbnail:
            self._unite_similar(image, thumbnail)

    def _unite_similar(self, image: int, thumbnail: bytes) -> None:
        for number in self._thumbnails.all(thumbnail):
            self._parents.unite(image, number - 1)

    def _known(self, name: bytes, image: int) -> int:
        """Return the first image with a name; this one if there is none."""
        known = self._database.execute("SELECT image FROM names WHERE name = ?", (name,)).fetchone()
        return image if known is None else int(known[0])

    def _first(self, name: bytes, image: int) -> int:
        """Return the first image with a name, which becomes this one if there is none."""
        known = self._known(name, image)
        if known == image:
            self._database.execute("INSERT OR IGNORE INTO names VALUES (?, ?)", (name, image))
        return known

    def roots(self, count: int) -> Indices:
        """Return the index of the first image of each group, for the first ``count`` images."""
        return self._parents.roots(count)


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _digest(thumbnail: bytes) -> bytes:
    return b"\0" + blake2b(thumbnail, digest_size=16).digest()


def group_positions(groups: Indices, hashes: Hashes) -> NDArray[np.float64]:
    """Return a number from 0 to 1 for each image, equal within a group and uniform over groups.

    ``hashes`` are those of the images. The lowest of a group decides, so that another image rarely changes it.
    """
    lowest = np.full(len(groups), np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(lowest, groups, hashes)
    # the lowest of many is small: only its own hash is uniform
    mixed = [blake2b(value.tobytes(), digest_size=8).digest() for value in lowest[np.unique(groups)]]
    positions = np.zeros(len(groups))
    positions[np.unique(groups)] = np.frombuffer(b"".join(mixed), "<u8").astype(np.float64) / 2.0**64
    return positions[groups]


def image_hash(text: str) -> int:
    """Return a hash of 64 bits."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


class _Parents:
    """Sets of images as trees; the root of a tree is its first image."""

    def __init__(self) -> None:
        self._parents = array("q")

    def unite(self, one: int, other: int) -> None:
        """Unite the sets of two images; an image that is new is a set."""
        self._extend(max(one, other) + 1)
        one = self._root(one)
        other = self._root(other)
        self._parents[max(one, other)] = min(one, other)

    def _extend(self, count: int) -> None:
        self._parents.extend(range(len(self._parents), count))

    def _root(self, image: int) -> int:
        parents = self._parents
        while (parent := parents[image]) != image:
            parents[image] = parents[parent]
            image = parents[image]
        return image

    def roots(self, count: int) -> Indices:
        """Return the roots of the first ``count`` images."""
        self._extend(count)
        return np.array([self._root(image) for image in range(count)], np.int64)
