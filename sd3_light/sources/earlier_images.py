"""The images of a dataset so far, to find those that equal an earlier one, or are similar to it.

Equal images have the same bytes. Similar ones were resized or compressed again: no colour of their 16 x 16 thumbnails
differs by more than `TOLERANCE`. `ThumbnailTree` leaves few thumbnails to compare, and every similar pair is found. The
earlier one in the order of the dataset is kept.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sd3_light.config import DirectoryConfig
from sd3_light.sources.catalogue import InputRow
from sd3_light.sources.temporary_database import temporary_database
from sd3_light.sources.thumbnail_tree import TOLERANCE as TOLERANCE
from sd3_light.sources.thumbnail_tree import ThumbnailTree

_PAGE = 1024


@dataclass(frozen=True)
class Duplicate:
    """An image that equals an earlier one or is similar to it. ``kind`` is a key of `manifest.DUPLICATES`."""

    kind: str
    first: str
    first_image: str

    @property
    def is_dropped(self) -> bool:
        """Whether the image is left out."""
        return self.kind != "keep"


@contextmanager
def open_earlier_images() -> Iterator["EarlierImages"]:
    """Yield an empty set of images, on disk in the system's temp folder."""
    with closing(temporary_database()) as database:
        yield EarlierImages(database)


class EarlierImages:
    """The images that are used so far, in a temporary database: memory grows by about 2 bytes per thumbnail."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._thumbnails = Thumbnails(database)
        database.execute("CREATE TABLE images (number INTEGER PRIMARY KEY, digest TEXT UNIQUE, key TEXT, image TEXT)")

    def add(self, row: InputRow, directory: DirectoryConfig) -> Duplicate | None:
        """Return what an image duplicates. Add it if that is nothing."""
        digest = "/".join((row.digest, row.mask_digest, row.rejected_digest, *row.reference_digests))
        if equal := self._images("digest = ?", digest):
            return Duplicate("keep" if directory.duplicates == "keep" else "drop", *equal)
        thumbnail = row.thumbnail if directory.duplicates == "drop_similar" else b""
        if thumbnail and (number := self._thumbnails.first(thumbnail)):
            return Duplicate("similar", *self._images("number = ?", number))
        values = digest, row.key, row.image
        added = self._database.execute("INSERT INTO images (digest, key, image) VALUES (?, ?, ?)", values)
        if thumbnail:
            assert added.lastrowid is not None
            self._thumbnails.add(added.lastrowid, thumbnail)
        return None

    def _images(self, condition: str, value: str | int) -> tuple[str, ...]:
        query = f"SELECT key, image FROM images WHERE {condition}"
        return tuple(self._database.execute(query, (value,)).fetchone() or ())


class Thumbnails:
    """Thumbnails by number, from 1 on, in a database."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._tree = ThumbnailTree()
        columns = "leaf INT, number INT, thumbnail BLOB, PRIMARY KEY (leaf, number)"
        database.execute(f"CREATE TABLE thumbnails ({columns}) WITHOUT ROWID")

    def first(self, thumbnail: bytes) -> int:
        """Return the lowest number of a similar thumbnail, 0 if there is none."""
        firsts = (next(self._in_leaf(leaf, thumbnail), 0) for leaf in self._tree.leaves(thumbnail))
        return min(filter(None, firsts), default=0)

    def all(self, thumbnail: bytes) -> Iterator[int]:
        """Yield the numbers of all similar thumbnails."""
        for leaf in self._tree.leaves(thumbnail):
            yield from self._in_leaf(leaf, thumbnail)

    def _in_leaf(self, leaf: int, thumbnail: bytes) -> Iterator[int]:
        """Yield the numbers of similar thumbnails in a leaf, in order."""
        wanted = np.frombuffer(thumbnail, np.uint8)
        query = "SELECT number, thumbnail FROM thumbnails WHERE leaf = ? ORDER BY number"
        rows = self._database.execute(query, (leaf,))
        while page := rows.fetchmany(_PAGE):
            matches = np.flatnonzero(are_similar(wanted, _stack([other for _, other in page])))
            yield from (int(page[match][0]) for match in matches)

    def add(self, number: int, thumbnail: bytes) -> None:
        """Add a thumbnail."""
        (leaf,) = self._tree.leaves(thumbnail, 0)
        self._database.execute("INSERT INTO thumbnails VALUES (?, ?, ?)", (leaf, number, thumbnail))
        if self._tree.take(leaf):
            self._divide(leaf)

    def _divide(self, leaf: int) -> None:
        (rows,) = self._database.execute("SELECT count(*) FROM thumbnails WHERE leaf = ?", (leaf,)).fetchone()
        newest = "SELECT thumbnail FROM thumbnails WHERE leaf = ? ORDER BY number DESC LIMIT ?"
        sample = _stack([thumbnail for (thumbnail,) in self._database.execute(newest, (leaf, _PAGE))])
        if split := self._tree.divide(leaf, rows, sample):
            side = "CASE WHEN substr(thumbnail, ?, 1) <= ? THEN ? ELSE ? END"
            values = split.column + 1, bytes([split.limit]), split.low, split.high
            self._database.execute(f"UPDATE thumbnails SET leaf = {side} WHERE leaf = ?", (*values, leaf))


def _stack(thumbnails: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(thumbnails), np.uint8).reshape(len(thumbnails), -1)


def are_similar(thumbnail: NDArray[np.uint8], others: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return for each of the other thumbnails whether it is similar to the first."""
    lowest = np.maximum(thumbnail, TOLERANCE) - TOLERANCE
    highest = np.minimum(thumbnail, 255 - TOLERANCE) + TOLERANCE
    similar: NDArray[np.bool_] = np.all((lowest <= others) & (others <= highest), axis=-1)
    return similar
