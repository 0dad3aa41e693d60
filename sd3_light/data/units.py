"""The cache's units of work: which samples make which shard, as a pure function of the sources.

A unit is one shard's worth of samples of one directory and one bucket. Its name carries the fingerprint of all that
makes it, so a unit whose name stands in the cache is done, whoever did it, and a change renames what it touches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from sd3_light.config import DatasetConfig, DirectoryConfig
from sd3_light.data.buckets import Bucket, assign_all, buckets_by_resolution, plan
from sd3_light.data.preprocess import Reject, probe
from sd3_light.data.shards import ShardEntry
from sd3_light.data.sources import Record, Rejected, caption_variants, occurrences, scan


@dataclass(frozen=True)
class Member:
    """One sample of a unit."""

    record: Record
    width: int
    height: int
    captions: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True)
class Unit:
    """One shard to be: its members and the entry it will have in the manifest."""

    directory: int
    bucket: Bucket
    resolution: tuple[int, int]
    number: int
    members: tuple[Member, ...]
    flip: bool

    @property
    def entry(self) -> ShardEntry:
        """Named by content; count, size and hash are known when it is written."""
        fingerprint = _digest(*(member.fingerprint for member in self.members), str(self.bucket), str(self.flip))
        side = f"r{self.resolution[0]}x{self.resolution[1]}"
        file = f"{self.directory:03d}-{side}-{self.bucket}-{self.number:05d}-{fingerprint[:16]}.safetensors"
        return ShardEntry(file, str(self.bucket), self.resolution, self.directory, 0, 0, "", fingerprint)


@dataclass
class Plan:
    """All units of a data set, what the scan rejected, and counts for the report."""

    units: list[Unit] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    cropped: int = 0
    enlarged: int = 0


def plan_units(dataset: DatasetConfig, recipe: Mapping[str, Any], seed: int, shard_size: int) -> Plan:
    """Scan every directory and deal its samples to buckets and units, in the order of the scan."""
    recipe_digest = _digest(repr(sorted(recipe.items())))
    result = Plan()
    for index, number in enumerate(occurrences(dataset.directories)):
        _plan_directory(dataset, index, number, recipe_digest, seed, shard_size, result)
    return result


def _plan_directory(
    dataset: DatasetConfig, index: int, number: int, recipe: str, seed: int, shard_size: int, result: Plan
) -> None:
    directory = dataset.directories[index]
    groups = buckets_by_resolution(directory)
    waiting: dict[tuple[tuple[int, int], Bucket], list[Member]] = {}
    for found in scan(directory, number):
        member = found if isinstance(found, Rejected) else _member(found, directory, recipe, seed)
        if isinstance(member, Rejected):
            result.rejected.append(member)
            continue
        for bucket in assign_all(member.width, member.height, groups):
            waiting.setdefault((_resolution(directory, groups, bucket), bucket), []).append(member)
            fit = plan(member.width, member.height, bucket)
            result.cropped += fit.cropped_fraction > 0
            result.enlarged += fit.enlarged
    for (resolution, bucket), members in sorted(waiting.items()):
        for unit, part in enumerate(_parts(members, shard_size)):
            result.units.append(Unit(index, bucket, resolution, unit, part, directory.flip))


def _resolution(directory: DirectoryConfig, groups: Sequence[Sequence[Bucket]], bucket: Bucket) -> tuple[int, int]:
    """The resolution a bucket belongs to, by which batch sizes are named; an explicit size bucket is its own."""
    if not directory.resolutions:
        return (bucket.width, bucket.height)
    return directory.resolutions[next(at for at, group in enumerate(groups) if bucket in group)]


def _member(record: Record, directory: DirectoryConfig, recipe: str, seed: int) -> Member | Rejected:
    try:
        data = record.read()
        width, height = probe(data)
        mask = b"" if record.mask is None else record.mask.read()
    except Reject as reject:
        return Rejected(record.key, reject.reason, reject.detail)
    captions = caption_variants(record.captions, seed, record.key, directory)
    fingerprint = _digest(record.key, data, mask, repr(captions), recipe)
    return Member(record, width, height, captions, fingerprint)


def _parts(members: list[Member], size: int) -> Iterator[tuple[Member, ...]]:
    for start in range(0, len(members), size):
        yield tuple(members[start : start + size])


def _digest(*parts: str | bytes) -> str:
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def count_reasons(rejected: Iterable[Rejected]) -> dict[str, int]:
    """How many inputs each reason took."""
    counts: dict[str, int] = {}
    for reject in rejected:
        counts[reject.reason] = counts.get(reject.reason, 0) + 1
    return counts
