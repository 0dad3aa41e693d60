"""The parts of inspect that need no cache: counting words, drawing samples, choosing rejects."""

import json
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from sd3_light.data.manifest import ShardEntry
from sd3_light.formats import shorten
from sd3_light.report.inspect.cache_stats import bucket_order, draw_samples, num_words, quantile
from sd3_light.report.inspect.histogram import histogram_bins
from sd3_light.report.inspect.rejects import read_rejects, source_label


def entry(number: int, count: int, bucket: str = "64x64") -> ShardEntry:
    return ShardEntry(f"{number:05d}.safetensors", bucket, (64, 64), "a#0", count, 0, "", "")


def test_words_are_counted_in_scripts_with_and_without_spaces() -> None:
    counts = {"": 0, "  ": 0, "a red circle": 3, "it's a well-known one, isn’t it?": 6, "1girl, solo, blue_eyes": 3}
    counts |= {"一只红色的圆": 6, "红色circle在左边": 6, "ねこ": 2, "고양이 한 마리": 3}
    assert {text: num_words(text) for text in counts} == counts


def test_lengths_buckets_keys_and_texts_are_short_and_sorted() -> None:
    lengths = Counter({2: 50, 7: 45, 90: 5})
    assert [quantile(lengths, share) for share in (0.0, 0.5, 0.51, 0.95, 0.96, 1.0)] == [2, 2, 7, 7, 90, 90]
    assert quantile(Counter(), 0.5) == 0
    bins = histogram_bins(Counter({5: 1000, 6: 3000, 7: 2000, 9000: 1}))
    assert len([bin for bin in bins if bin.count]) == 4
    assert bins[-1].is_open
    shards = [entry(0, 1, "80x48"), entry(1, 1, "64x64"), entry(2, 1, "48x80")]
    assert [shard.bucket for shard in sorted(shards, key=bucket_order)] == ["48x80", "64x64", "80x48"]
    places = {"diffusers_path": "x", "directory:a#0": "y", "directory:a#0/b#1": "z"}
    assert source_label("a#0/c.jpg", places) == "a#0"
    assert source_label("a#0/b#1/c.jpg", places) == "a#0/b#1"
    assert source_label("other#0/c.jpg", places) == ""
    assert shorten("One. Two.", 5) == "One…"
    assert shorten("One.", 4) == "One."


@pytest.mark.parametrize(
    "lengths",
    [
        {3: 1},
        {0: 5, 1: 2},
        dict.fromkeys(range(1, 31), 1),
        dict.fromkeys(range(4, 77), 3),
        {5: 1000, 6: 3000, 9000: 1},
        {10**6: 1, 1: 1},
    ],
)
def test_bins_hold_every_caption_once(lengths: dict[int, int]) -> None:
    bins = histogram_bins(Counter(lengths))
    assert 1 <= len(bins) <= 30
    for bin in bins[:-1]:
        assert bin.count == sum(count for length, count in lengths.items() if bin.low <= length <= bin.high)
    assert sum(bin.count for bin in bins) == sum(lengths.values())
    assert bins[-1].is_open == (max(lengths) > bins[-1].high)
    assert all(left.high + 1 == right.low for left, right in pairwise(bins))


def test_samples_are_drawn_in_proportion_and_without_a_list() -> None:
    refs = draw_samples([entry(0, 100), entry(1, 900)], 500, seed=3)
    assert len({(ref.entry.file, ref.row) for ref in refs}) == 500
    assert all(0 <= ref.row < ref.entry.count for ref in refs)
    large = sum(ref.entry.count == 900 for ref in refs)
    assert 430 < large < 470
    refs = draw_samples([entry(0, 3), entry(1, 2)], 48, seed=0)
    assert [(ref.entry.file[4], ref.row) for ref in refs] == [("0", 0), ("0", 1), ("0", 2), ("1", 0), ("1", 1)]
    assert draw_samples([], 48, seed=0) == []
    assert draw_samples([entry(0, 3)], 0, seed=0) == []
    shards = [entry(number, 1000) for number in range(10_000)]
    tracemalloc.start()
    refs = draw_samples(shards, 48, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(refs) == 48
    assert len({ref.entry.file for ref in refs}) > 40
    assert peak < 8_000_000  # one int64 per sample would be 80 MB


def test_all_rejects_are_counted_and_every_reason_is_shown(tmp_path: Path) -> None:
    reasons = ["truncated"] * 5000 + ["no_caption"] * 3 + ["too_large"] * 40
    lines = (json.dumps({"key": f"a#0/{at}", "reason": reason}) for at, reason in enumerate(reasons))
    (tmp_path / "rejects.jsonl").write_text("\n".join(lines) + "\n")
    summary = read_rejects(tmp_path, {}, seed=0, most=60)
    totals = {group.name: group.total for group in summary.groups}
    assert totals == {"truncated": 5000, "no_caption": 3, "too_large": 40}
    assert Counter(reject.reason for reject in summary.shown) == {"no_caption": 3, "too_large": 28, "truncated": 29}
    assert len({reject.key for reject in summary.shown}) == 60
    # a random choice, not the first ones
    numbers = [int(reject.key[4:]) for reject in summary.shown if reject.reason == "truncated"]
    assert max(numbers) > 2500 > min(numbers)
    # a reason whose share is smaller than its reservoir must not prefer the first lines.
    lines = [{"key": f"a#0/{at}", "reason": reason} for reason in ("truncated", "too_large") for at in range(10)]
    (tmp_path / "rejects.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = [read_rejects(tmp_path, {}, seed, most=10).shown for seed in range(40)]
    times = Counter(reject.key for rejects in shown for reject in rejects)
    assert set(times) == {f"a#0/{at}" for at in range(10)}
    assert max(times.values()) < 3 * min(times.values())
