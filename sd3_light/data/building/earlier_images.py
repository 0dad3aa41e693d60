"""The images of a dataset so far, to find those that equal an earlier one, or are similar to it.

Equal images have the same bytes. Similar ones were resized or compressed again: no colour of their 16 x 16 thumbnails
differs by more than `TOLERANCE`. Only images that are close in a coarse grid are compared: the mean of a block of
colours differs by no more than the colours do, so an image that is similar to this one is in the grid cell of its means
or in one that the tolerance reaches. So every similar pair is found. The earlier one in the order of the dataset is
kept.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from sd3_light.config import DirectoryConfig
from sd3_light.data.building.catalogue import InputRow
from sd3_light.data.preprocess import THUMBNAIL_SIDE
from sd3_light.data.sources.name_store import temporary_database

TOLERANCE = 12
"""Largest difference of a colour (0 to 255) in the thumbnails of similar images; measured, see docs/LOG.md."""

# the means that place an image in the grid: row and column of a block, of 4 x 4, and channel
_ROWS, _COLUMNS, _CHANNELS = np.array(
    [(1, 1, 0), (1, 2, 1), (2, 1, 1), (2, 2, 2), (1, 1, 2), (2, 2, 0), (0, 1, 1), (3, 2, 1)]
).T
_BLOCKS = 4
_BLOCK_SIDE = THUMBNAIL_SIDE // _BLOCKS
_BLOCK_SIZE = _BLOCK_SIDE**2
_LEVELS = 8  # of a mean, each 32 wide; a power of 2
_LEVEL_WIDTH = 256 * _BLOCK_SIZE // _LEVELS  # of a block's sum
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
    """The images that are used so far. Memory is bounded: they are in a temporary database."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        database.execute("CREATE TABLE images (number INTEGER PRIMARY KEY, digest TEXT UNIQUE, key TEXT, image TEXT)")
        columns = "cell INT, number INT, thumbnail BLOB, PRIMARY KEY (cell, number)"
        database.execute(f"CREATE TABLE thumbnails ({columns}) WITHOUT ROWID")

    def add(self, row: InputRow, directory: DirectoryConfig) -> Duplicate | None:
        """Return what an image duplicates. Add it if that is nothing."""
        if found := self._images("digest = ?", row.digest):
            return Duplicate("keep" if directory.duplicates == "keep" else "drop", *found)
        if row.thumbnail and (number := self._find_similar(row.thumbnail)):
            return Duplicate("similar", *self._images("number = ?", number))
        values = row.digest, row.key, row.image
        added = self._database.execute("INSERT INTO images (digest, key, image) VALUES (?, ?, ?)", values)
        if row.thumbnail:
            cell = int(_grid_cells(row.thumbnail, 0)[0])
            self._database.execute("INSERT INTO thumbnails VALUES (?, ?, ?)", (cell, added.lastrowid, row.thumbnail))
        return None

    def _images(self, condition: str, value: str | int) -> tuple[str, ...]:
        query = f"SELECT key, image FROM images WHERE {condition}"
        return tuple(self._database.execute(query, (value,)).fetchone() or ())

    def _find_similar(self, thumbnail: bytes) -> int:
        """Return the number of the first similar image, 0 if there is none."""
        cells = _grid_cells(thumbnail, TOLERANCE).tolist()
        marks = ", ".join("?" * len(cells))
        # those with a mask are longer
        condition = f"cell IN ({marks}) AND length(thumbnail) = ?"
        query = f"SELECT number, thumbnail FROM thumbnails WHERE {condition} ORDER BY number"
        close = self._database.execute(query, (*cells, len(thumbnail)))
        while page := close.fetchmany(_PAGE):
            thumbnails = np.frombuffer(b"".join(other for _, other in page), np.uint8).reshape(len(page), -1)
            matches = np.flatnonzero(are_similar(np.frombuffer(thumbnail, np.uint8), thumbnails))
            if len(matches):
                return int(page[matches[0]][0])
        return 0


def are_similar(thumbnail: NDArray[np.uint8], others: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return for each of the other thumbnails whether it is similar to the first."""
    similar: NDArray[np.bool_] = (np.abs(others.astype(np.int16) - thumbnail) <= TOLERANCE).all(-1)
    return similar


def _grid_cells(thumbnail: bytes, tolerance: int) -> NDArray[np.int64]:
    """Return the grid cells of all images whose block means differ by at most ``tolerance``."""
    pixels = np.frombuffer(thumbnail, np.uint8).reshape(_BLOCKS, _BLOCK_SIDE, _BLOCKS, _BLOCK_SIDE, -1)
    sums = pixels.sum((1, 3), dtype=np.int64)[_ROWS, _COLUMNS, _CHANNELS]
    reach = tolerance * _BLOCK_SIZE
    low, high = ((sums + side).clip(0, 255 * _BLOCK_SIZE) // _LEVEL_WIDTH for side in (-reach, reach))
    levels = [np.arange(first, last + 1) for first, last in zip(low, high, strict=True)]
    combined: NDArray[np.int64] = reduce(lambda cell, level: np.add.outer(cell * _LEVELS, level).ravel(), levels)
    return combined
