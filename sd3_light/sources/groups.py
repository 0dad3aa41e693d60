"""Groups of images that must not be divided between training and evaluation.

Images that share a name, such as a content hash, or have similar thumbnails are in one group, also through others.
"""

import sqlite3
from array import array
from collections.abc import Iterable, Sequence
from contextlib import closing
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from sd3_light.sources.earlier_images import Thumbnails
from sd3_light.sources.name_store import temporary_database

Indices = NDArray[np.int64]
Hashes = NDArray[np.uint64]


def group_images(images: Iterable[tuple[Sequence[str], bytes]]) -> Indices:
    """Return for each image, given by its names and thumbnail, the index of the first image of its group.

    An empty thumbnail is similar to none. Names and thumbnails are kept on disk, in the system's temp folder: memory
    grows by about 10 bytes per image.
    """
    parents = _Parents()
    with closing(temporary_database()) as database:
        thumbnails = Thumbnails(database)
        database.execute("CREATE TABLE names (name BLOB PRIMARY KEY, image INT) WITHOUT ROWID")
        for image, (names, thumbnail) in enumerate(images):
            parents.append()
            for name in names:
                parents.unite(image, _first(database, name.encode("utf-8", "surrogateescape"), image))
            if not thumbnail:
                continue
            # what is similar to an equal thumbnail is in its group already
            first = _first(database, b"\0" + blake2b(thumbnail, digest_size=16).digest(), image)
            parents.unite(image, first)
            if first == image:
                for number in thumbnails.all(thumbnail):
                    parents.unite(image, number - 1)
                thumbnails.add(image + 1, thumbnail)
    return parents.roots()


def _first(database: sqlite3.Connection, name: bytes, image: int) -> int:
    """Return the first image with a name, which is this one if the name is new."""
    known = database.execute("SELECT image FROM names WHERE name = ?", (name,)).fetchone()
    if known is not None:
        return int(known[0])
    database.execute("INSERT INTO names VALUES (?, ?)", (name, image))
    return image


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

    def append(self) -> None:
        """Add an image as a separate set."""
        self._parents.append(len(self._parents))

    def unite(self, one: int, other: int) -> None:
        """Unite the sets of two images."""
        one, other = self._root(one), self._root(other)
        self._parents[max(one, other)] = min(one, other)

    def _root(self, image: int) -> int:
        parents = self._parents
        while (parent := parents[image]) != image:
            parents[image] = parents[parent]
            image = parents[image]
        return image

    def roots(self) -> Indices:
        """Return the root of every image."""
        return np.array([self._root(image) for image in range(len(self._parents))], np.int64)
