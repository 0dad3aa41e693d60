"""What a data set becomes: its sources scanned, picture headers read, samples counted by bucket and by reject."""

from collections import Counter
from dataclasses import dataclass, field

from sd3_light.config import DatasetConfig, DirectoryConfig, Resolution
from sd3_light.data.buckets import Bucket, Size, fits
from sd3_light.data.preprocess import Reject, probe
from sd3_light.data.sources import Record, Rejected, caption_variants, occurrences, scan
from sd3_light.runlog import Bar, progress


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
    """Scan a data set. Pixels are not decoded: what only decoding shows (a broken body, an empty mask) is not seen."""
    counts = Counts()
    with progress(f"scanning {dataset.path.name}", None, "pictures") as bar:
        for number, index in enumerate(occurrences(dataset.directories)):
            _count_directory(counts, dataset.directories[number], number, index, seed, bar)
    return counts


def _count_directory(counts: Counts, directory: DirectoryConfig, number: int, index: int, seed: int, bar: Bar) -> None:
    for found in scan(directory, index):
        bar.advance()
        try:
            source = _source_size(found)
        except Reject as reject:
            counts.rejects[reject.reason] += 1
            continue
        assert isinstance(found, Record)
        counts.samples += 1
        captions = len(caption_variants(found.captions, seed, found.key, directory))
        for resolution, bucket, fit in fits(*source, directory):
            cell = counts.cell(resolution, bucket, number)
            cell.add(captions, found.mask is not None, fit.enlarged, fit.cropped_fraction)


def _source_size(found: Record | Rejected) -> Size:
    """Width and height of a picture; raises Reject for what cannot be used."""
    if isinstance(found, Rejected):
        raise Reject(found.reason, found.detail)
    return probe(found.read())
