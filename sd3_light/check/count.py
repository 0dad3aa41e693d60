"""Count the samples of a dataset by bucket and the rejects by reason, from image headers alone."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from sd3_light.config import DatasetConfig, DirectoryConfig, Resolution
from sd3_light.core.caption_lengths import CaptionSample
from sd3_light.core.columns import named_bucket
from sd3_light.data.manifest import Manifest
from sd3_light.data.shard_table import column, group_shards
from sd3_light.data.store.remote import load_remote_manifest
from sd3_light.runlog import progress
from sd3_light.sources.buckets import ENLARGED, Bucket, ExtremeFits, fits, misfit
from sd3_light.sources.captions import caption_variants
from sd3_light.sources.catalogue import InputRow, Source, make_sources, read_last_listing, to_probe
from sd3_light.sources.decode import SampleLocation, probe_images
from sd3_light.sources.earlier_images import EarlierImages, open_earlier_images
from sd3_light.sources.leaks import is_used
from sd3_light.sources.records import Rejected, Rejects
from sd3_light.sources.scan import scan
from sd3_light.sources.selection import matches_size

_DECODED = 5000  # images of a source that a scan compares with those of other sets; `cache` compares all


@dataclass
class BucketCount:
    """The samples of one directory in one bucket."""

    samples: int = 0
    captions: int = 0
    masked: int = 0
    enlarged: int = 0
    cropped: float = 0.0


@dataclass
class SampleCounts:
    """The counts of a dataset. A sample is in ``buckets`` once per resolution, in ``samples`` once."""

    samples: int = 0
    rejects: Rejects = field(default_factory=Rejects)
    captions: CaptionSample = field(default_factory=CaptionSample)
    extremes: ExtremeFits = field(default_factory=ExtremeFits)
    buckets: dict[tuple[Resolution, Bucket], dict[int, BucketCount]] = field(default_factory=dict)

    def bucket(self, resolution: Resolution, bucket: Bucket, directory: int) -> BucketCount:
        """Return the count of a directory in a bucket."""
        return self.buckets.setdefault((resolution, bucket), {}).setdefault(directory, BucketCount())


def count_samples(dataset: DatasetConfig, seed: int, on_used: Callable[[InputRow], None] | None = None) -> SampleCounts:
    """Count a dataset's samples from its listing if that is up to date, otherwise from a scan.

    ``on_used`` is called with the row of every sample. A scan decodes pixels only to find similar images, else it
    misses what only decoding shows (a broken body, an empty mask); in a dataset that is compared with others, those of
    the first images. A cache at a URL is counted from its manifest, because its sources may be elsewhere.
    """
    if not isinstance(dataset.cache_dir, Path):
        return _count_manifest(load_remote_manifest(dataset.cache_dir), dataset)
    counts = SampleCounts()
    with progress(f"scanning {dataset.path.name}", None, "images") as bar, open_earlier_images() as earlier:
        for number, source in enumerate(make_sources(dataset.directories, dataset.compared and on_used is not None)):
            listing = read_last_listing(dataset.cache_dir, source)
            for row in _scan_rows(source) if listing is None else listing:
                bar.advance()
                _add(counts, row, number, source.directory, seed, earlier)
                if on_used is not None and is_used(row, source.directory):
                    on_used(row)
    return counts


def _scan_rows(source: Source) -> Iterator[InputRow]:
    """Yield the rows of a source without a listing; reads the image headers."""
    for number, entry in enumerate(scan(source.directory, source.index)):
        if number == _DECODED:
            source = replace(source, compared=False)
        if isinstance(entry, Rejected):
            yield InputRow(entry.key, reason=entry.reason, detail=entry.detail)
            continue
        (result,) = probe_images([to_probe(SampleLocation(entry.image, entry.mask), source)])
        row = InputRow(entry.key, captions=entry.captions, attributes=entry.attributes)
        yield replace(row, mask="" if entry.mask is None else "a mask", **asdict(result))


def _add(
    counts: SampleCounts, row: InputRow, number: int, directory: DirectoryConfig, seed: int, earlier: EarlierImages
) -> None:
    if not row.reason and not matches_size(directory.where, row.attributes, row.width, row.height):
        return
    if reason := row.reason or misfit(row.width, row.height, directory, row.frames):
        counts.rejects.add(reason, row.key, row.detail)
        return
    if (duplicate := earlier.add(row, directory)) and duplicate.is_dropped:
        return
    counts.samples += 1
    variants = caption_variants(row.captions, seed, row.key, directory)
    captions = len(variants)
    counts.captions.add(row.key, variants)
    for resolution, bucket, fit in fits(row.width, row.height, directory, row.frames):
        counts.extremes.add(row.key, fit)
        count = counts.bucket(resolution, bucket, number)
        count.samples += 1
        count.captions += captions
        count.masked += bool(row.mask)
        count.enlarged += fit.scale > ENLARGED
        count.cropped += fit.cropped_fraction


def _count_manifest(manifest: Manifest, dataset: DatasetConfig) -> SampleCounts:
    """Count one caption per sample; a manifest does not list cropping and enlarging per bucket."""
    numbers = {source.label: number for number, source in enumerate(make_sources(dataset.directories))}
    counts = SampleCounts(manifest.counts.get("pictures", 0), Rejects(Counter(manifest.rejects)))  # no captions
    for group in group_shards(manifest.shards):
        bucket = named_bucket(group.bucket)
        labels, sizes = (column(group.shards, name).tolist() for name in ("directory", "count"))
        for label, samples in zip(labels, sizes, strict=True):
            count = counts.bucket(group.resolution, bucket, numbers[label])
            count.samples += samples
            count.captions += samples
    return counts
