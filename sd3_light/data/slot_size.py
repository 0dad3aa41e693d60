"""The bytes of the largest prepared micro-batch of a cache, so that its memory is allocated and pinned once."""

import math
from collections.abc import Sequence

from sd3_light.data.manifest import ShardEntry
from sd3_light.data.reader import ShardReader
from sd3_light.data.shards import POOLED
from sd3_light.data.store import LocalStore, open_shard
from sd3_light.data.stream import CachedDataset

MAX_SURVEYED = 256
"""Shards whose captions are measured; a longer caption in another one lets slots grow."""

_PER_SAMPLE = 64  # time, length, words of randomness, corner of a position crop
_ALIGNMENT = 4096


def largest_batch_bytes(data: CachedDataset, batches: Sequence[int], only_indices: bool = False) -> int:
    """Return the bytes of the largest micro-batch without noise, for ``batches`` samples in each bucket.

    0 if shards are at a URL: they are not fetched for it. ``only_indices``: see `training.resident_inputs`.
    """
    if not isinstance(data.store, LocalStore):
        return 0
    shards = data.manifest.shards
    step = -(-len(shards) // MAX_SURVEYED) if data.has_lengths else len(shards)  # padded captions have one length
    surveyed = [data.manifest.empty, *(shards[at] for at in range(0, len(shards), max(1, step)))]
    tokens = max(_open(data, entry).longest_text() for entry in surveyed)
    buckets = zip(data.buckets, batches, strict=True)
    return max(
        batch * _sample_bytes(_open(data, bucket.shards[0]), tokens, only_indices) + _ALIGNMENT
        for bucket, batch in buckets
    )


def _open(data: CachedDataset, entry: ShardEntry) -> ShardReader:
    return open_shard(data.store, entry, lambda path: ShardReader(path, entry))


def _sample_bytes(reader: ShardReader, tokens: int, only_indices: bool) -> int:
    channels, *sides = reader.latent_shape
    pixels = math.prod(sides)
    rows = _PER_SAMPLE + pixels  # the kept tokens of a route: at most one int32 per 2 x 2 pixels
    if only_indices:
        return rows + 3 * 4 * tokens
    pooled = sum(reader.width(f"{name}.pooled") for name in POOLED)
    return rows + pixels * (2 * channels + 1) + 2 * (tokens * reader.width("t5.tokens") + pooled)
