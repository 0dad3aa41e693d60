"""Views of one side of a cache: shards, counts and rows."""

from dataclasses import replace

import numpy as np
import pytest

from sd3_light.data.shard_table import ShardEntry, ShardTable, group_shards
from sd3_light.data.sides import HeldOut, side_buckets
from sd3_light.data.stream import order_of_shards


def entry(name: str, count: int, bucket: str = "64x64") -> ShardEntry:
    return ShardEntry(f"{name}.safetensors", bucket, (64, 64), "set#0", count, 100, "ab" * 32, name)


ENTRIES = [entry("a", 4), entry("b", 2), entry("c", 3), entry("d", 1, "80x48"), entry("e", 5, "80x48")]
VALIDATION = {"a.safetensors": (11,), "b.safetensors": (20, 21), "d.safetensors": (40,)}
HELD = HeldOut(VALIDATION, {"a.safetensors": (13,), "c.safetensors": (31,)})


@pytest.mark.parametrize("as_table", [False, True])
def test_a_side_has_the_shards_with_its_samples(as_table: bool) -> None:
    shards = ShardTable.of(ENTRIES) if as_table else ENTRIES
    everything = group_shards(shards)
    assert side_buckets(everything, None, "train") == everything
    assert side_buckets(everything, HELD, "all") == everything

    def view(side: str) -> list[tuple[str, list[tuple[str, int]]]]:
        buckets = side_buckets(everything, HELD, side)  # type: ignore[arg-type]
        return [
            (bucket.bucket, [(shard.file[0], count) for shard, count in zip(bucket.shards, bucket.counts, strict=True)])
            for bucket in buckets
        ]

    assert view("train") == [("64x64", [("a", 2), ("c", 2)]), ("80x48", [("e", 5)])]
    assert view("validation") == [("64x64", [("a", 1), ("b", 2)]), ("80x48", [("d", 1)])]
    assert side_buckets(everything, HeldOut(), "validation") == ()
    assert side_buckets(everything, None, "validation") == ()


def test_the_order_is_that_of_a_cache_without_the_other_side() -> None:
    """Epochs, steps and samples follow from the training samples alone."""
    alone = group_shards(HELD.trained(ENTRIES))
    divided = side_buckets(group_shards(ENTRIES), HELD, "train")
    arguments = (7, {"set#0": 1.5}, lambda _: 2, 3, "pad")
    orders = [order_of_shards(buckets, *arguments) for buckets in (alone, divided)]
    assert orders[0] == orders[1]
    assert [bucket.sizes.tolist() for bucket in orders[0].buckets] == [[2, 2], [5]]


def test_rows_json_and_damage() -> None:
    ids = np.array([10, 11, 12, 13])
    assert HELD.rows(ids, "a.safetensors", "all") is None
    assert HELD.rows(ids, "other", "train") is None
    assert HELD.rows(ids, "a.safetensors", "train") == pytest.approx([0, 2])
    assert HELD.rows(ids, "a.safetensors", "validation") == pytest.approx([1])
    with pytest.raises(ValueError, match="lacks samples"):
        HELD.rows(ids[:2], "a.safetensors", "train")
    assert HeldOut.from_json(HELD.as_json()) == HELD
    assert HeldOut.from_json(None) is None
    for content in ([], {"validation": {}}, {"validation": {"a": [1.5]}, "unused": {}}, {"validation": {"a": []}}):
        with pytest.raises((ValueError, TypeError, LookupError)):
            HeldOut.from_json(content)
    assert HeldOut().trained(ENTRIES) == ENTRIES
    assert HELD.trained([replace(ENTRIES[1])]) == []
