"""Compares sets of images with the true images of the same captions, by the features of a model (see `feature_model`).

Every set is measured in the same way. The samples are split at random into halves A and B; distribution metrics compare
the true images of A with a set's images of B. With the true images as the set this shows how far two halves of the
truth are apart: a perfect model reaches the same values. Values are means over the splits, intervals the central 95% of
them; those of means over images (retrieval, distance, PSNR, edges) are bootstrapped over the images.

With the pixels of the true images, distribution metrics also have a paired difference: of a set minus that of the true
images, for the same splits. Its standard error is that of another sample of images: within each split the images of
either half are drawn again with replacement, the same ones for both sets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
from sd3_light.evaluate.feature_model import FeatureModel
from sd3_light.evaluate.pixels import PIXEL_METRICS, pixel_scores
from sd3_light.randomness import stream
from sd3_light.sources.preprocess import Pixels

_OF_SETS = METRICS[:4]
DIFFERENCES = {"frechet": "frechet_difference", "kid": "kid_difference"}
"""Distribution metrics, and the names of their paired differences to the true images."""
GROUP = 100
"""Captions among which an image finds its own."""
MIN_IMAGES = 2 * (NEIGHBOURS + 1)
_SPLITS = 20
_MAX_HALF = 2500
_RESAMPLES = 1000
_RESAMPLES_PER_SPLIT = 10
_BATCH = 64
_DISTANCES = (frechet_distance, kernel_distance)  # in the order of `DIFFERENCES`


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
    """The metrics of a set of images by name, None where one does not apply; ``rows`` are the captions that have an
    image, and ``each`` has the values of single images by metric (``retrieval``: whether it finds its caption)."""

    rows: tuple[int, ...]
    estimates: dict[str, Estimate | None]
    each: dict[str, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of images."""
        return len(self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return counts and estimates for JSON."""
        values = {name: None if value is None else vars(value) for name, value in self.estimates.items()}
        return {"images": self.count, **values}


def image_features(feature_model: FeatureModel, images: Sequence[Pixels]) -> Tensor:
    """Return the features of images of any sizes, vectors of length 1, in float64 on the CPU."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, pixels in enumerate(images):
        groups.setdefault(pixels.shape, []).append(index)
    rows: dict[int, Tensor] = {}
    for indices in groups.values():
        for start in range(0, len(indices), _BATCH):
            batch = indices[start : start + _BATCH]
            features = feature_model.image_features(np.stack([images[index] for index in batch]))
            rows.update(zip(batch, features.double().cpu(), strict=True))
    return _finite(torch.stack([rows[index] for index in range(len(images))]))


def text_features(feature_model: FeatureModel, captions: Sequence[str]) -> Tensor:
    """Return the features of captions, as `image_features` does."""
    batches = [
        feature_model.text_features(captions[start : start + _BATCH]) for start in range(0, len(captions), _BATCH)
    ]
    return _finite(torch.cat(batches).double().cpu())


def _finite(features: Tensor) -> Tensor:
    if not bool(features.isfinite().all()):
        raise UserError("the features are NaN or infinite; check the folder of --features")
    return features


@dataclass
class Comparison:
    """The true images, one per caption, with which sets of images of the same captions are compared.

    ``texts`` are the features of the captions, None if the model reads no text: then there is no retrieval. With the
    ``pixels`` of the true images sets have paired differences, and PSNR and edge agreement.
    """

    truths: Tensor
    texts: Tensor | None
    captions: Sequence[str]
    seed: int = 0
    pixels: Sequence[Pixels] | None = None

    def __post_init__(self) -> None:
        if len(self.captions) < MIN_IMAGES:
            raise UserError(f"{len(self.captions)} images are too few to compare; give at least {MIN_IMAGES}")

    @property
    def among(self) -> int:
        """The number of captions among which an image finds its own."""
        return min(GROUP, len(self.captions))

    def of_truths(self) -> Scores:
        """Return the scores of the true images: the best that a model can expect."""
        index = torch.arange(len(self.truths))
        each = self._pairs(self.truths, index)
        del each["distance"]  # to itself
        nothing = dict.fromkeys(("distance", *(() if self.pixels is None else (*DIFFERENCES.values(), *PIXEL_METRICS))))
        estimates = {**self._of_sets(self.truths, index), **nothing, **self._means(each)}
        return Scores(tuple(index.tolist()), estimates, each)

    def of_shuffled_truths(self) -> Scores:
        """Return the scores of true images of other captions: those of a model that ignores captions."""
        half = len(self.truths) // 2
        shuffled = self.truths.roll(half, 0)
        each = self._pairs(shuffled, torch.arange(len(shuffled)))
        if self.pixels is not None:
            each |= pixel_scores([*self.pixels[-half:], *self.pixels[:-half]], self.pixels)
        estimates = {**dict.fromkeys((*_OF_SETS, *self._paired_names)), **self._means(each)}
        return Scores(tuple(range(len(shuffled))), estimates, each)

    def of_images(
        self, features: Tensor, rows: Sequence[int] | None = None, images: Sequence[Pixels] | None = None
    ) -> Scores:
        """Return the scores of one image per caption, or of images for the captions of these rows.

        ``images`` are their pixels, where those of the true images are known.
        """
        index = torch.arange(len(self.truths)) if rows is None else torch.tensor(rows)
        whole = self.truths.index_copy(0, index, features)
        each = self._pairs(whole, index)
        if self.pixels is not None and images is not None:
            each |= pixel_scores(images, [self.pixels[row] for row in index.tolist()])
        estimates = {**self._of_sets(whole, index), **self._differences(whole, index), **self._means(each)}
        return Scores(tuple(index.tolist()), estimates, each)

    @property
    def _paired_names(self) -> tuple[str, ...]:
        return () if self.pixels is None else tuple(DIFFERENCES.values())

    def _pairs(self, features: Tensor, index: Tensor) -> dict[str, Tensor]:
        """Return retrieval, if there are texts, and distance of the rows ``index`` of features of all captions."""
        each = {}
        if self.texts is not None:
            each["retrieval"] = finds_own_caption(features, self.texts, self.captions, GROUP)[index]
        return {**each, "distance": cosine_distances(features[index], self.truths[index])}

    def _means(self, each: Mapping[str, Tensor]) -> dict[str, Estimate | None]:
        return {"retrieval": None, **{name: self._mean(values) for name, values in each.items()}}

    def _differences(self, features: Tensor, rows: Tensor) -> dict[str, Estimate | None]:
        """Return the differences to the true images: means over the splits, errors by drawing images again."""
        if self.pixels is None:
            return {}
        made = _scaled(features)
        true = _scaled(self.truths)
        plain: list[list[float]] = []
        drawn: list[list[list[float]]] = []
        for number in range(_SPLITS):
            first, second = self._split(number, rows)
            if len(second) <= NEIGHBOURS:
                return dict.fromkeys(self._paired_names)
            plain.append(_difference(true, made, first, second))
            rng = stream(self.seed, "metrics-resample", 0, 0, number)
            drawn.append(
                [
                    _difference(true, made, rng.choice(first, len(first)), rng.choice(second, len(second)))
                    for _ in range(_RESAMPLES_PER_SPLIT)
                ]
            )
        values = np.mean(plain, 0)
        errors = np.sqrt(np.var(drawn, 1, ddof=1).mean(0))
        return {
            name: Estimate(float(value), float(value - 1.96 * error), float(value + 1.96 * error))
            for name, value, error in zip(self._paired_names, values, errors, strict=True)
        }

    def _split(self, number: int, rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of one half, and those of the other that are among ``rows``."""
        order = stream(self.seed, "metrics-split", 0, 0, number).permutation(len(self.truths))
        half = min(len(order) // 2, _MAX_HALF)
        return order[:half], np.intersect1d(order[half : 2 * half], rows.numpy())

    def _of_sets(self, features: Tensor, rows: Tensor) -> dict[str, Estimate | None]:
        """Return the metrics between the true images of one half and the images of the other; only ``rows`` exist."""
        values: list[tuple[float, ...]] = []
        for number in range(_SPLITS):
            first, second = self._split(number, rows)
            if len(second) <= NEIGHBOURS:
                return dict.fromkeys(_OF_SETS)
            true = _scaled(self.truths)[first]
            made = _scaled(features)[second]
            values.append((frechet_distance(true, made), kernel_distance(true, made), *precision_recall(true, made)))
        columns = np.array(values).T
        return {name: _estimate(column.mean(), column) for name, column in zip(_OF_SETS, columns, strict=True)}

    def _mean(self, values: Tensor) -> Estimate:
        numbers = values.numpy()
        draws = stream(self.seed, "metrics-bootstrap", 0, 0, 0).integers(0, len(numbers), (_RESAMPLES, len(numbers)))
        return _estimate(numbers.mean(), numbers[draws].mean(1))


def _scaled(vectors: Tensor) -> Tensor:
    scale: float = vectors.shape[1] ** 0.5  # so that the kernel of KID is (cosine + 1)^3, whatever the width
    return scale * vectors


def _difference(true: Tensor, made: Tensor, first: NDArray[np.int64], second: NDArray[np.int64]) -> list[float]:
    """Return by how much made images of one half are farther from the true ones of the other than true images are."""
    return [metric(true[first], made[second]) - metric(true[first], true[second]) for metric in _DISTANCES]


def _estimate(value: Any, draws: Any) -> Estimate:
    low, high = np.percentile(draws, (2.5, 97.5))
    return Estimate(float(value), float(low), float(high))
