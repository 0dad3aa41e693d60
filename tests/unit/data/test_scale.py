"""A billion samples and 1,024 ranks: the memory and the shards of a rank do not grow with the number of ranks."""

import json
import tracemalloc
from dataclasses import asdict
from functools import cache

import pytest

from sd3_light.data.manifest import CACHE_FORMAT, Manifest, ShardEntry
from sd3_light.data.order import Order, Segment, build_order, rank_slice

RANKS, MICRO, A_MACHINE = 1024, 64, 8
SAMPLES, SHARD = 1_000_000_000, 4096


@cache
def order() -> Order:
    return build_order(3, [([Segment(SHARD)] * (SAMPLES // SHARD) + [Segment(SAMPLES % SHARD)], RANKS * MICRO)])


def share(rank: int) -> tuple[int, int]:
    return rank_slice(RANKS * MICRO, rank, RANKS, 0, 1)


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("step", [0, 500, 1561, 1562])  # the last is half padding
def test_a_rank_prefetches_its_own_shards_only(step: int, window: int) -> None:
    made = build_order(3, [([Segment(512)] * 200_000, RANKS * MICRO)], window)
    for rank in (0, 511, 1023):
        ahead = set(made.segments_in(made.next_windows(step, *share(rank))).tolist())
        assert set(made.picks(step + 1, *share(rank)).segment.tolist()) <= ahead
        current = set(made.segments_in(made.windows_at(step, *share(rank))).tolist())
        assert set(made.picks(step, *share(rank)).segment.tolist()) <= current
        assert len(ahead) <= 2 * (window + 1), f"{len(ahead)} shards for {MICRO} samples"


def test_a_rank_whose_share_is_padding_reads_the_beginning() -> None:
    made = build_order(3, [([Segment(512)] * 100, RANKS * MICRO)])
    padded = share(1023)
    assert padded[0] > made.buckets[0].length
    assert len(made.segments_in(made.windows_at(0, *padded))) > 0
    assert len(made.segments_in(made.next_windows(0, *padded))) > 0


def entry(number: int) -> ShardEntry:
    digest = f"{number:064x}"
    name = f"part-{number % 4}"
    return ShardEntry(f"{name}-{digest[:20]}.safetensors", "300x300", (300, 300), name, 512, 1000, digest, digest[:32])


def test_a_manifest_needs_little_memory_per_shard() -> None:
    count = 4_000
    made = Manifest({"format": CACHE_FORMAT}, tuple(map(entry, range(count))), entry(0))
    data = json.dumps({"format": CACHE_FORMAT, **asdict(made)}, indent=1).encode()
    Manifest.from_json(data, "before")  # fill caches
    tracemalloc.start()
    manifest = Manifest.from_json(data, "here")
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert manifest.shards == tuple(map(entry, range(count)))
    assert held < 600 * count
    assert peak < held + 2 * len(data), "no dict per shard in addition to its entry"
    assert manifest.shards[1].bucket is manifest.shards[2].bucket
    assert manifest.shards[1].resolution is manifest.shards[2].resolution
