"""The cache's units of work: which samples make which shard, as a pure function of the catalogue.

A unit is one shard's worth of samples of one source, one resolution and one bucket. Its name carries the fingerprint of
all that makes it, so a unit whose name stands in the cache is done, whoever did it, and a change renames what it
touches. Units end where their samples' own hashes say, so an added file touches its own unit and seldom the next.

A plan is kept on disk: `plan-DIGEST.arrow` has a row a unit with the places of its samples in the catalogue, read when
the unit's turn comes; `plan-DIGEST.json` has the counts and is written last.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sd3_light.config import DirectoryConfig
from sd3_light.data.buckets import Bucket, fits
from sd3_light.data.building.catalogue import PART_ROWS, Catalogue, InputRow, Listing, Source
from sd3_light.data.building.chunks import is_end
from sd3_light.data.building.claims import Claims
from sd3_light.data.manifest import ShardEntry
from sd3_light.data.sources import caption_variants
from sd3_light.files import atomic_file, write_atomically
from sd3_light.randomness import sample_id

PLAN_VERSION = 1
_UNITS_A_BATCH = 64
_PLANS_KEPT = 8
_POLL_SECONDS = 0.2
_TAGS_SEED = 0  # shuffled captions are a stock to draw from: another seed of training must not make them anew
_SETTINGS_APART = {"path", "mask_path", "default_mask_file", "num_repeats"}


@dataclass(frozen=True)
class Member:
    """One sample of a unit."""

    row: InputRow
    identity: int
    captions: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True)
class Unit:
    """One shard to be."""

    number: int
    file: str
    label: str
    bucket: Bucket
    resolution: tuple[int, int]
    flip: bool
    fingerprint: str
    count: int

    @property
    def entry(self) -> ShardEntry:
        """Its entry in the manifest; count, size and hash are known when it is written."""
        return ShardEntry(self.file, str(self.bucket), self.resolution, self.label, 0, 0, "", self.fingerprint)


@dataclass
class PlanCounts:
    """What planning saw."""

    pictures: int = 0
    cropped: int = 0
    enlarged: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


class CachePlan:
    """All units of a data set; their samples are read from the catalogue when asked for."""

    def __init__(self, path: Path, catalogue: Catalogue, listings: Sequence[Listing], recipe: str) -> None:
        self._catalogue, self._recipe = catalogue, recipe
        self._sources = {listing.source.label: listing.source for listing in listings}
        self._parts = [part for listing in listings for part in listing.parts]
        found = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        self.counts = PlanCounts(**{**found, "rejected": Counter(found["rejected"])})
        self._file = pa.ipc.open_file(pa.memory_map(str(path)))
        self.units = list(self._read_units())

    def _read_units(self) -> Iterator[Unit]:
        self._starts = [0]
        for number in range(self._file.num_record_batches):
            batch = self._file.get_batch(number)
            rows = batch.select(["file", "label", "size", "resolution", "flip", "fingerprint", "count"]).to_pylist()
            for at, row in enumerate(rows):
                bucket, resolution = Bucket(*row.pop("size")), tuple(row.pop("resolution"))
                yield Unit(number=self._starts[-1] + at, bucket=bucket, resolution=resolution, **row)
            self._starts.append(self._starts[-1] + len(rows))

    def source(self, unit: Unit) -> Source:
        """Where a unit's samples come from."""
        return self._sources[unit.label]

    def ids(self, unit: Unit) -> NDArray[np.int64]:
        """The ids of a unit's samples."""
        return self._column(unit, "ids")

    def members(self, unit: Unit) -> list[Member]:
        """The samples of a unit, in order."""
        places = self._column(unit, "places")
        members: list[Member] = []
        for part in dict.fromkeys((places // PART_ROWS).tolist()):
            numbers = (places[places // PART_ROWS == part] % PART_ROWS).tolist()
            rows = self._catalogue.rows(self._parts[part], numbers)
            members += [make_member(row, self.source(unit).directory, self._recipe) for row in rows]
        return members

    def rejected(self) -> Iterator[InputRow]:
        """Every input that is no sample, part by part."""
        for part in self._parts:
            yield from self._catalogue.rejected(part)

    def _column(self, unit: Unit, name: str) -> NDArray[np.int64]:
        batch = int(np.searchsorted(self._starts, unit.number, side="right")) - 1
        column = self._file.get_batch(batch).column(name)
        values: NDArray[np.int64] = column[unit.number - self._starts[batch]].values.to_numpy()
        return values


def make_cache_plan(
    catalogue: Catalogue, listings: Sequence[Listing], recipe: Mapping[str, Any], shard_size: int
) -> CachePlan:
    """The plan of what the catalogue holds now: an earlier one where nothing changed, else a new one, made by one
    process while others wait."""
    recipe_digest = _digest(repr(sorted(recipe.items())))
    settings = [
        (*listing.parts, listing.source.directory.model_dump_json(exclude=_SETTINGS_APART)) for listing in listings
    ]
    name = f"plan-{_digest(recipe_digest, repr(settings), str(shard_size), str(PLAN_VERSION))}"
    path = catalogue.folder / f"{name}.arrow"
    while not _is_made(path, catalogue.claims):
        if not catalogue.claims.take(name):
            time.sleep(_POLL_SECONDS)
            continue
        if not _is_made(path, catalogue.claims):
            _Planner(catalogue, recipe_digest, shard_size).write(path, listings)
            _forget_plans(catalogue.folder)
        catalogue.claims.release(name)
    try:
        os.utime(path)
        return CachePlan(path, catalogue, listings, recipe_digest)
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        # damaged: a plan follows from the catalogue, so it is made anew, once
        _Planner(catalogue, recipe_digest, shard_size).write(path, listings)
        return CachePlan(path, catalogue, listings, recipe_digest)


def _is_made(path: Path, claims: Claims) -> bool:
    """Whether a plan stands; one of inputs that could not be read stands for those only who have tried them."""
    counts = path.with_suffix(".json")
    if not counts.is_file():
        return False
    try:
        rejected = json.loads(counts.read_text(encoding="utf-8"))["rejected"]
    except (ValueError, LookupError, TypeError):
        return False
    return "unreadable" not in rejected or claims.is_newer(counts)


def _forget_plans(folder: Path) -> None:
    """Remove all but the plans that were used last."""
    for path in sorted(folder.glob("plan-*.arrow"), key=_last_use)[:-_PLANS_KEPT]:
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process forgets plans too
        return 0.0


@dataclass
class _Open:
    """A unit that is being filled."""

    places: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    fingerprints: list[str] = field(default_factory=list)


_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("file", "label", "fingerprint")),
        ("size", pa.list_(pa.int32(), 2)),
        ("resolution", pa.list_(pa.int32(), 2)),
        ("flip", pa.bool_()),
        ("count", pa.int32()),
        ("places", pa.list_(pa.int64())),
        ("ids", pa.list_(pa.int64())),
    ]
)

_Slot = tuple[tuple[int, int], Bucket]


class _Planner:
    """Deals samples to units in the catalogue's order; holds one unit a bucket and a few finished ones."""

    def __init__(self, catalogue: Catalogue, recipe: str, shard_size: int) -> None:
        self._catalogue, self._recipe, self._most = catalogue, recipe, shard_size
        self._counts = PlanCounts()

    def write(self, path: Path, listings: Sequence[Listing]) -> None:
        """Write the plan, counts last."""
        with (
            atomic_file(path) as temporary,
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_file(sink, _SCHEMA) as writer,
        ):
            for batch in _batched(self._units(listings)):
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=_SCHEMA))
        counts = {**self._counts.__dict__, "rejected": dict(self._counts.rejected)}
        write_atomically(path.with_suffix(".json"), json.dumps(counts).encode())

    def _units(self, listings: Sequence[Listing]) -> Iterator[dict[str, Any]]:
        number = 0
        for listing in listings:
            slots: dict[_Slot, _Open] = {}
            for part in listing.parts:
                yield from self._deal(listing.source, number * PART_ROWS, self._catalogue.rows(part), slots)
                number += 1
            for slot, rest in slots.items():
                if rest.places:
                    yield _finished(listing.source, slot, rest)

    def _deal(
        self, source: Source, first: int, rows: Sequence[InputRow], slots: dict[_Slot, _Open]
    ) -> Iterator[dict[str, Any]]:
        for place, row in enumerate(rows, start=first):
            if row.reason:
                self._counts.rejected[row.reason] += 1
                continue
            self._counts.pictures += 1
            member = make_member(row, source.directory, self._recipe)
            for resolution, bucket, fit in fits(row.width, row.height, source.directory):
                self._counts.cropped += fit.cropped_fraction > 0
                self._counts.enlarged += fit.enlarged
                unit = slots.setdefault((resolution, bucket), _Open())
                unit.places.append(place)
                unit.ids.append(member.identity)
                unit.fingerprints.append(member.fingerprint)
                if is_end(len(unit.places), member.identity, self._most):
                    yield _finished(source, (resolution, bucket), unit)
                    slots[resolution, bucket] = _Open()


def _batched(units: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while batch := list(islice(units, _UNITS_A_BATCH)):
        yield batch


def _finished(source: Source, slot: _Slot, unit: _Open) -> dict[str, Any]:
    (resolution, bucket), flip = slot, source.directory.flip
    fingerprint = _digest(*unit.fingerprints, str(bucket), str(flip))
    return {
        "file": f"{source.name}-r{resolution[0]}x{resolution[1]}-{bucket}-{fingerprint[:20]}.safetensors",
        "label": source.label,
        "fingerprint": fingerprint,
        "size": [bucket.width, bucket.height],
        "resolution": list(resolution),
        "flip": flip,
        "count": len(unit.places),
        "places": unit.places,
        "ids": unit.ids,
    }


def make_member(row: InputRow, directory: DirectoryConfig, recipe: str) -> Member:
    """A row as a sample: the captions to encode, and the fingerprint of all that its features come from."""
    captions = caption_variants(row.captions, _TAGS_SEED, row.key, directory)
    return Member(row, sample_id(row.key), captions, _digest(row.key, row.digest, repr(captions), recipe))


def _digest(*parts: str) -> str:
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
