"""The shards of a plan: a pure function of the catalogue; a change renames exactly the shards that it affects."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sd3_light.cache.manifest_writer import sort_shards
from sd3_light.config import DirectoryConfig
from sd3_light.data import cache_plan as module
from sd3_light.data.cache_plan import CachePlan
from sd3_light.randomness import sample_id
from sd3_light.sources.buckets import assign_all, buckets_by_resolution
from sd3_light.sources.catalogue import InputRow, chunks, make_sources
from tests.unit.sources.catalogues import IDENTITY, directory, names_in, plan_for, shard_files, shard_of, write_image
from tests.unit.sources.inputs import scan_all

pytestmark = pytest.mark.usefixtures("small_parts")

SIZES = [(64, 64), (96, 48), (48, 96), (70, 60)]


def naive(directories: Sequence[DirectoryConfig], size: int) -> list[tuple[Any, ...]]:
    """Return (label, resolution, bucket, keys) of each shard, computed naively in memory."""
    samples: dict[Any, list[str]] = {}
    by_label = {source.label: source.directory for source in make_sources(directories)}
    order = {label: index for index, label in enumerate(by_label)}
    for record in scan_all(directories):
        label = record.key.split("/")[0]
        keys = by_label[label]
        width, height = Image.open(record.image.path).size  # type: ignore[union-attr]
        groups = buckets_by_resolution(keys)
        for bucket in assign_all(width, height, groups):
            index = next(index for index, group in enumerate(groups) if bucket in group)
            resolution = (bucket.width, bucket.height) if keys.size_buckets else keys.resolutions[index]
            samples.setdefault((order[label], label, resolution, bucket), []).append(record.key)
    return [
        (label, resolution, bucket, chunk)
        for (_, label, resolution, bucket), keys_of in sorted(samples.items())
        for chunk in chunks(keys_of, sample_id, size)
    ]


@pytest.mark.parametrize("size", [4, 100])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"resolutions": [64, 32]},
        {"resolutions": [64, 96], "enable_ar_bucket": True, "num_ar_buckets": 5},
        {"size_buckets": [[64, 64], [96, 48], [48, 96]]},
    ],
    ids=["one size", "two sizes", "ratios", "explicit sizes"],
)
def test_a_plan_matches_the_naive_computation(tmp_path: Path, cache: Path, keys: dict[str, Any], size: int) -> None:
    for number in range(24):
        write_image(tmp_path / "a" / f"{number:02}.png", number, SIZES[number % 4])
        write_image(tmp_path / "b" / f"{number:02}.png", number, SIZES[number % 3])
    directories = [directory(tmp_path / "b", **keys), directory(tmp_path / "a", **keys)]
    plan = plan_for(cache, directories, size=size)
    planned = []
    for shard in sort_shards(plan.shards):
        members = plan.members(shard)
        planned.append((shard.label, shard.resolution, shard.bucket, [member.row.key for member in members]))
        assert shard.count == len(members) <= size
        assert plan.ids(shard).tolist() == [sample_id(member.row.key) for member in members]
        assert [member.identity for member in members] == plan.ids(shard).tolist()
        assert plan.source(shard).label == shard.label
        entry = shard.entry
        assert (entry.file, entry.bucket, entry.resolution) == (shard.file, str(shard.bucket), shard.resolution)
        assert (entry.directory, entry.fingerprint) == (shard.label, shard.fingerprint)
        assert f"-r{shard.resolution[0]}x{shard.resolution[1]}-{shard.bucket}-{shard.fingerprint[:20]}." in shard.file
    assert planned == naive(directories, size)
    assert len(set(shard_files(plan))) == len(plan.shards)
    assert [shard.number for shard in plan.shards] == list(range(len(plan.shards)))


def test_shards_do_not_depend_on_written_batches(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [(shard, names_in(plan, shard)) for plan in [plan_for(cache, images, size=4)] for shard in plan.shards]
    assert len(expected) > 9
    monkeypatch.setattr(module, "_SHARDS_PER_BATCH", 3)
    plan = plan_for(cache.with_name("other"), images, size=4)
    assert [(shard, names_in(plan, shard)) for shard in plan.shards] == expected


def test_crops_and_enlargements_are_counted(cache: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "images" / "fits.png", size=(128, 128))
    write_image(tmp_path / "images" / "small.png", size=(32, 32))
    write_image(tmp_path / "images" / "wide.png", size=(200, 100))
    counts = plan_for(cache, tmp_path / "images").counts
    assert (counts.images, counts.cropped, counts.enlarged) == (3, 1, 1)


@pytest.mark.parametrize("change", ["caption", "image", "mask"])
def test_a_changed_sample_renames_only_its_shard(images: Path, cache: Path, tmp_path: Path, change: str) -> None:
    for number in range(30):
        write_image(tmp_path / "masks" / f"{number:02}.png", 255, caption=None)
    keys = [directory(images, mask_path=tmp_path / "masks")]
    before = plan_for(cache, keys)
    if change == "caption":
        write_image(images / "15.png", 15, caption="another")
    elif change == "image":
        write_image(images / "15.png", 200)
    else:
        write_image(tmp_path / "masks" / "15.png", 100, caption=None)
    after = plan_for(cache, keys)
    old, new = shard_of(before, "15.png"), shard_of(after, "15.png")
    assert old != new
    assert [new if file == old else file for file in shard_files(before)] == shard_files(after)


CHANGES = {
    "t5 length": ({**IDENTITY, "t5_max_length": 32}, {}),
    "vae": ({**IDENTITY, "vae": "another"}, {}),
    "another key": ({**IDENTITY, "new": 1}, {}),
    "flip": (IDENTITY, {"flip": True}),
    "resolution": (IDENTITY, {"resolutions": [32]}),
    "shape": (IDENTITY, {"resolutions": [[96, 64]]}),
    "sizes": (IDENTITY, {"size_buckets": [[96, 64]]}),
    "ratios": (IDENTITY, {"enable_ar_bucket": True, "ar_buckets": [0.5, 2.0]}),
    "prefix": (IDENTITY, {"caption_prefix": "photo of "}),
    "shuffled tags": (IDENTITY, {"shuffle_tags": True, "cache_shuffle_delimiter": ","}),
    "number of shuffles": (IDENTITY, {"cache_shuffle_num": 2}),
    "default mask": (IDENTITY, {"default_mask_file": "white.png"}),
    "masks": (IDENTITY, {"mask_path": "masks"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_all_samples_renames_all_shards(images: Path, cache: Path, tmp_path: Path, change: str) -> None:
    identity, keys = CHANGES[change]
    write_image(tmp_path / "white.png", 255, caption=None)
    for number in range(30):
        write_image(tmp_path / "masks" / f"{number:02}.png", 255, caption=None)
    paths = {key: tmp_path / value for key, value in keys.items() if key in ("default_mask_file", "mask_path")}
    before = plan_for(cache, images)
    after = plan_for(cache, [directory(images, **{**keys, **paths})], identity)
    assert sum(shard.count for shard in after.shards) == 30
    assert set(shard_files(after)).isdisjoint(shard_files(before))


def test_settings_that_skip_samples_rename_shards(images: Path, cache: Path) -> None:
    write_image(images / "15.png", 15, caption=" ")
    before = plan_for(cache, images)
    without = plan_for(cache, [directory(images, skip_empty_caption=True)])
    assert sum(shard.count for shard in without.shards) == 29
    assert shard_of(before, "15.png") not in shard_files(without)
    half = plan_for(cache, [directory(images, subsample_ratio=0.5)])
    assert 5 < sum(shard.count for shard in half.shards) < 25


def selected(plan: CachePlan) -> set[str]:
    return {name for shard in plan.shards for name in names_in(plan, shard)}


def test_where_selects_by_columns_and_by_the_size_of_images(images: Path, cache: Path) -> None:
    rows = [{"file_name": f"{n:02}.png", "text": "a", "score": n} for n in range(30)]
    (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    write_image(images / "28.png", 28, (96, 48))
    every = plan_for(cache, images)
    assert every.counts.unmatched == 0
    high = plan_for(cache, [directory(images, where="score >= 28")])
    assert selected(high) == {"28.png", "29.png"}
    assert (high.counts.images, high.counts.unmatched) == (2, 28)
    both = "score >= 28 and (width > height or score < 28)"
    wide = plan_for(cache, [directory(images, where=both)])
    assert selected(wide) == {"28.png"}
    assert (wide.counts.images, wide.counts.unmatched, wide.counts.rejected) == (1, 29, Counter())
    # the score is read again, although no caption or image has changed
    rows[3]["score"] = 50
    (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert selected(plan_for(cache, [directory(images, where="score >= 28")])) == {"28.png", "29.png", "03.png"}
    rows[29]["score"] = 5
    (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert selected(plan_for(cache, [directory(images, where="width > 64 or score > 30")])) == {"28.png", "03.png"}
    rows[3]["score"] = 20
    (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert selected(plan_for(cache, [directory(images, where="width > 64 or score > 30")])) == {"28.png"}
    assert shard_files(plan_for(cache, images)) == shard_files(every)


@pytest.mark.parametrize(("keep", "count"), [("keep", 32), ("drop", 30)])
def test_equal_images_are_counted_or_dropped(tmp_path: Path, images: Path, cache: Path, keep: str, count: int) -> None:
    shutil.copy(images / "03.png", images / "copy.png")
    shutil.copy(images / "03.txt", images / "copy.txt")
    (tmp_path / "other").mkdir()
    shutil.copy(images / "04.png", tmp_path / "other" / "elsewhere.png")
    (tmp_path / "other" / "elsewhere.txt").write_text("another caption", encoding="utf-8")
    plan = plan_for(cache, [directory(images, duplicates=keep), directory(tmp_path / "other", duplicates=keep)])
    assert plan.counts.duplicates == {keep: 2}
    assert plan.counts.images == sum(shard.count for shard in plan.shards) == count
    assert selected(plan).isdisjoint({"copy.png", "elsewhere.png"}) == (keep == "drop")


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    """Six images that do not look alike, and three copies: larger and compressed, equal, and smaller."""
    folder = tmp_path / "scenes"
    folder.mkdir()
    images = [Image.frombytes("RGB", (4, 4), sample_id_bytes(number)).resize((64, 64)) for number in range(6)]
    for number, image in enumerate(images):
        image.save(folder / f"{number:02}.png")
    images[3].resize((200, 200)).save(folder / "03-large.jpg", quality=90)
    shutil.copy(folder / "04.png", folder / "04-copy.png")
    images[5].resize((40, 40), Image.Resampling.LANCZOS).save(folder / "05-small.png")
    for path in list(folder.iterdir()):
        path.with_suffix(".txt").write_text(path.stem, encoding="utf-8")
    return folder


def sample_id_bytes(number: int) -> bytes:
    return b"".join(sample_id(f"{number} {block}").to_bytes(8, "little") for block in range(6))


def test_similar_images_are_dropped_on_request_with_any_number_of_workers(scenes: Path, tmp_path: Path) -> None:
    plans = {}
    for policy, workers in (("drop", 0), ("drop_similar", 0), ("drop_similar", 2)):
        cache = tmp_path / f"cache {policy} {workers}"
        plans[policy, workers] = plan_for(cache, [directory(scenes, duplicates=policy)], workers=workers)
    every = {path.name for path in scenes.iterdir() if path.suffix != ".txt"}
    dropped = {options: every - selected(plan) for options, plan in plans.items()}
    assert dropped["drop", 0] == {"04.png"}  # of each pair, the first name is kept
    assert dropped["drop_similar", 0] == dropped["drop_similar", 2] == {"03.png", "04.png", "05.png"}
    plan = plans["drop_similar", 0]
    assert plan.counts.duplicates == {"drop": 1, "similar": 2}
    assert shard_files(plan) == shard_files(plans["drop_similar", 2])
    lists = [each.duplicates_file.read_text(encoding="utf-8") for each in plans.values()]
    assert lists[1] == lists[2]
    assert [tuple(json.loads(line).values()) for line in lists[1].splitlines()] == [
        ("scenes#0/03.png", '["03.png"]', "similar dropped", "scenes#0/03-large.jpg", '["03-large.jpg"]'),
        ("scenes#0/04.png", '["04.png"]', "duplicates dropped", "scenes#0/04-copy.png", '["04-copy.png"]'),
        ("scenes#0/05.png", '["05.png"]', "similar dropped", "scenes#0/05-small.png", '["05-small.png"]'),
    ]


def test_thumbnails_are_made_when_they_are_first_needed(scenes: Path, cache: Path) -> None:
    """A change of `duplicates` probes the images again; the other settings' catalogue stays valid."""
    plan = plan_for(cache, scenes)
    assert len(selected(plan)) == 9
    assert len(selected(plan_for(cache, [directory(scenes, duplicates="drop_similar")]))) == 6
    listed = plan.duplicates_file.read_bytes()
    assert listed
    plan.duplicates_file.unlink()
    again = plan_for(cache, scenes)
    assert len(selected(again)) == 9
    assert again.duplicates_file.read_bytes() == listed, "a missing list is written again"


def test_a_different_shuffle_delimiter_renames_the_shard(images: Path, cache: Path) -> None:
    write_image(images / "15.png", 15, caption="a; b, c; d, e")
    names = [
        shard_of(plan_for(cache, [directory(images, cache_shuffle_num=2, cache_shuffle_delimiter=text)]), "15.png")
        for text in (", ", "; ")
    ]
    assert names[0] != names[1]


NO_CHANGES: dict[str, dict[str, Any]] = {
    "repeats": {"num_repeats": 2.5},
    "unused ratios": {"min_ar": 0.9, "max_ar": 1.1, "num_ar_buckets": 3},
    "same bucket by ratio": {"enable_ar_bucket": True, "ar_buckets": [0.5, 1.0, 2.0]},
    "same bucket by size": {"size_buckets": [[64, 64], [96, 48]]},
    "no empty captions": {"skip_empty_caption": True},
    "unused delimiter": {"cache_shuffle_delimiter": "; "},
}


@pytest.mark.parametrize("keys", NO_CHANGES.values(), ids=NO_CHANGES)
def test_settings_that_do_not_affect_features_rename_nothing(images: Path, cache: Path, keys: dict[str, Any]) -> None:
    assert shard_files(plan_for(cache, [directory(images, **keys)])) == shard_files(plan_for(cache, images))


@pytest.mark.parametrize("change", ["times", "copied", "masks moved"])
def test_new_paths_and_times_rename_nothing(images: Path, cache: Path, tmp_path: Path, change: str) -> None:
    masks = tmp_path / "masks"
    for number in range(30):
        write_image(masks / f"{number:02}.png", 255, caption=None)
    before = shard_files(plan_for(cache, [directory(images, mask_path=masks)]))
    if change == "times":
        for path in images.iterdir():
            os.utime(path, ns=(1, 1))
    if change == "copied":
        images = Path(shutil.copytree(images, tmp_path / "copy" / "images", copy_function=shutil.copyfile))
    if change == "masks moved":
        masks = masks.rename(tmp_path / "other masks")
    assert shard_files(plan_for(cache, [directory(images, mask_path=masks)])) == before


def test_adding_a_directory_leaves_the_first_unchanged(images: Path, cache: Path, tmp_path: Path) -> None:
    before = shard_files(plan_for(cache, images))
    write_image(tmp_path / "more" / "a.png")
    for directories in ([tmp_path / "more", images], [images, tmp_path / "more"]):
        after = shard_files(plan_for(cache, [directory(path) for path in directories]))
        assert [file for file in after if file.startswith("images-0-")] == before
        assert len(after) == len(before) + 1


def test_removing_an_empty_mask_renames_its_shard(images: Path, cache: Path, tmp_path: Path) -> None:
    """The sample was rejected because of the mask, so the existing shard lacks it."""
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "15.png").touch()
    keys = [directory(images, mask_path=tmp_path / "masks")]
    before = plan_for(cache, keys)
    (tmp_path / "masks" / "15.png").unlink()
    assert shard_of(plan_for(cache, keys), "15.png") != shard_of(before, "15.png")


def test_fingerprints_keep_their_parts_apart() -> None:
    """The end of one part and the begin of the next cannot be exchanged."""
    rows = [InputRow(key, digest=digest) for key, digest in (("k1", "2d"), ("k12", "d"))]
    first, second = (module.sample_fingerprint(row, ("a",)) for row in rows)
    assert first != second
