"""Which images of a dataset are held out for the validation loss: whole groups, by the hash of the group.

Images with the same bytes or similar thumbnails are a group, and so are those with a reference in common, or with an
image that is the reference of another. A group is held out if its hash falls into the lowest 2%,
within a limit, and at least two images are. Every decision is recorded beside the catalogue, by the content and by the
key of the image, and never changes: an image that is added later joins the side of its group. If its group has both
sides, because it resembles an image of each, it is on neither, and so are images that no longer fit the limit.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
from numpy.typing import NDArray

from sd3_light.config.faults import UserError
from sd3_light.files import atomic_file
from sd3_light.inputs import require_regular
from sd3_light.randomness import sample_id
from sd3_light.sources.catalogue import InputRow
from sd3_light.sources.groups import group_positions, image_hash, open_groups
from sd3_light.sources.leaks import colours

SHARE = 0.02
"""Share of the groups that are held out."""
MOST = 512
"""Images that are held out at most."""
FEWEST = 2
"""Images that are held out at least, if there are four or more."""

RECORD = "sides.arrow"
"""File of a catalogue with the side of every image that was ever in it."""

_UNKNOWN = -1
TRAIN = 0
VALIDATION = 1
UNUSED = 2
SideCodes = NDArray[np.int8]


@dataclass(frozen=True)
class ImageSplit:
    """The ids of images that are held out, and of those that are on neither side, of ``images`` in all."""

    images: int
    validation: tuple[int, ...]
    unused: tuple[int, ...]

    def sentence(self) -> str:
        """Return how many images are held out."""
        held = len(self.validation)
        total = self.images
        if not held:
            return f"none of {total:,} images can be held out: too few are different from the others"
        unused = f"; {len(self.unused):,} that resemble held-out ones are not used" if self.unused else ""
        return f"{held:,} of {total:,} images are held out{unused}"


def largest_split(images: int) -> int:
    """Return how many images are held out at most: 4%, up to 512; of few images two, at most half."""
    return min(MOST, max(FEWEST, images // 25), images // 2)


def expected_split(images: int) -> int:
    """Return about how many images are held out if no two are similar."""
    return min(largest_split(images), max(FEWEST, round(SHARE * images)))


ReadRows = Callable[[], Iterable[tuple[InputRow, bool]]]
"""Yields the rows of the images, each with whether it may be held out; they are read several times."""


def split_images(rows: ReadRows, record: Path) -> ImageSplit:
    """Decide the side of every image, and record it."""
    hashes = array("Q")
    keys = array("q")
    may_hold = array("b")
    for row, may_be_held_out in rows():
        hashes.append(image_hash(row.digest))
        keys.append(sample_id(row.key))
        may_hold.append(may_be_held_out)
    by_content = np.array(hashes, np.uint64)
    ids = np.array(keys, np.int64)
    may = np.array(may_hold, np.bool_)
    decisions = Decisions.load(record)
    known = decisions.known_sides(by_content, ids.astype(np.uint64))
    known = np.where((known == _UNKNOWN) & ~may, TRAIN, known).astype(np.int8)
    groups = _groups(rows, known == _UNKNOWN)
    sides = decide(groups, group_positions(groups, by_content), known, int(may.sum()))
    both = np.concatenate([by_content, ids.astype(np.uint64)])
    decisions.added(both, np.concatenate([sides, sides])).save(record)
    held, unused = (tuple(ids[sides == side].tolist()) for side in (VALIDATION, UNUSED))
    return ImageSplit(len(sides), held, unused)


def _groups(rows: ReadRows, is_new: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the groups of the new images, with the known ones that they resemble.

    Known images are compared with the new ones only: a few added images cost little.
    """
    if not is_new.any():
        return np.arange(len(is_new))
    with open_groups() as groups:
        for joins in (False, True):
            for image, (row, _) in enumerate(rows()):
                if is_new[image] == joins:
                    continue
                unite = groups.join if joins else groups.add
                unite(image, [row.digest, *row.reference_digests], colours(row.thumbnail) if row.thumbnail else b"")
        return groups.roots(len(is_new))


def decide(groups: NDArray[np.int64], positions: NDArray[np.float64], known: SideCodes, images: int) -> SideCodes:
    """Return the side of every image; ``known`` ones keep theirs. ``images`` may be held out."""
    first, group = np.unique(groups, return_inverse=True)
    has = [np.bincount(group[known == side], minlength=len(first)) > 0 for side in (TRAIN, VALIDATION, UNUSED)]
    is_old = has[TRAIN] | has[VALIDATION] | has[UNUSED]
    only = [has[side] & (np.sum(has, axis=0) == 1) for side in (TRAIN, VALIDATION)]
    joined = np.select(only, [TRAIN, VALIDATION], UNUSED)[group]
    is_new = known == _UNKNOWN
    sides = np.where(is_new, np.where(is_old[group], joined, TRAIN), known).astype(np.int8)
    limit = largest_split(images)
    room = max(0, limit - int((known == VALIDATION).sum()))
    sides[np.flatnonzero(is_new & (sides == VALIDATION))[room:]] = UNUSED
    held = int((sides == VALIDATION).sum())
    for number in _chosen(np.bincount(group), positions[first], ~is_old, limit, held):
        sides[group == number] = VALIDATION
    return sides


def _chosen(
    sizes: NDArray[np.int64], positions: NDArray[np.float64], is_new: NDArray[np.bool_], limit: int, held: int
) -> list[int]:
    """Return the numbers of new groups that are held out: by position, or else the smallest one."""
    new = np.flatnonzero(is_new)
    chosen: list[int] = []
    for number in new[np.argsort(positions[new], kind="stable")].tolist():
        if positions[number] >= SHARE and held >= min(FEWEST, limit):
            break
        if held + sizes[number] <= limit:
            held += int(sizes[number])
            chosen.append(number)
    if not held and len(new):
        smallest = min(new.tolist(), key=lambda number: (sizes[number], positions[number]))
        chosen += [smallest] if 2 * sizes[smallest] <= sizes.sum() else []
    return chosen


_SCHEMA = pa.schema([("hash", pa.uint64()), ("side", pa.int8())])


@dataclass(frozen=True)
class Decisions:
    """Sides by hash, sorted; in a file that is mapped into memory."""

    hashes: NDArray[np.uint64]
    known: SideCodes

    @staticmethod
    def load(path: Path) -> "Decisions":
        """Read the decisions of earlier runs; none if there is no file."""
        if not path.exists():
            return Decisions(np.empty(0, np.uint64), np.empty(0, np.int8))
        try:
            require_regular(path)
            table = feather.read_table(path, memory_map=True)
            table.validate(full=True)
            hashes, sides = (table[name].combine_chunks().to_numpy() for name in ("hash", "side"))
        except (pa.ArrowException, OSError, ValueError, LookupError) as error:
            raise UserError(
                f"{path} is damaged ({error}): it says which images are held out; restore it, or delete it to divide "
                "them again, and then start new runs"
            ) from error
        return Decisions(hashes, sides)

    def sides(self, hashes: NDArray[np.uint64]) -> SideCodes:
        """Return the side of each hash, -1 if it is unknown."""
        if not len(self.hashes):
            return np.full(len(hashes), _UNKNOWN, np.int8)
        at = np.searchsorted(self.hashes, hashes).clip(max=len(self.hashes) - 1)
        return np.where(self.hashes[at] == hashes, self.known[at], _UNKNOWN).astype(np.int8)

    def known_sides(self, by_content: NDArray[np.uint64], by_key: NDArray[np.uint64]) -> SideCodes:
        """Return the side of each image: by its content, also if it was moved, or by its key if it was edited.

        A new copy of an image that is still there is unknown: it needs room on that side.
        """
        content = self.sides(by_content)
        key = self.sides(by_key)
        is_copy = (key == _UNKNOWN) & np.isin(by_content, by_content[key != _UNKNOWN])
        known = np.where((content == _UNKNOWN) | (key == UNUSED), key, content)
        return np.where(is_copy, _UNKNOWN, known).astype(np.int8)

    def added(self, hashes: NDArray[np.uint64], sides: SideCodes) -> "Decisions":
        """Return the decisions with new ones; known ones stay."""
        values, first = np.unique(np.concatenate([self.hashes, hashes]), return_index=True)
        return Decisions(values, np.concatenate([self.known, sides])[first])

    def save(self, path: Path) -> None:
        """Write the decisions atomically."""
        table = pa.table({"hash": self.hashes, "side": self.known}, schema=_SCHEMA)
        with atomic_file(path) as temporary:
            feather.write_feather(table, str(temporary), compression="uncompressed")
