"""The sides of a cache: the rows to train on, and those that are held out for the validation loss. Imports no torch.

All are rows of the same shards. A side is a view: buckets with the shards that have rows of it, and how many.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sd3_light.data.shard_table import BucketShards, ShardEntry, ShardTable

Side = Literal["all", "train", "validation"]
Ids = Mapping[str, tuple[int, ...]]
"""Ids of samples by the file of their shard."""


@dataclass(frozen=True)
class HeldOut:
    """The samples that are not trained on: those for ``validation``, and ``unused`` ones, similar to both sides."""

    validation: Ids = field(default_factory=dict)
    unused: Ids = field(default_factory=dict)

    @staticmethod
    def from_json(content: Any) -> "HeldOut | None":
        """Return what `as_json` wrote; None for None. Raises ValueError or TypeError."""
        if content is None:
            return None
        names = ("validation", "unused")
        if not isinstance(content, dict) or not all(isinstance(content.get(name), dict) for name in names):
            raise TypeError("held_out has a wrong type")
        sides = {name: {file: tuple(ids) for file, ids in content[name].items()} for name in names}
        for ids in (ids for side in sides.values() for ids in side.values()):
            if not ids or not all(type(number) is int for number in ids):
                raise ValueError("held_out has other values than ids")
        return HeldOut(**sides)

    def as_json(self) -> dict[str, Any]:
        """Return the ids as JSON has them."""
        return {"validation": dict(self.validation), "unused": dict(self.unused)}

    def ids(self, file: str, side: Side) -> tuple[int, ...]:
        """Return the samples of a shard that are on the validation side, or not on the training side."""
        ids = self.validation.get(file, ())
        return ids if side == "validation" else (*ids, *self.unused.get(file, ()))

    @property
    def files(self) -> set[str]:
        """The shards with samples that are not trained on."""
        return {*self.validation, *self.unused}

    def trained(self, entries: Sequence[ShardEntry]) -> list[ShardEntry]:
        """Return the entries of shards with the counts of their training samples, without empty ones."""
        left = [replace(entry, count=entry.count - len(self.ids(entry.file, "train"))) for entry in entries]
        return [entry for entry in left if entry.count]

    def rows(self, ids: NDArray[np.int64], file: str, side: Side) -> NDArray[np.int64] | None:
        """Return the rows of a side in a shard with these ids; None for all of them. Raises ValueError."""
        chosen = self.ids(file, side)
        if side == "all" or (side == "train" and not chosen):
            return None
        is_chosen = np.isin(ids, np.array(chosen, np.int64))
        if is_chosen.sum() != len(chosen):
            raise ValueError("it lacks samples that the manifest holds out")
        return np.flatnonzero(is_chosen if side == "validation" else ~is_chosen)


def side_buckets(buckets: Sequence[BucketShards], held_out: HeldOut | None, side: Side) -> tuple[BucketShards, ...]:
    """Return the buckets with the samples of a side, without shards and buckets that have none of it."""
    if side == "all" or (held_out is None and side == "train"):
        return tuple(buckets)
    held_out = held_out or HeldOut()
    views = (_view(bucket, held_out, side) for bucket in buckets)
    return tuple(view for view in views if len(view.shards))


def _view(bucket: BucketShards, held_out: HeldOut, side: Side) -> BucketShards:
    counts = np.zeros(len(bucket.shards), np.int64) if side == "validation" else bucket.counts.copy()
    sign = 1 if side == "validation" else -1
    for file, number in _numbers(bucket.shards, held_out.files).items():
        counts[number] += sign * len(held_out.ids(file, side))
    if counts.all():
        return replace(bucket, own_counts=counts)
    return replace(bucket, shards=_take(bucket.shards, np.flatnonzero(counts)), own_counts=counts[counts > 0])


def _numbers(shards: Sequence[ShardEntry], files: set[str]) -> dict[str, int]:
    """Return the numbers of those shards that have one of these names."""
    if isinstance(shards, ShardTable):
        return shards.numbers(sorted(files))
    return {entry.file: number for number, entry in enumerate(shards) if entry.file in files}


def _take(shards: Sequence[ShardEntry], numbers: NDArray[np.int64]) -> Sequence[ShardEntry]:
    if isinstance(shards, ShardTable):
        return shards.take(numbers)
    return tuple(shards[number] for number in numbers.tolist())
