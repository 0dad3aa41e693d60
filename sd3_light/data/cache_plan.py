"""The cache plan: which samples go into which shard, as a pure function of the catalogue.

A shard has samples of one source, one resolution and one bucket. Its file name contains the fingerprint of everything
that determines it, so a shard whose file exists is done, no matter which process built it, and a change renames only
the shards that it affects. Sample hashes decide where shards end, so an added file changes its own shard and rarely the
next.

A plan is stored on disk: `plan-DIGEST.arrow` has one row per shard with the positions of its samples in the catalogue,
read when the shard is built; `plan-DIGEST.jsonl` lists the duplicates; `plan-DIGEST.json` has the counts and
is written last.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sd3_light.config import DirectoryConfig
from sd3_light.config.base import DataLocation
from sd3_light.core.columns import IMAGE, MASK, MASK_FACTOR, REJECTED, reference_entry
from sd3_light.data.manifest import DUPLICATES, ShardEntry
from sd3_light.files import atomic_file, write_atomically
from sd3_light.inputs import read_json_file, require_regular
from sd3_light.randomness import sample_id
from sd3_light.sources.buckets import Bucket, fits, limits_sizes, misfit
from sd3_light.sources.captions import caption_variants
from sd3_light.sources.catalogue import (
    PART_ROWS,
    Catalogue,
    InputRow,
    Listing,
    Source,
    is_end,
    sample_location,
    size_text,
)
from sd3_light.sources.claims import Claims
from sd3_light.sources.decode import DecodeTask, Probe
from sd3_light.sources.earlier_images import EarlierImages, open_earlier_images
from sd3_light.sources.preprocess import PREPROCESS_VERSION
from sd3_light.sources.selection import matches_size

PLAN_VERSION = 4
_SHARDS_PER_BATCH = 64
_MAX_PLANS = 8
_DUPLICATES = ".jsonl"
_TAGS_SEED = 0  # the cached caption shuffles serve every training seed
IGNORED_SETTINGS = {
    *("path", "mask_path", "default_mask_file", "rejected", "references"),
    *("exclude", "num_repeats", "caption_weights", "validation"),
}
"""Keys of a directory that a plan does not depend on, besides what the rows of its catalogue contain."""


class Text(NamedTuple):
    """A caption and, if columns of captions read images too, the fingerprints of those of its sample."""

    caption: str
    images: str = ""

    @property
    def fingerprint(self) -> str:
        """A hash of both."""
        return digest_of("caption", self.caption, *([self.images] if self.images else []))


@dataclass(frozen=True)
class Member:
    """One sample of a shard."""

    row: InputRow
    identity: int
    captions: tuple[str, ...]
    bucket: Bucket
    flip: bool

    @property
    def fingerprint(self) -> str:
        """A hash of the sample's contents, at any size."""
        return sample_fingerprint(self.row, self.captions)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of everything that decides the pixels of each entry that the sample has: image, mask and so on.

        Equal images of other samples have the same.
        """
        row = self.row
        bucket = str(self.bucket)
        version = str(PREPROCESS_VERSION)
        size = f"{row.width}x{row.height}"  # of the image, which the mask is cropped with
        contents = {
            IMAGE: (row.digest, bucket, str(self.flip), version),
            MASK: (row.mask_digest, bucket, size, version),
            REJECTED: (row.rejected_digest, bucket, str(self.flip), version),
        }
        for number, digest in enumerate(row.reference_digests):
            contents[reference_entry(number)] = digest, bucket, str(self.flip), version
        return {entry: digest_of(entry, *content) for entry, content in contents.items() if content[0]}

    @property
    def pixels_fingerprint(self) -> str:
        """A hash of all of them: what decides whether the sample is rejected when it is decoded."""
        return digest_of(*self.fingerprints.values())


@dataclass(frozen=True)
class PlannedShard:
    """A shard to build, and what it is made of."""

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
        """The manifest entry; count, size and hash are filled in when the shard is written."""
        return ShardEntry(self.file, str(self.bucket), self.resolution, self.label, 0, 0, "", self.fingerprint)


@dataclass
class PlanCounts:
    """Counts of inputs, made while planning."""

    images: int = 0
    cropped: int = 0
    enlarged: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    unmatched: int = 0
    excluded: int = 0
    duplicates: Counter[str] = field(default_factory=Counter)


class CachePlan:
    """All shards of a dataset. The samples of a shard are read from the catalogue on request."""

    def __init__(self, path: Path, catalogue: Catalogue, listings: Sequence[Listing]) -> None:
        self.path = path
        self._catalogue = catalogue
        self._sources = {listing.source.label: listing.source for listing in listings}
        self._parts = [part for listing in listings for part in listing.parts]
        self._directories = [listing.source.directory for listing in listings for _ in listing.parts]
        counts = read_json_file(path.with_suffix(".json"))
        self.counts = PlanCounts(counts["pictures"], counts["cropped"], counts["enlarged"], Counter(counts["rejected"]))
        self.counts.unmatched = counts.get("unmatched", 0) + sum(listing.unmatched for listing in listings)
        self.counts.excluded = sum(listing.excluded for listing in listings)
        self.counts.duplicates = Counter(counts["duplicates"])
        self.duplicates_file = path.with_suffix(_DUPLICATES)
        os.utime(self.duplicates_file)
        require_regular(path)
        self._file = pa.ipc.open_file(pa.memory_map(str(path)))
        self.shards = list(self._read_shards())

    def _read_shards(self) -> Iterator[PlannedShard]:
        self._starts = [0]
        for number in range(self._file.num_record_batches):
            batch = self._file.get_batch(number)
            rows = batch.select(["file", "label", "size", "resolution", "flip", "fingerprint", "count"]).to_pylist()
            for index, row in enumerate(rows):
                bucket = Bucket(*row.pop("size"))
                resolution = tuple(row.pop("resolution"))
                yield PlannedShard(number=self._starts[-1] + index, bucket=bucket, resolution=resolution, **row)
            self._starts.append(self._starts[-1] + len(rows))

    def source(self, shard: PlannedShard) -> Source:
        """Return the source of a shard's samples."""
        return self._sources[shard.label]

    def ids(self, shard: PlannedShard) -> NDArray[np.int64]:
        """Return the ids of a shard's samples."""
        return self._column(shard, "ids")

    def members(self, shard: PlannedShard) -> list[Member]:
        """Return the samples of a shard, in order."""
        positions = self._column(shard, "places")
        directory = self.source(shard).directory
        members: list[Member] = []
        for part in dict.fromkeys((positions // PART_ROWS).tolist()):
            numbers = (positions[positions // PART_ROWS == part] % PART_ROWS).tolist()
            rows = self._catalogue.rows(self._parts[part], numbers)
            captions = (cached_captions(row, directory) for row in rows)
            members += [
                Member(row, sample_id(row.key), texts, shard.bucket, shard.flip)
                for row, texts in zip(rows, captions, strict=True)
            ]
        return members

    def rejected(self) -> Iterator[InputRow]:
        """Yield every rejected input, part by part; images whose size the directory's limits exclude last."""
        for part, directory in zip(self._parts, self._directories, strict=True):
            yield from self._catalogue.rejected(part)
            for row in self._catalogue.rows(part) if limits_sizes(directory) else ():
                if row.reason or not matches_size(directory.where, row.attributes, row.width, row.height):
                    continue
                if reason := misfit(row.width, row.height, directory, row.frames):
                    yield replace(row, reason=reason, detail=size_text(row))

    def _column(self, shard: PlannedShard, name: str) -> NDArray[np.int64]:
        batch = int(np.searchsorted(self._starts, shard.number, side="right")) - 1
        column = self._file.get_batch(batch).column(name)
        values: NDArray[np.int64] = column[shard.number - self._starts[batch]].values.to_numpy()
        return values


def make_cache_plan(
    catalogue: Catalogue,
    listings: Sequence[Listing],
    decided_by: Mapping[str, Any],
    shard_size: int,
    show_progress: "ShowProgress | None" = None,
) -> CachePlan:
    """Return the plan of the catalogue's contents. A new plan is written by one process while the others wait.

    ``decided_by`` is everything besides the samples that decides the bytes of a shard. ``show_progress``
    (`runlog.progress`) shows a bar while similar images are looked for.
    """
    contents = digest_of(repr(sorted(decided_by.items())))
    settings = [
        (*listing.parts, listing.source.directory.model_dump_json(exclude=IGNORED_SETTINGS)) for listing in listings
    ]
    name = f"plan-{digest_of(contents, repr(settings), str(shard_size), str(PLAN_VERSION))}"
    path = catalogue.folder / f"{name}.arrow"

    def write(_: str) -> None:
        _Planner(catalogue, contents, shard_size, show_progress).write(path, listings)
        _prune_plans(catalogue.folder)

    catalogue.claims.divide([name], lambda _: _is_planned(path, catalogue.claims), write)
    try:
        os.utime(path)
        return CachePlan(path, catalogue, listings)
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError):
        # damaged: the plan follows from the catalogue, so rebuild it, once
        _Planner(catalogue, contents, shard_size).write(path, listings)
        return CachePlan(path, catalogue, listings)


def _is_planned(path: Path, claims: Claims) -> bool:
    """Return whether a valid plan exists; with unreadable inputs, whether it was written during this run."""
    counts = path.with_suffix(".json")
    try:
        rejected = read_json_file(counts)["rejected"]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return False
    return "unreadable" not in rejected or claims.is_newer(counts, path.stem)


def _prune_plans(folder: Path) -> None:
    """Remove all but the most recently used plans."""
    for path in sorted(folder.glob("plan-*.arrow"), key=_last_use)[:-_MAX_PLANS]:
        for suffix in (".json", _DUPLICATES, ".arrow"):
            path.with_suffix(suffix).unlink(missing_ok=True)
        for index in reuse_files(path):
            index.unlink(missing_ok=True)


def reuse_files(plan: Path) -> list[Path]:
    """Return the files that say what the shards of a plan copy from those of an old manifest (`cache.reuse`)."""
    return sorted(plan.parent.glob(f"{reuse_name(plan, '*')}.*"))


def reuse_name(plan: Path, manifest: str) -> str:
    """Return the name of these files for the plan at a path and a hash of the old manifest."""
    return f"reuse-{plan.stem.removeprefix('plan-')}-{manifest}"


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # pruned by another process
        return 0.0


_PLAN_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("file", "label", "fingerprint")),
        ("size", pa.list_(pa.int32(), 3)),
        ("resolution", pa.list_(pa.int32(), 2)),
        ("flip", pa.bool_()),
        ("count", pa.int32()),
        ("places", pa.list_(pa.int64())),
        ("ids", pa.list_(pa.int64())),
    ]
)

ShowProgress = Callable[[str, int | None, str], AbstractContextManager[Any]]
"""Shows a bar with a title, a total and a unit; `advance` of what it yields counts."""
_ShardKey = tuple[tuple[int, int], Bucket]
"""(resolution, bucket) of a shard."""
_Placed = tuple[int, int, str]
"""Position in the catalogue, id and fingerprint of a sample."""


class _Planner:
    """Assigns samples to shards in catalogue order; holds one open shard per bucket and a few finished ones."""

    def __init__(
        self, catalogue: Catalogue, contents: str, shard_size: int, show_progress: "ShowProgress | None" = None
    ) -> None:
        self._catalogue = catalogue
        self._contents = contents
        self._shard_size = shard_size
        self._show_progress = show_progress
        self._counts = PlanCounts()
        self._duplicates: TextIO
        self._advance: Callable[[], None]

    def write(self, path: Path, listings: Sequence[Listing]) -> None:
        """Write the plan, counts last."""
        with (
            open_earlier_images() as earlier,
            _comparison_bar(listings, self._show_progress) as self._advance,
            atomic_file(path.with_suffix(_DUPLICATES)) as list_path,
            open(list_path, "w", encoding="utf-8") as self._duplicates,
            atomic_file(path) as temporary,
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_file(sink, _PLAN_SCHEMA) as writer,
        ):
            rows = self._shards(listings, earlier)
            while batch := list(islice(rows, _SHARDS_PER_BATCH)):
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=_PLAN_SCHEMA))
        counts = {
            "pictures": self._counts.images,
            "cropped": self._counts.cropped,
            "enlarged": self._counts.enlarged,
            "rejected": dict(self._counts.rejected),
            "unmatched": self._counts.unmatched,
            "duplicates": dict(self._counts.duplicates),
        }
        write_atomically(path.with_suffix(".json"), json.dumps(counts).encode())

    def _shards(self, listings: Sequence[Listing], earlier: EarlierImages) -> Iterator[dict[str, Any]]:
        part_number = 0
        for listing in listings:
            open_shards: defaultdict[_ShardKey, list[_Placed]] = defaultdict(list)
            for part in listing.parts:
                rows = self._catalogue.rows(part)
                yield from self._assign(listing.source, part_number * PART_ROWS, rows, open_shards, earlier)
                part_number += 1
            for key, shard in open_shards.items():
                if shard:
                    yield _finish_shard(listing.source, key, shard, self._contents)

    def _assign(
        self,
        source: Source,
        first: int,
        rows: Sequence[InputRow],
        open_shards: defaultdict[_ShardKey, list[_Placed]],
        earlier: EarlierImages,
    ) -> Iterator[dict[str, Any]]:
        for position, row in enumerate(rows, start=first):
            self._advance()
            if row.reason:
                self._counts.rejected[row.reason] += 1
                continue
            if not matches_size(source.directory.where, row.attributes, row.width, row.height):
                self._counts.unmatched += 1
                continue
            if reason := misfit(row.width, row.height, source.directory, row.frames):
                self._counts.rejected[reason] += 1
                continue
            if self._is_dropped(row, source.directory, earlier):
                continue
            self._counts.images += 1
            identity = sample_id(row.key)
            fingerprint = sample_fingerprint(row, cached_captions(row, source.directory))
            for resolution, bucket, resize in fits(row.width, row.height, source.directory, row.frames):
                self._counts.cropped += resize.cropped_fraction > 0
                self._counts.enlarged += resize.enlarged
                shard = open_shards[resolution, bucket]
                shard.append((position, identity, fingerprint))
                if is_end(len(shard), identity, max(1, self._shard_size // bucket.frames)):
                    yield _finish_shard(source, (resolution, bucket), shard, self._contents)
                    open_shards[resolution, bucket] = []

    def _is_dropped(self, row: InputRow, directory: DirectoryConfig, earlier: EarlierImages) -> bool:
        """Return whether an image is left out because of an earlier one. A duplicate is counted and listed."""
        duplicate = earlier.add(row, directory)
        if duplicate is None:
            return False
        self._counts.duplicates[duplicate.kind] += 1
        names = {"first": duplicate.first, "first_image": duplicate.first_image}
        line = {"key": row.key, "image": row.image, "kind": DUPLICATES[duplicate.kind], **names}
        self._duplicates.write(json.dumps(line, ensure_ascii=False) + "\n")
        return duplicate.is_dropped


@contextmanager
def _comparison_bar(listings: Sequence[Listing], show: "ShowProgress | None") -> Iterator[Callable[[], None]]:
    """Yield a function to call per row: it advances a bar if similar images are to be found, which takes time."""
    if show is None or not any(listing.source.drops_similar for listing in listings):
        yield lambda: None
        return
    with show("comparing images", sum(listing.rows for listing in listings), "images") as bar:
        yield bar.advance


def _finish_shard(source: Source, key: _ShardKey, shard: Sequence[_Placed], contents: str) -> dict[str, Any]:
    resolution, bucket = key
    flip = source.directory.flip
    positions, ids, fingerprints = zip(*shard, strict=True)
    fingerprint = digest_of(*fingerprints, str(bucket), str(flip), contents)
    return {
        "file": f"{source.name}-r{resolution[0]}x{resolution[1]}-{bucket}-{fingerprint[:20]}.safetensors",
        "label": source.label,
        "fingerprint": fingerprint,
        "size": [bucket.width, bucket.height, bucket.frames],
        "resolution": list(resolution),
        "flip": flip,
        "count": len(shard),
        "places": positions,
        "ids": ids,
    }


def cached_captions(row: InputRow, directory: DirectoryConfig) -> tuple[str, ...]:
    """Return the captions of a row as they are encoded."""
    return caption_variants(row.captions, _TAGS_SEED, row.key, directory)


def sample_fingerprint(row: InputRow, captions: tuple[str, ...]) -> str:
    """Return a hash of a sample's key, images, mask and captions, and of how its images are read."""
    digests = (row.digest, row.mask_digest, row.rejected_digest, *row.reference_digests)
    return digest_of(row.key, *digests, repr(captions), str(PREPROCESS_VERSION))


def texts_of(member: Member, beside: Sequence[str]) -> list[Text]:
    """Return the captions of a sample, each with the images that columns of captions read beside it."""
    fingerprints = member.fingerprints if beside else {}
    images = "".join(fingerprints[entry] for entry in beside)
    return [Text(caption, images) for caption in member.captions]


def decode_task(
    member: Member,
    root: DataLocation,
    copied: tuple[str, ...] = (),
    mask_factor: int = MASK_FACTOR,
    seen_at: Bucket | None = None,
) -> DecodeTask:
    """Return the task of decoding a sample without entries that are ``copied``; ``root`` is its source's folder.

    ``seen_at`` is the size of references, None: that of the image.
    """
    row = member.row
    names = ("width", "height", "digest", "mask_digest", "rejected_digest", "frames", "fps", "reference_digests")
    probe = Probe(**{name: getattr(row, name) for name in names})
    return DecodeTask(sample_location(row, root), probe, member.bucket, copied, mask_factor, seen_at)


def digest_of(*parts: str) -> str:
    """Return a hash of texts, in which the end of one and the beginning of the next cannot be exchanged."""
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
