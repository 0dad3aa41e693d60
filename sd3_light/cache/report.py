"""What the cache stage reports at the end: inputs used, rejected and dropped, and buckets below one global batch."""

from collections.abc import Sequence

from sd3_light.cache.options import CacheReport
from sd3_light.cache.reuse import ValueCounts
from sd3_light.config import DatasetConfig, TrainConfig, batch_size_for
from sd3_light.data.cache_plan import Unit
from sd3_light.data.manifest import DUPLICATES, DUPLICATES_FILE, REJECTS_FILE, UNMATCHED
from sd3_light.data.order import BucketOrder, Segment
from sd3_light.formats import plural
from sd3_light.runlog import info
from sd3_light.sources.catalogue import make_sources


def small_buckets(units: Sequence[Unit], dataset: DatasetConfig, train: TrainConfig, world: int) -> dict[str, int]:
    """Return the sample counts of buckets with fewer occurrences per epoch than one global batch."""
    repeats = {source.label: source.directory.num_repeats for source in make_sources(dataset.directories)}
    buckets: dict[tuple[tuple[int, int], str], list[Segment]] = {}
    for unit in units:
        segments = buckets.setdefault((unit.resolution, str(unit.bucket)), [])
        segments.append(Segment(unit.count, repeats[unit.label]))
    step = train.gradient_accumulation_steps * world
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
    rejected = {name.removeprefix("rejected: "): counts[name] for name in counts if name.startswith("rejected: ")}
    info(
        f"{title}: {counts['used']:,} samples of {counts['pictures']:,} images are in the cache "
        f"({counts['cropped']:,} cropped, {counts['enlarged']:,} enlarged)"
    )
    equal, similar = "have the same bytes as an earlier one", "are similar to an earlier one"
    for key, result in (
        ("keep", f'{equal}: `duplicates = "drop"` leaves them out'),
        ("drop", f"{equal}: they are left out"),
        ("similar", f"{similar}: they are left out; see {folder}/{DUPLICATES_FILE}, or `sd3-light inspect`"),
    ):
        if count := counts.get(DUPLICATES[key]):
            info(f"{title}: {count:,} images {result}")
    if counts.get(UNMATCHED):
        info(f"{title}: {counts[UNMATCHED]:,} samples do not match `where` and are left out")
    if rejected:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())
        info(f"{title}: {sum(rejected.values()):,} inputs were rejected: {reasons}; see {folder}/{REJECTS_FILE}")
    for bucket, count in report.small_buckets.items():
        result = "dropped" if policy == "drop" else "repeated to fill one"
        verb = "it is" if count == 1 else "they are"
        info(f"{title}: bucket {bucket} has {plural(count, 'sample')}, fewer than one global batch: {verb} {result}")
