"""What a data set becomes: its sources scanned, picture headers read, samples counted by bucket and by reject."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sd3_light.config import DatasetConfig, DirectoryConfig, Resolution
from sd3_light.data.buckets import Bucket, fits
from sd3_light.data.building.catalogue import InputRow, Source, make_sources, read_last_listing
from sd3_light.data.manifest import Manifest
from sd3_light.data.preprocess import Reject, probe
from sd3_light.data.sources import Rejected, caption_variants, scan
from sd3_light.data.store.remote import load_remote_manifest
from sd3_light.runlog import progress


@dataclass
class Cell:
    """The samples that one directory gives to one bucket."""

    samples: int = 0
    captions: int = 0
    masked: int = 0
    enlarged: int = 0
    cropped: float = 0.0

    def add(self, captions: int, masked: bool, enlarged: bool, cropped: float) -> None:
        """Count one sample."""
        self.samples += 1
        self.captions += captions
        self.masked += masked
        self.enlarged += enlarged
        self.cropped += cropped


@dataclass
class Counts:
    """A data set in numbers. A sample is in ``cells`` once for every resolution, in ``samples`` once."""

    samples: int = 0
    rejects: Counter[str] = field(default_factory=Counter)
    cells: dict[tuple[Resolution, Bucket], dict[int, Cell]] = field(default_factory=dict)

    def cell(self, resolution: Resolution, bucket: Bucket, directory: int) -> Cell:
        """The cell of a directory in a bucket."""
        return self.cells.setdefault((resolution, bucket), {}).setdefault(directory, Cell())


def count(dataset: DatasetConfig, seed: int) -> Counts:
    """What a data set holds: by its catalogue where that is of the sources as they are, else by a scan.

    A scan decodes no pixels: what only decoding shows (a broken body, an empty mask) is not seen. Of a cache at a URL
    the manifest tells, as its sources may be elsewhere.
    """
    if not isinstance(dataset.cache_dir, Path):
        return _of_manifest(load_remote_manifest(dataset.cache_dir), dataset)
    counts = Counts()
    with progress(f"scanning {dataset.path.name}", None, "pictures") as bar:
        for number, source in enumerate(make_sources(dataset.directories)):
            known = read_last_listing(dataset.cache_dir, source)
            for row in _scanned(source) if known is None else known:
                bar.advance()
                _add(counts, row, number, source.directory, seed)
    return counts


def _scanned(source: Source) -> Iterator[InputRow]:
    """The rows of a source that no catalogue has, their pictures' headers read."""
    for found in scan(source.directory, source.index):
        if isinstance(found, Rejected):
            yield InputRow(found.key, reason=found.reason)
            continue
        try:
            width, height = probe(found.read())
        except Reject as reject:
            yield InputRow(found.key, reason=reject.reason)
        else:
            mask = "" if found.mask is None else "a mask"
            yield InputRow(found.key, mask=mask, captions=found.captions, width=width, height=height)


def _add(counts: Counts, row: InputRow, number: int, directory: DirectoryConfig, seed: int) -> None:
    if row.reason:
        counts.rejects[row.reason] += 1
        return
    counts.samples += 1
    captions = len(caption_variants(row.captions, seed, row.key, directory))
    for resolution, bucket, fit in fits(row.width, row.height, directory):
        cell = counts.cell(resolution, bucket, number)
        cell.add(captions, bool(row.mask), fit.enlarged, fit.cropped_fraction)


def _of_manifest(manifest: Manifest, dataset: DatasetConfig) -> Counts:
    """One caption a sample; how many were cropped or enlarged is not told by bucket."""
    numbers = {source.label: number for number, source in enumerate(make_sources(dataset.directories))}
    counts = Counts(samples=manifest.counts.get("pictures", 0))
    for shard in manifest.shards:
        cell = counts.cell(shard.resolution, Bucket(*map(int, shard.bucket.split("x"))), numbers[shard.directory])
        cell.samples += shard.count
        cell.captions += shard.count
    for name, number in manifest.counts.items():
        if name.startswith("rejected: "):
            counts.rejects[name.removeprefix("rejected: ")] = number
    return counts
