"""Group images and captions into encoder batches.

The last bits of a result may depend on its batch. The batches are pure functions of sizes and lengths, independent of
the device and the number of processes, so that equal inputs give equal bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

REFERENCE_PIXELS = 256 * 256
"""Image area to which `caching_batch_size` applies; larger images use smaller batches."""
LENGTH_MULTIPLE = 8
"""Padded lengths are multiples of this: few shapes, and rows aligned for fused attention."""

SMALL_BATCH_TOKENS = 512
"""Below this many tokens, reading the weights dominates and all batches cost about the same."""


@dataclass(frozen=True)
class CaptionBatch:
    """Indices of captions that are encoded together, and their common padded length."""

    members: tuple[int, ...]
    length: int


def image_batches(count: int, height: int, width: int, batch_size: int) -> list[slice]:
    """Split images into slices of at least one image and at most the area of ``batch_size`` images of 256x256."""
    size = max(1, min(batch_size, batch_size * REFERENCE_PIXELS // (height * width)))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def padded_batches(lengths: Sequence[int], batch_size: int) -> list[CaptionBatch]:
    """Split captions of equal length into consecutive batches."""
    assert len(set(lengths)) <= 1
    indices = range(len(lengths))
    return [
        CaptionBatch(tuple(indices[start : start + batch_size]), lengths[start])
        for start in range(0, len(lengths), batch_size)
    ]


def length_batches(lengths: Sequence[int], budget: int, longest: int | None = None) -> list[CaptionBatch]:
    """Group captions of similar length, longest first.

    A batch has one caption, or at most ``budget`` tokens including padding. No caption is padded beyond ``longest``.
    Captions of a different padded length join a batch only while it is small.
    """
    batches: list[CaptionBatch] = []
    # longest first, so that running out of memory shows in the first batch
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = -(-lengths[index] // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        length = length if longest is None else min(length, longest)
        last = batches[-1] if batches else CaptionBatch((), 0)
        tokens = len(last.members) * last.length
        if batches and tokens + last.length <= budget and (length == last.length or tokens < SMALL_BATCH_TOKENS):
            batches[-1] = CaptionBatch((*last.members, index), last.length)
        else:
            batches.append(CaptionBatch((index,), length))
    return batches


def row_starts(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return the first row of each caption when all captions are concatenated, and the total: [d + 1]."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of several ranges, such as the rows of captions, from the start and length of each."""
    return np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
