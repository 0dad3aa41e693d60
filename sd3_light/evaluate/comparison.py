"""Compares sets of images with the true images of the same captions, by the features of a judge or a vision model.

Every set is measured in the same way. The samples are split at random into halves A and B; distribution metrics compare
the true images of A with a set's images of B. With the true images as the set this shows how far two halves of the
truth are apart: a perfect model reaches the same values. Values are means over the splits, intervals the central 95% of
them; those of means over images (retrieval, distance) are bootstrapped over the images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd3_light.config.faults import UserError
from sd3_light.evaluate.distances import (
    METRICS,
    NEIGHBOURS,
    cosine_distances,
    finds_own_caption,
    frechet_distance,
    kernel_distance,
    precision_recall,
)
from sd3_light.evaluate.judge import Judge
from sd3_light.randomness import stream
from sd3_light.sources.preprocess import Pixels

_OF_SETS = METRICS[:4]
GROUP = 100
"""Captions among which an image finds its own."""
MIN_IMAGES = 2 * (NEIGHBOURS + 1)
_SPLITS, _MAX_HALF, _RESAMPLES = 20, 2500, 1000
_BATCH = 64


@dataclass(frozen=True)
class Estimate:
    """A value and its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def texts(self) -> tuple[str, str]:
        """The value and the interval as text."""
        return f"{self.value:.3g}", f"[{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Scores:
    """The metrics of a set of images by name, None where one does not apply; ``hits`` (whether it finds its caption)
    and ``distances`` (to the true image) of each image."""

    count: int
    estimates: dict[str, Estimate | None]
    hits: Tensor | None = None
    distances: Tensor | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return counts and estimates for JSON."""
        values = {name: None if value is None else vars(value) for name, value in self.estimates.items()}
        return {"images": self.count, **values}


def image_features(judge: Judge, images: Sequence[Pixels]) -> Tensor:
    """Return the features of images of any sizes, vectors of length 1, in float64 on the CPU."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, pixels in enumerate(images):
        groups.setdefault(pixels.shape, []).append(index)
    rows: dict[int, Tensor] = {}
    for indices in groups.values():
        for start in range(0, len(indices), _BATCH):
            batch = indices[start : start + _BATCH]
            features = judge.image_features(np.stack([images[index] for index in batch]))
            rows.update(zip(batch, features.double().cpu(), strict=True))
    return _finite(torch.stack([rows[index] for index in range(len(images))]))


def text_features(judge: Judge, captions: Sequence[str]) -> Tensor:
    """Return the features of captions, as `image_features` does."""
    batches = [judge.text_features(captions[start : start + _BATCH]) for start in range(0, len(captions), _BATCH)]
    return _finite(torch.cat(batches).double().cpu())


def _finite(features: Tensor) -> Tensor:
    if not bool(features.isfinite().all()):
        raise UserError("the features are NaN or infinite; check the folder of --features")
    return features


class Comparison:
    """The true images, one per caption, with which sets of images of the same captions are compared.

    ``texts`` are the features of the captions, None if the judge reads no text: then there is no retrieval.
    """

    def __init__(self, truths: Tensor, texts: Tensor | None, captions: Sequence[str], seed: int = 0) -> None:
        if len(captions) < MIN_IMAGES:
            raise UserError(f"{len(captions)} images are too few to compare; give at least {MIN_IMAGES}")
        self.truths, self.texts, self.captions, self.seed = truths, texts, captions, seed

    @property
    def among(self) -> int:
        """The number of captions among which an image finds its own."""
        return min(GROUP, len(self.captions))

    def of_truths(self) -> Scores:
        """Return the scores of the true images: the best that a model can expect."""
        scores = self.of_images(self.truths)
        return replace(scores, estimates={**scores.estimates, "distance": None}, distances=None)

    def of_shuffled_truths(self) -> Scores:
        """Return the scores of true images of other captions: those of a model that ignores captions."""
        shuffled = self.truths.roll(len(self.truths) // 2, 0)
        hits, distances = self._hits(shuffled), cosine_distances(shuffled, self.truths)
        return Scores(len(shuffled), {**dict.fromkeys(_OF_SETS), **self._of_pairs(hits, distances)}, hits, distances)

    def of_images(self, features: Tensor, rows: Sequence[int] | None = None) -> Scores:
        """Return the scores of one image per caption, or of images for the captions of these rows."""
        index = torch.arange(len(self.truths)) if rows is None else torch.tensor(rows)
        whole = self.truths.index_copy(0, index, features)
        hits, distances = self._hits(whole), cosine_distances(features, self.truths[index])
        hits = None if hits is None else hits[index]
        estimates = {**self._of_sets(whole, index), **self._of_pairs(hits, distances)}
        return Scores(len(index), estimates, hits, distances)

    def _hits(self, features: Tensor) -> Tensor | None:
        return None if self.texts is None else finds_own_caption(features, self.texts, self.captions, GROUP)

    def _of_pairs(self, hits: Tensor | None, distances: Tensor) -> dict[str, Estimate | None]:
        return {"retrieval": None if hits is None else self._mean(hits), "distance": self._mean(distances)}

    def _of_sets(self, features: Tensor, rows: Tensor) -> dict[str, Estimate | None]:
        """Return the metrics between the true images of one half and the images of the other; only ``rows`` exist."""
        scale = features.shape[1] ** 0.5  # so that the kernel of KID is (cosine + 1)^3, whatever the width
        values: list[tuple[float, ...]] = []
        for number in range(_SPLITS):
            order = stream(self.seed, "metrics-split", 0, 0, number).permutation(len(features))
            half = min(len(order) // 2, _MAX_HALF)
            second = np.intersect1d(order[half : 2 * half], rows.numpy())
            if len(second) <= NEIGHBOURS:
                return dict.fromkeys(_OF_SETS)
            true, made = scale * self.truths[order[:half]], scale * features[second]
            values.append((frechet_distance(true, made), kernel_distance(true, made), *precision_recall(true, made)))
        columns = np.array(values).T
        return {name: _estimate(column.mean(), column) for name, column in zip(_OF_SETS, columns, strict=True)}

    def _mean(self, values: Tensor) -> Estimate:
        numbers = values.numpy()
        draws = stream(self.seed, "metrics-bootstrap", 0, 0, 0).integers(0, len(numbers), (_RESAMPLES, len(numbers)))
        return _estimate(numbers.mean(), numbers[draws].mean(1))


def _estimate(value: Any, draws: Any) -> Estimate:
    low, high = np.percentile(draws, (2.5, 97.5))
    return Estimate(float(value), float(low), float(high))
