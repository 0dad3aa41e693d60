"""A cache in memory: what the tables hold, memory limits, and files that are not needed any more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sd3_light.config.faults import UserError
from sd3_light.cost.data_bytes import resident_index_bytes
from sd3_light.data import manifest as manifest_module
from sd3_light.data.manifest import Manifest
from sd3_light.data.resident import ResidentBucket, ResidentCache, ResidentPicks
from sd3_light.data.shards import ShardContent
from sd3_light.data.store import LocalStore
from sd3_light.data.stream import CachedDataset
from tests.refusals import refused
from tests.unit.data.conftest import toy_content, toy_shard

MakeCache = Callable[..., CachedDataset]
CPU = torch.device("cpu")


def held(folder: Path, *contents: ShardContent) -> ResidentBucket:
    entries = tuple(toy_shard(folder, f"{number}", content) for number, content in enumerate(contents))
    empty = toy_shard(folder, "empty", toy_content([0], bucket="empty"), "empty", "")
    Manifest({"text_tokens": "padded"}, entries, empty).save(folder)
    (bucket,) = ResidentCache(CachedDataset(LocalStore(folder)), CPU).buckets
    return bucket


def test_shards_of_a_bucket_may_differ_in_flips_and_masks(tmp_path: Path) -> None:
    bucket = held(tmp_path, toy_content(range(1, 4)), toy_content(range(4, 9), variants=2, mask=True, captions=3))
    assert np.diff(bucket.first_image).tolist() == [1] * 3 + [2] * 5
    assert np.diff(bucket.first_caption).tolist() == [1] * 3 + [3] * 5
    assert bucket.masked.tolist() == [False] * 3 + [True] * 5
    assert bucket.masks is not None
    assert bucket.masks[:3].min() == 255, "shards without masks are white"
    assert bucket.masks[3:].min() == 0


def test_a_cache_in_memory_takes_the_bytes_of_its_shards(make_cache: MakeCache) -> None:
    """Plus a few rows of text per bucket, and the index that `check` counts."""
    data = make_cache(captions=2, variants=2, mask=True, sizes=(50, 30), buckets=("32x16", "16x32"))
    cache = ResidentCache(data, CPU)
    held = 0
    for bucket in cache.buckets:
        tables = (bucket.images, bucket.text.tokens, bucket.text.fixed)
        held += sum(tensor.nbytes for table in tables for tensor in table.values()) + bucket.masks.nbytes
    assert held <= sum(entry.bytes for entry in data.manifest.shards)
    index = 0
    for bucket in cache.buckets:
        arrays = (bucket.first_sample, bucket.ids, bucket.first_image, bucket.first_caption, bucket.captions)
        index += sum(array.nbytes for array in (*arrays, bucket.masked, *bucket.text.starts.values()))
    assert 0.6 * resident_index_bytes(80, 160) < index <= resident_index_bytes(80, 160)


def test_picks_are_a_ranks_share_of_each_step(make_cache: MakeCache) -> None:
    data = make_cache()
    order = data.order(0, {"toy#0": 1.0}, lambda resolution: 4)
    whole = ResidentPicks(order, 0, 1, 1)
    for rank in (0, 1):
        half = ResidentPicks(order, rank, 2, 2)
        parts = [half[2 * 5 + micro] for micro in (0, 1)]
        picked = [(int(s), int(i)) for part in parts for s, i in zip(part.segment, part.index, strict=True)]
        expected = list(zip(whole[5].segment.tolist(), whole[5].index.tolist(), strict=True))
        assert set(picked) < set(expected)
        assert len(picked) == 2


def test_a_cache_larger_than_memory_is_rejected(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_cache()
    size = sum(entry.bytes for entry in data.manifest.shards)
    monkeypatch.setattr(manifest_module, "available_memory", lambda: int(size / 0.8) + 1)
    ResidentCache(data, CPU)
    refused(r"2 times on this machine.*sd3_streaming_dataset = true", ResidentCache, data, CPU, processes=2)
    monkeypatch.setattr(manifest_module, "available_memory", lambda: int(size / 0.8) - 2)
    refused(r'stream it .cache_residence = "stream"', ResidentCache, data, CPU)


def test_the_sizes_of_cache_and_memory_are_named(make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_cache()
    data.manifest = replace(data.manifest, shards=(replace(data.manifest.shards[0], bytes=8 * 10**9 + 1),))
    monkeypatch.setattr(manifest_module, "available_memory", lambda: 10 * 10**9)
    refused(r"takes 8.0 GB and 10.0 GB of memory are free, of which 80% may be taken", ResidentCache, data, CPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 10**9, 16 * 10**9))
    with pytest.raises(UserError, match=r"takes 8.0 GB and 10.0 GB of GPU memory are free.*cache_residence = \"host\""):
        ResidentCache(data, torch.device("cuda"))


def test_samples_may_share_captions(tmp_path: Path) -> None:
    """Three samples of the first shard have one caption; the second refers to captions of the second."""
    images = {"moments": toy_content(range(1, 4)).values["moments"]}
    values = {**toy_content([1]).values, **images}
    shared = replace(toy_content(range(1, 4)), caption=torch.zeros(3, dtype=torch.long), values=values)
    swapped = replace(toy_content(range(4, 7)), caption=torch.tensor([2, 1, 0]))
    bucket = held(tmp_path, shared, swapped, toy_content(range(7, 9)))
    captions = [bucket.captions[start] for start in bucket.first_caption[:-1]]
    expected = [1, 1, 1, 6, 5, 4, 7, 8]
    for pooled in bucket.text.fixed.values():
        assert pooled[captions, 0].tolist() == expected
    for name, starts in bucket.text.starts.items():
        assert bucket.text.tokens[name][starts[captions], 0].tolist() == expected
    assert bucket.text.empty == 1 + 3 + 2, "distinct captions"
