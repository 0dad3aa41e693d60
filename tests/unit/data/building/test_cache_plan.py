"""Units of work: a pure function of the catalogue, and a change renames exactly what it touches."""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sd3_light.config import DirectoryConfig
from sd3_light.data.buckets import Bucket, assign_all, buckets_by_resolution, fits
from sd3_light.data.building import cache_plan as module
from sd3_light.data.building import catalogue as catalogue_module
from sd3_light.data.building.cache_plan import Unit
from sd3_light.data.building.catalogue import make_sources
from sd3_light.data.building.chunks import chunks
from sd3_light.data.sources import scan_all
from sd3_light.randomness import sample_id
from sd3_light.stages.cache.manifest_writer import in_order
from tests.unit.data.building.catalogues import RECIPE, directory, files, names, picture, planned, unit_of

SIZES = [(64, 64), (96, 48), (48, 96), (70, 60)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty rows fill a few parts."""
    monkeypatch.setattr(catalogue_module, "PART_ROWS", 16)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)


# --- what makes a unit ---------------------------------------------------------------------------


def naive(directories: Sequence[DirectoryConfig], size: int) -> list[tuple[Any, ...]]:
    """(label, resolution, bucket, keys) of each unit, by a plain reading of the rules with everything in memory."""
    found: dict[Any, list[str]] = {}
    by_label = {source.label: source.directory for source in make_sources(directories)}
    order = {label: at for at, label in enumerate(by_label)}
    for record in scan_all(directories):
        label = record.key.split("/")[0]
        keys = by_label[label]
        width, height = Image.open(record.image.path).size  # type: ignore[union-attr]
        groups = buckets_by_resolution(keys)
        for bucket in assign_all(width, height, groups):
            at = next(at for at, group in enumerate(groups) if bucket in group)
            resolution = (bucket.width, bucket.height) if keys.size_buckets else keys.resolutions[at]
            found.setdefault((order[label], label, resolution, bucket), []).append(record.key)
    return [
        (label, resolution, bucket, chunk)
        for (_, label, resolution, bucket), keys_of in sorted(found.items())
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
    ids=["one size", "two sizes", "ratios", "sizes given"],
)
def test_a_plan_is_what_the_rules_say(tmp_path: Path, cache: Path, keys: dict[str, Any], size: int) -> None:
    for number in range(24):
        picture(tmp_path / "a" / f"{number:02}.png", number, SIZES[number % 4])
        picture(tmp_path / "b" / f"{number:02}.png", number, SIZES[number % 3])
    directories = [directory(tmp_path / "b", **keys), directory(tmp_path / "a", **keys)]
    plan = planned(cache, directories, size=size)
    found = []
    for unit in in_order(plan.units):
        members = plan.members(unit)
        found.append((unit.label, unit.resolution, unit.bucket, [member.row.key for member in members]))
        assert unit.count == len(members) <= size
        assert plan.ids(unit).tolist() == [sample_id(member.row.key) for member in members]
        assert [member.identity for member in members] == plan.ids(unit).tolist()
        assert plan.source(unit).label == unit.label
        entry = unit.entry
        assert (entry.file, entry.bucket, entry.resolution) == (unit.file, str(unit.bucket), unit.resolution)
        assert (entry.directory, entry.fingerprint) == (unit.label, unit.fingerprint)
        assert f"-r{unit.resolution[0]}x{unit.resolution[1]}-{unit.bucket}-{unit.fingerprint[:20]}." in unit.file
    assert found == naive(directories, size)
    assert len(set(files(plan))) == len(plan.units)
    assert [unit.number for unit in plan.units] == list(range(len(plan.units)))


def test_units_are_found_whatever_batch_they_were_written_in(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [(unit, names(plan, unit)) for plan in [planned(cache, pictures, size=4)] for unit in plan.units]
    assert len(expected) > 9
    monkeypatch.setattr(module, "_UNITS_A_BATCH", 3)
    plan = planned(cache.with_name("other"), pictures, size=4)
    assert [(unit, names(plan, unit)) for unit in plan.units] == expected


def test_planning_elsewhere_gives_the_same_names(pictures: Path, cache: Path) -> None:
    assert files(planned(cache, pictures)) == files(planned(cache.with_name("other"), pictures))


def test_where_the_folder_lies_means_nothing(pictures: Path, cache: Path, tmp_path: Path) -> None:
    before = planned(cache, pictures)
    (tmp_path / "moved").mkdir()
    moved = pictures.rename(tmp_path / "moved" / "pictures")
    for folder in (cache, cache.with_name("other")):
        after = planned(folder, moved)
        assert files(after) == files(before)
        assert {after.source(unit).root for unit in after.units} == {moved}


def test_equal_directories_are_told_apart(pictures: Path, cache: Path) -> None:
    found = planned(cache, [directory(pictures), directory(pictures)])
    members = [(unit.label, member.row.key) for unit in found.units for member in found.members(unit)]
    assert Counter(label for label, _ in members) == {"pictures#0": 30, "pictures#1": 30}
    assert len({key for _, key in members}) == 60
    assert all(key.startswith(f"{label}/") for label, key in members)
    assert len(set(files(found))) == len(found.units)


def test_crops_and_enlargements_are_counted(cache: Path, tmp_path: Path) -> None:
    picture(tmp_path / "pictures" / "fits.png", size=(128, 128))
    picture(tmp_path / "pictures" / "small.png", size=(32, 32))
    picture(tmp_path / "pictures" / "wide.png", size=(200, 100))
    counts = planned(cache, tmp_path / "pictures").counts
    assert (counts.pictures, counts.cropped, counts.enlarged) == (3, 1, 1)


def test_a_bucket_belongs_to_the_resolution_it_is_of(tmp_path: Path) -> None:
    keys = directory(tmp_path, resolutions=[[96, 64], [64, 96], [32, 32]])
    found = fits(96, 64, keys)
    assert [(resolution, bucket) for resolution, bucket, _ in found] == [
        ((96, 64), Bucket(96, 64)),
        ((64, 96), Bucket(64, 96)),
        ((32, 32), Bucket(32, 32)),
    ]
    assert [fit.cropped_fraction > 0 for _, _, fit in found] == [False, True, True]
    assert [fit.enlarged for _, _, fit in found] == [False, True, False]


def test_captions_are_those_that_will_be_encoded(pictures: Path, cache: Path) -> None:
    found = planned(cache, [directory(pictures, shuffle_tags=True, cache_shuffle_num=3, caption_prefix="photo of ")])
    members = [member for unit in found.units for member in found.members(unit)]
    for member in members:
        assert len(member.captions) == 3
        assert all(caption.startswith("photo of ") for caption in member.captions)
        tags = [sorted(caption.removeprefix("photo of ").split(", ")) for caption in member.captions]
        assert tags == [["a", "b", "c"]] * 3
    assert len({member.captions for member in members}) > 3, "each sample has shuffles of its own"


def test_units_of_a_kind_follow_the_samples(tmp_path: Path) -> None:
    """By the place of the source, resolution and bucket; numbers alone would mix them as they fill."""

    def unit(number: int, label: str, resolution: int, width: int) -> Unit:
        size = (resolution, resolution)
        return Unit(number, f"{number}", label, Bucket(width, 64), size, False, "", 1)

    given = [
        unit(0, "z#0", 64, 96),
        unit(1, "z#0", 128, 64),
        unit(2, "z#0", 64, 64),
        unit(3, "z#0", 64, 96),
        unit(4, "a#0", 64, 64),
        unit(5, "z#0", 64, 64),
    ]
    assert [one.number for one in in_order(given)] == [2, 5, 0, 3, 1, 4]


# --- what renames a unit -------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["caption", "picture", "mask"])
def test_a_changed_sample_renames_its_unit_alone(pictures: Path, cache: Path, tmp_path: Path, what: str) -> None:
    for number in range(30):
        picture(tmp_path / "masks" / f"{number:02}.png", 255, caption=None)
    keys = [directory(pictures, mask_path=tmp_path / "masks")]
    before = planned(cache, keys)
    if what == "caption":
        picture(pictures / "15.png", 15, caption="another")
    elif what == "picture":
        picture(pictures / "15.png", 200)
    else:
        picture(tmp_path / "masks" / "15.png", 100, caption=None)
    after = planned(cache, keys)
    old, new = unit_of(before, "15.png"), unit_of(after, "15.png")
    assert old != new
    assert [new if file == old else file for file in files(before)] == files(after)


def test_a_renamed_sample_is_another(pictures: Path, cache: Path) -> None:
    before = planned(cache, pictures)
    for suffix in (".png", ".txt"):
        (pictures / f"15{suffix}").rename(pictures / f"15b{suffix}")
    after = planned(cache, pictures)
    assert unit_of(before, "15.png") not in files(after)
    assert len(set(files(before)) - set(files(after))) <= 3


def test_what_comes_last_leaves_the_earlier_units_alone(pictures: Path, cache: Path) -> None:
    before = files(planned(cache, pictures))
    for number in range(3):
        picture(pictures / f"z{number}.png", 100 + number)
    assert files(planned(cache, pictures))[: len(before) - 1] == before[:-1]


CHANGES = {
    "t5 length": ({**RECIPE, "t5_max_length": 32}, {}),
    "vae": ({**RECIPE, "vae": "another"}, {}),
    "a part of the recipe": ({**RECIPE, "new": 1}, {}),
    "flip": (RECIPE, {"flip": True}),
    "resolution": (RECIPE, {"resolutions": [32]}),
    "shape": (RECIPE, {"resolutions": [[96, 64]]}),
    "sizes": (RECIPE, {"size_buckets": [[96, 64]]}),
    "ratios": (RECIPE, {"enable_ar_bucket": True, "ar_buckets": [0.5, 2.0]}),
    "prefix": (RECIPE, {"caption_prefix": "photo of "}),
    "shuffled tags": (RECIPE, {"shuffle_tags": True, "cache_shuffle_delimiter": ","}),
    "number of shuffles": (RECIPE, {"cache_shuffle_num": 2}),
    "default mask": (RECIPE, {"default_mask_file": "white.png"}),
    "masks": (RECIPE, {"mask_path": "masks"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_touches_all_renames_all(pictures: Path, cache: Path, tmp_path: Path, what: str) -> None:
    recipe, keys = CHANGES[what]
    picture(tmp_path / "white.png", 255, caption=None)
    for number in range(30):
        picture(tmp_path / "masks" / f"{number:02}.png", 255, caption=None)
    paths = {key: tmp_path / value for key, value in keys.items() if key in ("default_mask_file", "mask_path")}
    before = planned(cache, pictures)
    after = planned(cache, [directory(pictures, **{**keys, **paths})], recipe)
    assert sum(unit.count for unit in after.units) == 30
    assert set(files(after)).isdisjoint(files(before))


def test_what_leaves_samples_or_captions_out_is_noticed(pictures: Path, cache: Path) -> None:
    picture(pictures / "15.png", 15, caption=" ")
    before = planned(cache, pictures)
    without = planned(cache, [directory(pictures, skip_empty_caption=True)])
    assert sum(unit.count for unit in without.units) == 29
    assert unit_of(before, "15.png") not in files(without)
    half = planned(cache, [directory(pictures, subsample_ratio=0.5)])
    assert 5 < sum(unit.count for unit in half.units) < 25


def test_shuffles_with_another_delimiter_are_others(pictures: Path, cache: Path) -> None:
    picture(pictures / "15.png", 15, caption="a; b, c; d, e")
    found = [
        unit_of(planned(cache, [directory(pictures, cache_shuffle_num=2, cache_shuffle_delimiter=text)]), "15.png")
        for text in (", ", "; ")
    ]
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "keys",
    [
        {"num_repeats": 2.5},
        {"min_ar": 0.9, "max_ar": 1.1, "num_ar_buckets": 3},
        {"enable_ar_bucket": True, "ar_buckets": [0.5, 1.0, 2.0]},
        {"size_buckets": [[64, 64], [96, 48]]},
        {"skip_empty_caption": True},
        {"cache_shuffle_delimiter": "; "},
    ],
    ids=["repeats", "ratios unused", "the same bucket by ratio", "the same bucket by size", "no empty ones", "unused"],
)
def test_what_touches_no_features_renames_nothing(pictures: Path, cache: Path, keys: dict[str, Any]) -> None:
    assert files(planned(cache, [directory(pictures, **keys)])) == files(planned(cache, pictures))


@pytest.mark.parametrize("what", ["times", "copied", "masks moved"])
def test_other_places_and_times_of_the_same_bytes_rename_nothing(
    pictures: Path, cache: Path, tmp_path: Path, what: str
) -> None:
    masks = tmp_path / "masks"
    for number in range(30):
        picture(masks / f"{number:02}.png", 255, caption=None)
    before = files(planned(cache, [directory(pictures, mask_path=masks)]))
    if what == "times":
        for path in pictures.iterdir():
            os.utime(path, ns=(1, 1))
    if what == "copied":
        pictures = Path(shutil.copytree(pictures, tmp_path / "copy" / "pictures", copy_function=shutil.copyfile))
    if what == "masks moved":
        masks = masks.rename(tmp_path / "other masks")
    assert files(planned(cache, [directory(pictures, mask_path=masks)])) == before


def test_another_directory_leaves_the_first_alone(pictures: Path, cache: Path, tmp_path: Path) -> None:
    before = files(planned(cache, pictures))
    picture(tmp_path / "more" / "a.png")
    for directories in ([tmp_path / "more", pictures], [pictures, tmp_path / "more"]):
        after = files(planned(cache, [directory(path) for path in directories]))
        assert [file for file in after if file.startswith("pictures-0-")] == before
        assert len(after) == len(before) + 1


def test_an_empty_mask_taken_away_renames_its_unit(pictures: Path, cache: Path, tmp_path: Path) -> None:
    """With it the sample was rejected: the unit that stands lacks it."""
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "15.png").touch()
    keys = [directory(pictures, mask_path=tmp_path / "masks")]
    before = planned(cache, keys)
    (tmp_path / "masks" / "15.png").unlink()
    assert unit_of(planned(cache, keys), "15.png") != unit_of(before, "15.png")


# --- rejects -------------------------------------------------------------------------------------


def test_what_cannot_be_used_is_named_and_the_rest_goes_on(pictures: Path, cache: Path) -> None:
    (pictures / "03.png").write_bytes(b"no picture")
    (pictures / "06.png").write_bytes(b"")
    (pictures / "08.txt").unlink()
    found = planned(cache, pictures)
    expected = {"03.png": "not_an_image", "06.png": "empty_file", "08.png": "no_caption"}
    assert {row.key.rsplit("/", 1)[1]: row.reason for row in found.rejected()} == expected
    assert found.counts.rejected == Counter(expected.values())
    assert found.counts.pictures == 27
    used = [name for unit in in_order(found.units) for name in names(found, unit)]
    assert used == [f"{number:02}.png" for number in range(30) if f"{number:02}.png" not in expected]


def test_a_set_without_samples_has_an_empty_plan(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"")
    found = planned(cache, tmp_path / "pictures")
    assert (found.units, found.counts.pictures, found.counts.rejected) == ([], 0, {"no_caption": 1})
