"""Options of the cache stage, its results, and what it reports at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sd3_light.cache.reuse import ValueCounts
from sd3_light.config import DatasetConfig, TrainConfig, batch_size_for
from sd3_light.data.cache_plan import PlannedShard
from sd3_light.data.manifest import DUPLICATES, DUPLICATES_FILE, EXCLUDED, REJECTED, REJECTS_FILE, UNMATCHED
from sd3_light.data.order import BucketOrder, Segment
from sd3_light.data.shard_table import ShardEntry
from sd3_light.formats import plural
from sd3_light.runlog import info
from sd3_light.sources.catalogue import make_sources

Review = Callable[[Sequence[ShardEntry], bool], None]
"""Gets the shards of a cache as they will be, and whether their counts are known; images of new shards may be rejected
when they are decoded."""


@dataclass(frozen=True)
class CacheOptions:
    """Options of the cache stage beyond the config.

    ``trust``: use a cache that has a manifest without checking it against the sources. ``regenerate``: encode
    everything again. ``verify``: hash every shard and encode damaged ones again. ``prune``: delete unused files.
    ``dry_run``: report the state of the cache and write only the catalogue. ``at_url``: build caches at URLs too, which
    are otherwise used as they are. ``part``: (I, N) builds only every N-th shard from the I-th, and no manifest.
    ``finish``: encode no image; write the manifest of the parts. ``ray``: encode on the Ray cluster at this address
    ("": as Ray chooses), with ``ray_actors`` encoders (None: one per GPU or CPU of the cluster). ``review`` gets the
    training set's shards before anything is encoded, and may refuse them.
    """

    trust: bool = False
    regenerate: bool = False
    verify: bool = False
    prune: bool = False
    dry_run: bool = False
    at_url: bool = False
    part: tuple[int, int] | None = None
    finish: bool = False
    ray: str | None = None
    ray_actors: int | None = None
    review: Review | None = None


@dataclass(frozen=True)
class CacheReport:
    """Results for one dataset. ``encoded`` counts the samples of shards that this process built, ``values`` what it
    encoded and copied for them, ``reused`` the samples of other shards, ``small_buckets`` those of buckets below one
    global batch, ``missing`` the shards that a dry run left to build."""

    folder: Path
    counts: dict[str, int] = field(default_factory=dict)
    encoded: int = 0
    reused: int = 0
    small_buckets: dict[str, int] = field(default_factory=dict)
    values: ValueCounts = field(default_factory=ValueCounts)
    missing: int = 0


def small_buckets(
    planned: Sequence[PlannedShard], dataset: DatasetConfig, train: TrainConfig, world_size: int
) -> dict[str, int]:
    """Return the sample counts of buckets with fewer occurrences per epoch than one global batch."""
    repeats = {source.label: source.directory.num_repeats for source in make_sources(dataset.directories)}
    buckets: dict[tuple[tuple[int, int], str], list[Segment]] = {}
    for shard in planned:
        segments = buckets.setdefault((shard.resolution, str(shard.bucket)), [])
        segments.append(Segment(shard.count, repeats[shard.label]))
    step = train.gradient_accumulation_steps * world_size
    small = {}
    for (size, bucket), segments in buckets.items():
        batch = batch_size_for(train.micro_batch_size_per_gpu, size) * step
        if BucketOrder(tuple(segments), batch).length < batch:
            small[f"{bucket} of {size[0]}x{size[1]}"] = sum(segment.size for segment in segments)
    return small


def describe_values(values: ValueCounts) -> str:
    """Return what was encoded and copied, as text."""
    text = f"{plural(values.images, 'image')} and {plural(values.captions, 'caption')} encoded"
    if values.copied_images or values.copied_captions:
        copied = f"{plural(values.copied_images, 'image')} and {plural(values.copied_captions, 'caption')}"
        text += f", {copied} copied from old shards"
    return text


def log_report(title: str, report: CacheReport, policy: str, folder: str) -> None:
    """Log how many inputs were used, rejected and dropped."""
    counts = report.counts
    rejected = {name.removeprefix(REJECTED): counts[name] for name in counts if name.startswith(REJECTED)}
    info(
        f"{title}: {counts['used']:,} samples of {counts['pictures']:,} images are in the cache "
        f"({counts['cropped']:,} cropped, {counts['enlarged']:,} enlarged)"
    )
    equal = "have the same bytes as an earlier one"
    similar = "are similar to an earlier one"
    for key, result in (
        ("keep", f'{equal}: `duplicates = "drop"` leaves them out'),
        ("drop", f"{equal}: they are left out"),
        ("similar", f"{similar}: they are left out; see {folder}/{DUPLICATES_FILE}, or `sd3-light inspect`"),
    ):
        if count := counts.get(DUPLICATES[key]):
            info(f"{title}: {count:,} images {result}")
    if counts.get(UNMATCHED):
        info(f"{title}: {counts[UNMATCHED]:,} samples do not match `where` and are left out")
    if excluded := counts.get(EXCLUDED):
        verb = "is" if excluded == 1 else "are"
        info(f"{title}: {plural(excluded, 'sample')} {verb} listed in `exclude` and left out")
    if rejected:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())
        total = sum(rejected.values())
        were = "was" if total == 1 else "were"
        info(f"{title}: {plural(total, 'input')} {were} rejected: {reasons}; see {folder}/{REJECTS_FILE}")
    for bucket, count in report.small_buckets.items():
        result = "dropped" if policy == "drop" else "repeated to fill one"
        verb = "it is" if count == 1 else "they are"
        info(f"{title}: bucket {bucket} has {plural(count, 'sample')}, fewer than one global batch: {verb} {result}")
