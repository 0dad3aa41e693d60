"""The parts of inspect that need no cache: counting, drawing, choosing, writing HTML."""

import json
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from sd3_light.data.manifest import ShardEntry
from sd3_light.runlog.page.html import Html, join, language, tag
from sd3_light.stages.inspect.charts import bins_of, shape
from sd3_light.stages.inspect.gather import bucket_order, draw, num_words, quantile
from sd3_light.stages.inspect.rejects import label_of, read_rejects


def entry(number: int, count: int, bucket: str = "64x64") -> ShardEntry:
    return ShardEntry(f"{number:05d}.safetensors", bucket, (64, 64), "a#0", count, 0, "", "")


# --- lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", 0),
        ("  ", 0),
        ("a red circle", 3),
        ("it's a well-known one, isn’t it?", 6),
        ("一只红色的圆", 6),
        ("红色circle在左边", 6),
        ("ねこ", 2),
        ("고양이 한 마리", 3),
        ("1girl, solo, blue_eyes", 3),
    ],
)
def test_words_are_counted_in_scripts_with_and_without_spaces(text: str, words: int) -> None:
    assert num_words(text) == words


def test_quantiles_are_lengths_that_occur() -> None:
    lengths = Counter({2: 50, 7: 45, 90: 5})
    assert [quantile(lengths, share) for share in (0.0, 0.5, 0.51, 0.95, 0.96, 1.0)] == [2, 2, 7, 7, 90, 90]
    assert quantile(Counter(), 0.5) == 0


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
    bins = bins_of(Counter(lengths))
    assert 1 <= len(bins) <= 30
    for bin in bins[:-1]:
        assert bin.count == sum(count for length, count in lengths.items() if bin.low <= length <= bin.high)
    assert sum(bin.count for bin in bins) == sum(lengths.values())
    assert bins[-1].is_open == (max(lengths) > bins[-1].high)
    assert all(one.high + 1 == two.low for one, two in pairwise(bins))


def test_one_endless_caption_does_not_hide_the_others() -> None:
    bins = bins_of(Counter({5: 1000, 6: 3000, 7: 2000, 9000: 1}))
    assert len([bin for bin in bins if bin.count]) == 4
    assert bins[-1].is_open


# --- drawing ---------------------------------------------------------------------------------------


def test_samples_are_drawn_by_the_size_of_their_shards() -> None:
    picks = draw([entry(0, 100), entry(1, 900)], 500, seed=3)
    assert len({(pick.entry.file, pick.row) for pick in picks}) == 500
    assert all(0 <= pick.row < pick.entry.count for pick in picks)
    large = sum(pick.entry.count == 900 for pick in picks)
    assert 430 < large < 470


def test_drawing_takes_all_where_there_are_fewer() -> None:
    picks = draw([entry(0, 3), entry(1, 2)], 48, seed=0)
    assert [(pick.entry.file[4], pick.row) for pick in picks] == [("0", 0), ("0", 1), ("0", 2), ("1", 0), ("1", 1)]
    assert draw([], 48, seed=0) == []
    assert draw([entry(0, 3)], 0, seed=0) == []


def test_drawing_from_ten_million_needs_no_list_of_them() -> None:
    shards = [entry(number, 1000) for number in range(10_000)]
    tracemalloc.start()
    picks = draw(shards, 48, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(picks) == 48
    assert len({pick.entry.file for pick in picks}) > 40
    assert peak < 8_000_000  # one int64 a sample would be 80 MB


def test_buckets_go_from_tall_to_wide() -> None:
    shards = [entry(0, 1, "80x48"), entry(1, 1, "64x64"), entry(2, 1, "48x80")]
    assert [shard.bucket for shard in sorted(shards, key=bucket_order)] == ["48x80", "64x64", "80x48"]


# --- rejects ---------------------------------------------------------------------------------------


def test_all_rejects_are_counted_and_every_reason_is_shown(tmp_path: Path) -> None:
    reasons = ["truncated"] * 5000 + ["no_caption"] * 3 + ["too_large"] * 40
    lines = (json.dumps({"key": f"a#0/{at}", "reason": reason}) for at, reason in enumerate(reasons))
    (tmp_path / "rejects.jsonl").write_text("\n".join(lines) + "\n")
    found = read_rejects(tmp_path, {}, seed=0, most=60)
    assert found.counts == {"truncated": 5000, "no_caption": 3, "too_large": 40}
    assert Counter(reject.reason for reject in found.shown) == {"no_caption": 3, "too_large": 28, "truncated": 29}
    assert len({reject.key for reject in found.shown}) == 60
    # a random choice, not the first ones
    numbers = [int(reject.key[4:]) for reject in found.shown if reject.reason == "truncated"]
    assert max(numbers) > 2500 > min(numbers)


def test_a_small_choice_of_few_rejects_is_random_too(tmp_path: Path) -> None:
    """Where a reason's share is smaller than what is kept of it, the first ones must not be preferred."""
    lines = [{"key": f"a#0/{at}", "reason": reason} for reason in ("truncated", "too_large") for at in range(10)]
    (tmp_path / "rejects.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = [read_rejects(tmp_path, {}, seed, most=10).shown for seed in range(40)]
    times = Counter(reject.key for found in shown for reject in found)
    assert set(times) == {f"a#0/{at}" for at in range(10)}
    assert max(times.values()) < 3 * min(times.values())


def test_the_label_of_a_key_is_that_of_its_source() -> None:
    places = {"diffusers_path": "x", "directory:a#0": "y", "directory:a#0/b#1": "z"}
    assert label_of("a#0/c.jpg", places) == "a#0"
    assert label_of("a#0/b#1/c.jpg", places) == "a#0/b#1"
    assert label_of("other#0/c.jpg", places) == ""


# --- HTML ------------------------------------------------------------------------------------------


def test_everything_but_html_is_escaped() -> None:
    text = "<b>\"'&"
    assert tag("p", text, title=text) == '<p title="&lt;b&gt;&quot;&#x27;&amp;">&lt;b&gt;&quot;&#x27;&amp;</p>'
    assert tag("p", tag("b", "x"), class_="y", http_equiv=None) == '<p class="y"><b>x</b></p>'
    assert isinstance(join(["<", Html("<i>")]), Html)
    assert join(["<", Html("<i>")]) == "&lt;<i>"
    assert tag("img", src="x") == '<img src="x">'


def test_languages_are_told_by_their_script() -> None:
    found = [language(text) for text in ("a cat", "一只猫", "これは猫", "고양이", "a 猫", "")]
    assert found == [None, "zh", "ja", "ko", "zh", None]


def test_shapes_are_drawn_to_scale() -> None:
    assert 'width="28.0" height="14.0"' in shape("512x256", 512)
    assert 'width="14.0" height="14.0"' in shape("256x256", 512)
