"""Training images as answers to captions: what a model must beat.

Two are chosen by captions alone: the training image with the most similar caption, among all and among those of the
same group. The third, an oracle, is chosen with the true image. The group of an image is the name of the folder that
its file is in.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from sd3_light.config import DatasetConfig, load_dataset
from sd3_light.data.decoded import DecodedSample, each_image
from sd3_light.evaluate.truths import Truth
from sd3_light.sources.buckets import Bucket, resize_for
from sd3_light.sources.preprocess import Pixels, fit

BY_CAPTION = "training image, nearest caption"
BY_CAPTION_IN_GROUP = "training image, nearest caption, same folder"
ORACLE = "oracle: training image nearest to the true one"

_BATCH = 64
_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")

Embed = Callable[[Sequence[Pixels]], Tensor]


class CaptionIndex:
    """Finds the caption with the most similar words: the cosine of vectors with a weight of log(N / n) for each word,
    where n of N captions have it. Characters of Chinese and Japanese are words. The first of equal ones is returned."""

    def __init__(self, captions: Sequence[str]) -> None:
        rows: defaultdict[str, list[int]] = defaultdict(list)
        for row, caption in enumerate(captions):
            for word in words(caption):
                rows[word].append(row)
        self._rows = {word: np.array(places) for word, places in rows.items()}
        self._weights = {word: np.log(len(captions) / len(places)) ** 2 for word, places in rows.items()}
        squares = np.full(len(captions), 1e-12)
        for word, places in self._rows.items():
            squares[places] += self._weights[word]
        self._norms = np.sqrt(squares)

    def nearest(self, caption: str, allowed: NDArray[np.bool_] | None = None) -> int:
        """Return the row of the most similar caption, among the ``allowed`` ones."""
        scores = np.zeros(len(self._norms))
        for word in words(caption):
            if word in self._rows:
                scores[self._rows[word]] += self._weights[word]
        scores /= self._norms
        if allowed is not None:
            scores[~allowed] = -1
        return int(scores.argmax())


def words(caption: str) -> set[str]:
    """Return the different words of a caption in lower case."""
    return set(_WORD.findall(caption.lower()))


@dataclass
class _Listed:
    """The training images in the order of their sample ids: group and captions of each."""

    groups: dict[int, str] = field(default_factory=dict)
    captions: dict[int, tuple[str, ...]] = field(default_factory=dict)


def training_answers(
    training: Path, truths: Sequence[Truth], features: Tensor, embed: Embed
) -> dict[str, dict[int, Pixels]]:
    """Return the training images that answer the captions of the truths, by name of the baseline and row of the truth.

    ``features`` are those of the truths. Images are decoded as a stream; only the chosen ones stay in memory.
    """
    dataset = load_dataset(training)
    workers = min(16, (os.cpu_count() or 2) - 1)
    with TemporaryDirectory(prefix="sd3-light-") as folder:
        listed = _Listed()
        oracle = _nearest_features(_noted(each_image(dataset, Path(folder), workers), listed), features, embed)
        chosen = {**_by_captions(truths, listed), ORACLE: dict(enumerate(oracle))}
        pixels = _pixels(dataset, Path(folder), workers, chosen)
    return {
        name: {row: _fitted(pixels[identity], truths[row].size) for row, identity in rows.items()}
        for name, rows in chosen.items()
        if rows
    }


def _noted(samples: Iterator[DecodedSample], listed: _Listed) -> Iterator[DecodedSample]:
    for sample in samples:
        listed.groups[sample.member.identity] = sample.group
        listed.captions[sample.member.identity] = sample.member.captions
        yield sample


def _nearest_features(samples: Iterator[DecodedSample], features: Tensor, embed: Embed) -> list[int]:
    """Return for each truth the sample id with the most similar features, the lowest of equal ones."""
    best = torch.full((len(features),), -2.0, dtype=features.dtype)
    identities = torch.zeros(len(features), dtype=torch.int64)
    while batch := list(islice(samples, _BATCH)):
        ids = torch.tensor([sample.member.identity for sample in batch])
        cosines, columns = (features @ embed([sample.pixels for sample in batch]).T).max(1)
        is_better = (cosines > best) | ((cosines == best) & (ids[columns] < identities))
        best = torch.where(is_better, cosines, best)
        identities = torch.where(is_better, ids[columns], identities)
    return [int(identity) for identity in identities]


def _by_captions(truths: Sequence[Truth], listed: _Listed) -> dict[str, dict[int, int]]:
    """Return the sample ids with the nearest captions by baseline and row; only captions and groups are read."""
    owners = [identity for identity in sorted(listed.captions) for _ in listed.captions[identity]]
    index = CaptionIndex([caption for identity in sorted(listed.captions) for caption in listed.captions[identity]])
    groups = np.array([listed.groups[identity] for identity in owners])
    answers: dict[str, dict[int, int]] = {BY_CAPTION: {}, BY_CAPTION_IN_GROUP: {}}
    has_groups = len(set(listed.groups.values())) > 1
    for row, truth in enumerate(truths):
        answers[BY_CAPTION][row] = owners[index.nearest(truth.caption)]
        allowed = groups == truth.group
        if has_groups and allowed.any():
            answers[BY_CAPTION_IN_GROUP][row] = owners[index.nearest(truth.caption, allowed)]
    return answers


def _pixels(
    dataset: DatasetConfig, folder: Path, workers: int, chosen: Mapping[str, Mapping[int, int]]
) -> dict[int, Pixels]:
    """Return the chosen images at their largest size by sample id."""
    identities = {identity for rows in chosen.values() for identity in rows.values()}
    pixels: dict[int, Pixels] = {}
    for sample in each_image(dataset, folder, workers, identities):
        known = pixels.get(sample.member.identity)
        if known is None or known.size < sample.pixels.size:
            pixels[sample.member.identity] = sample.pixels
    return pixels


def _fitted(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    image = Image.fromarray(pixels)
    return fit(image, resize_for(*image.size, Bucket(*size)))
