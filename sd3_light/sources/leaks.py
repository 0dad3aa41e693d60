"""Images that an evaluation set shares with the training set: the same bytes, or similar thumbnails."""

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np

from sd3_light.config import DirectoryConfig
from sd3_light.formats import plural
from sd3_light.sources.buckets import misfit
from sd3_light.sources.catalogue import InputRow
from sd3_light.sources.earlier_images import Thumbnails
from sd3_light.sources.preprocess import THUMBNAIL_SIDE
from sd3_light.sources.selection import matches_size
from sd3_light.sources.temporary_database import temporary_database

_SHOWN = 3  # pairs
_SIMILAR = 1
_EQUAL = 2


@dataclass(frozen=True)
class Leak:
    """Images of an evaluation set that the training set has too: ``equal`` bytes, or ``similar``.

    ``pairs`` are the keys of the first ones, each with that of a training image.
    """

    name: str
    images: int
    equal: int
    similar: int
    pairs: tuple[tuple[str, str], ...]

    def sentence(self) -> str:
        """Return how many there are, the first pairs and what to do."""
        kinds = ((self.equal, "with the same bytes"), (self.similar, "similar"))
        kind = ", ".join(f"{count:,} {text}" for count, text in kinds if count)
        pairs = ", ".join(f"{held} and {trained}" for held, trained in self.pairs)
        count = self.equal + self.similar
        return (
            f"{self.name} is not held out: {count:,} of its {plural(self.images, 'image')} "
            f"{'is' if count == 1 else 'are'} in the training set ({kind}), such as {pairs}; remove them from one of "
            "the two"
        )


def is_used(row: InputRow, directory: DirectoryConfig) -> bool:
    """Return whether a probed row is a sample that fits its directory's limits."""
    if row.reason or not matches_size(directory.where, row.attributes, row.width, row.height):
        return False
    return not misfit(row.width, row.height, directory, row.frames)


def colours(thumbnail: bytes) -> bytes:
    """Return a thumbnail without its mask."""
    pixels = np.frombuffer(thumbnail, np.uint8).reshape(THUMBNAIL_SIDE**2, -1)
    return pixels[:, :3].tobytes()


@contextmanager
def open_evaluation_images() -> Iterator["EvaluationImages"]:
    """Yield an empty set of images, on disk in the system's temp folder."""
    with closing(temporary_database()) as database:
        yield EvaluationImages(database)


@dataclass
class _Image:
    name: str
    key: str
    leak: int = 0


class EvaluationImages:
    """The images of evaluation sets, which training images are compared with, one after another."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._thumbnails = Thumbnails(database)
        self._images: list[_Image] = []
        self._by_digest = defaultdict[str, list[int]](list)
        self._pairs: dict[str, list[tuple[str, str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._images)

    def add(self, name: str, row: InputRow) -> None:
        """Add an image of the evaluation set ``name``."""
        self._pairs.setdefault(name, [])
        self._by_digest[row.digest].append(len(self._images))
        self._images.append(_Image(name, row.key))
        if row.thumbnail:
            self._thumbnails.add(len(self._images), colours(row.thumbnail))  # from 1 on

    def compare(self, row: InputRow) -> None:
        """Note the images that equal a training image or are similar to it."""
        self._note(self._by_digest.get(row.digest, ()), row.key, _EQUAL)
        if row.thumbnail and self._images:
            similar = sorted(self._thumbnails.all(colours(row.thumbnail)))
            self._note([number - 1 for number in similar], row.key, _SIMILAR)

    def _note(self, numbers: Iterable[int], key: str, kind: int) -> None:
        for number in numbers:
            image = self._images[number]
            pairs = self._pairs[image.name]
            if not image.leak and len(pairs) < _SHOWN:
                pairs.append((image.key, key))
            image.leak = max(image.leak, kind)

    def leaks(self) -> list[Leak]:
        """Return the leaks of each set that has some."""
        leaks = []
        for name, pairs in self._pairs.items():
            kinds = Counter(image.leak for image in self._images if image.name == name)
            if kinds[_EQUAL] or kinds[_SIMILAR]:
                leaks.append(Leak(name, kinds.total(), kinds[_EQUAL], kinds[_SIMILAR], tuple(pairs)))
        return leaks
