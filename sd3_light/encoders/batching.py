"""What an encoder is given at once: pure functions of sizes and lengths, so that equal work makes equal bytes.

A batch's results may differ in their last bits with its make-up; that is why nothing here looks at the device, the time
or the number of processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

AREA = 256 * 256
"""Pixels of the picture for which `caching_batch_size` is meant; larger ones go in smaller batches."""
MULTIPLE = 8
"""Padded lengths are multiples of this: few shapes, and rows that start where fused attention wants them."""

SMALL = 512
"""Tokens below which a batch costs an encoder of SD3's sizes about the same: its weights are read, whatever they do."""


@dataclass(frozen=True)
class CaptionBatch:
    """Captions that are encoded together: their numbers, and the length to which all are padded."""

    members: tuple[int, ...]
    length: int


def image_batches(count: int, height: int, width: int, batch_size: int) -> list[slice]:
    """Consecutive pictures whose joint area is at most that of ``batch_size`` pictures of 256 px; at least one."""
    size = max(1, min(batch_size, batch_size * AREA // (height * width)))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def padded_batches(lengths: Sequence[int], batch_size: int) -> list[CaptionBatch]:
    """Captions of one length, in their order."""
    assert len(set(lengths)) <= 1
    numbers = range(len(lengths))
    return [
        CaptionBatch(tuple(numbers[start : start + batch_size]), lengths[start])
        for start in range(0, len(lengths), batch_size)
    ]


def length_batches(lengths: Sequence[int], budget: int, longest: int | None = None) -> list[CaptionBatch]:
    """Captions of like length, the longest first. A batch has at most ``budget`` tokens with its padding, or is one
    caption; padding stops at ``longest``. Captions of another padded length join only a batch that is small."""
    found: list[CaptionBatch] = []
    # the longest first: what does not fit into memory shows in the first batch
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = -(-lengths[number] // MULTIPLE) * MULTIPLE
        length = length if longest is None else min(length, longest)
        last = found[-1] if found else CaptionBatch((), 0)
        tokens = len(last.members) * last.length
        if found and tokens + last.length <= budget and (length == last.length or tokens < SMALL):
            found[-1] = CaptionBatch((*last.members, number), last.length)
        else:
            found.append(CaptionBatch((number,), length))
    return found


def first_rows(lengths: Sequence[int]) -> NDArray[np.int64]:
    """The first row of each caption when all rows stand one after another, and the end: [d + 1]."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def rows_in_batch(lengths: Sequence[int], padded: int) -> NDArray[np.int64]:
    """Rows of tokens among the flattened rows [B x padded] of a batch, caption after caption."""
    return np.concatenate([np.arange(place * padded, place * padded + length) for place, length in enumerate(lengths)])


def rows_in_all(members: Sequence[int], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same rows among those of all captions."""
    return np.concatenate([np.arange(starts[number], starts[number + 1]) for number in members])
