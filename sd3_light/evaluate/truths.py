"""The true images that a model is measured against."""

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sd3_light.config import load_dataset
from sd3_light.data.decoded import DecodedSample, decode_dataset
from sd3_light.sources.preprocess import Pixels


@dataclass(frozen=True)
class Truth:
    """A true image [H, W, 3], one of its captions, the file that contains it, and its group (see `nearest`).

    ``references`` are the files of the images that a model sees beside the caption.
    """

    caption: str
    pixels: Pixels
    path: Path
    group: str
    references: tuple[Path, ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.pixels.shape[1], self.pixels.shape[0]


def load_truths(toml: Path, count: int) -> list[Truth]:
    """Return the ``count`` images of a dataset TOML with the lowest sample ids, each once at its largest size.

    An image with several captions has one of them; which one alternates, so that all languages occur.
    """
    dataset = load_dataset(toml)
    sizes = max(len(directory.resolutions or (0,)) for directory in dataset.directories)
    with TemporaryDirectory(prefix="sd3-light-") as folder:
        decoded = decode_dataset(dataset, Path(folder), sizes * count, min(16, (os.cpu_count() or 2) - 1))
    largest: dict[int, DecodedSample] = {}
    for sample in sorted(decoded, key=lambda sample: sample.pixels.size):
        largest[sample.member.identity] = sample
    samples = [largest[identity] for identity in sorted(largest)][:count]
    return [_truth(row, sample) for row, sample in enumerate(samples)]


def _truth(row: int, sample: DecodedSample) -> Truth:
    captions = sample.member.captions
    return Truth(captions[row % len(captions)], sample.pixels, sample.path, sample.group, sample.references)
