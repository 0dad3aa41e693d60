"""The bytes of the largest prepared micro-batch of a cache, so that its memory is allocated and pinned once."""

import math
from collections.abc import Callable, Iterator, Sequence

from sd3_light.core.columns import MASK, Column
from sd3_light.cost.data_bytes import caption_bytes, image_bytes
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset

MAX_SURVEYED = 256
"""Shards whose captions are measured; a longer caption in another one lets slots grow."""

_PER_SAMPLE = 64  # time, lengths, words of randomness, corner of a position crop, numbers of fixed rows
_ALIGNMENT = 4096

Prepared = Callable[[Sequence[Column]], Sequence[Column]]
"""Columns of a cache -> those of a prepared batch: `Family.prepared_columns`."""


def largest_batch_bytes(
    data: CachedDataset, batches: Sequence[int], prepared: Prepared, only_indices: bool = False
) -> int:
    """Return the bytes of the largest micro-batch without noise, for ``batches`` samples in each bucket.

    0 if shards are at a URL: they are not fetched for it. ``only_indices``: a batch of rows of a cache on a device.
    """
    if not isinstance(data.store, LocalStore):
        return 0
    varies = any(column.ragged for column in prepared(data.new_reader(data.manifest.empty).columns))
    text = max(_text_bytes(columns, prepared, only_indices) for columns in _surveyed(data, varies))
    images = (_image_bytes(data.new_reader(bucket.shards[0]).columns, only_indices) for bucket in data.buckets)
    return max(batch * (_PER_SAMPLE + image + text) for batch, image in zip(batches, images, strict=True)) + _ALIGNMENT


def longest_text(data: CachedDataset) -> int | None:
    """Return the rows of the longest caption without padding in a cache.

    None if there is none, or if shards are at a URL: they are not fetched for it.
    """
    if not isinstance(data.store, LocalStore):
        return None
    ragged = (column for columns in _surveyed(data) for column in columns if column.ragged and column.per_caption)
    return max((column.shape[0] for column in ragged), default=None)


def _surveyed(data: CachedDataset, varies: bool = True) -> Iterator[Sequence[Column]]:
    """Yield the columns of shards of a cache, with their shapes there; of few shards unless their captions vary."""
    shards = data.manifest.shards
    step = -(-len(shards) // MAX_SURVEYED) if varies else len(shards)
    for entry in (data.manifest.empty, *(shards[at] for at in range(0, len(shards), max(1, step)))):
        yield data.new_reader(entry).columns


def _text_bytes(columns: Sequence[Column], prepared: Prepared, only_indices: bool) -> int:
    captions = [column for column in prepared(columns) if column.per_caption]
    if not only_indices:
        return caption_bytes(captions).value
    most = max((column.shape[0] for column in captions if len(column.shape) > 1), default=0)
    return 4 * most * sum(column.ragged for column in columns)  # an int32 per row


def _image_bytes(columns: Sequence[Column], only_indices: bool) -> int:
    images = [column for column in columns if not column.per_caption and column.reads != MASK]
    pixels = max(math.prod(column.shape[-2:]) for column in images)
    # a mask, and the kept tokens of a route: at most one int32 per 2 x 2 pixels
    return pixels if only_indices else 2 * pixels + image_bytes(images).value
