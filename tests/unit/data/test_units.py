"""Units of work: a pure function of the sources, and a change renames exactly what it touches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sd3_light.config import DatasetConfig, DirectoryConfig
from sd3_light.data.units import Plan, Unit, count_reasons, plan_units

RECIPE = {"t5_max_length": 16, "vae": "abc"}


def picture(path: Path, colour: int = 0, size: tuple[int, int] = (64, 64), caption: str | None = "a, b, c") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 0, 0)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Ten pictures, in units of four: 4 + 4 + 2."""
    for number in range(10):
        picture(tmp_path / "pictures" / f"{number}.png", number)
    return tmp_path / "pictures"


def directory(path: Path, **keys: Any) -> DirectoryConfig:
    return DirectoryConfig(path=path, **({} if "size_buckets" in keys else {"resolutions": [64]}) | keys)


def plan(
    directories: Sequence[DirectoryConfig] | Path, recipe: dict[str, Any] = RECIPE, seed: int = 0, size: int = 4
) -> Plan:
    if isinstance(directories, Path):
        directories = [directory(directories)]
    return plan_units(DatasetConfig(Path("data.toml"), Path("cache"), tuple(directories)), recipe, seed, size)


def files(units: Plan | Sequence[Unit]) -> list[str]:
    return [unit.entry.file for unit in (units.units if isinstance(units, Plan) else units)]


def names(unit: Unit) -> list[str]:
    return [member.record.key.rsplit("/", 1)[1] for member in unit.members]


# --- what makes a unit -------------------------------------------------------------------------


def test_samples_come_in_the_order_of_the_scan_in_units_of_the_shard_size(pictures: Path) -> None:
    found = plan(pictures)
    assert [names(unit) for unit in found.units] == [
        [f"{number}.png" for number in range(0, 4)],
        [f"{number}.png" for number in range(4, 8)],
        ["8.png", "9.png"],
    ]
    assert [unit.number for unit in found.units] == [0, 1, 2]
    assert len(set(files(found))) == 3
    assert [len(unit.members) for unit in plan(pictures, size=100).units] == [10]


def test_planning_twice_gives_the_same_names(pictures: Path) -> None:
    assert files(plan(pictures)) == files(plan(pictures))


def test_where_the_folder_lies_means_nothing(pictures: Path, tmp_path: Path) -> None:
    before = files(plan(pictures))
    (tmp_path / "moved").mkdir()
    assert files(plan(pictures.rename(tmp_path / "moved" / "pictures"))) == before


def test_each_bucket_has_units_of_its_own(tmp_path: Path) -> None:
    for number, size in enumerate([(64, 64), (80, 48), (48, 80), (64, 64), (80, 48)]):
        picture(tmp_path / "pictures" / f"{number}.png", number, size)
    found = plan([directory(tmp_path / "pictures", size_buckets=[[64, 64], [80, 48], [48, 80]])])
    assert {str(unit.bucket): names(unit) for unit in found.units} == {
        "48x80": ["2.png"],
        "64x64": ["0.png", "3.png"],
        "80x48": ["1.png", "4.png"],
    }
    assert [unit.resolution for unit in found.units] == [(48, 80), (64, 64), (80, 48)], "a size bucket is its own"


def test_a_sample_is_in_one_unit_of_each_resolution(pictures: Path) -> None:
    found = plan([directory(pictures, resolutions=[32, 64])], size=10)
    assert [(unit.resolution, len(unit.members)) for unit in found.units] == [((32, 32), 10), ((64, 64), 10)]


def test_equal_directories_are_told_apart(pictures: Path) -> None:
    found = plan([directory(pictures), directory(pictures)])
    assert [unit.directory for unit in found.units] == [0, 0, 0, 1, 1, 1]
    assert len(set(files(found))) == 6
    keys = [member.record.key for unit in found.units for member in unit.members]
    assert len(set(keys)) == 20


def test_crops_and_enlargements_are_counted(tmp_path: Path) -> None:
    picture(tmp_path / "pictures" / "fits.png", size=(128, 128))
    picture(tmp_path / "pictures" / "small.png", size=(32, 32))
    picture(tmp_path / "pictures" / "wide.png", size=(200, 100))
    found = plan(tmp_path / "pictures")
    assert (found.cropped, found.enlarged) == (1, 1)


def test_captions_are_those_that_will_be_encoded(pictures: Path) -> None:
    found = plan([directory(pictures, shuffle_tags=True, cache_shuffle_num=3, caption_prefix="photo of ")])
    for unit in found.units:
        for member in unit.members:
            assert len(member.captions) == 3
            assert all(caption.startswith("photo of ") for caption in member.captions)
            assert all(
                sorted(caption.removeprefix("photo of ").split(", ")) == ["a", "b", "c"] for caption in member.captions
            )


# --- what renames a unit -----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["caption", "picture", "name"])
def test_a_changed_sample_renames_its_unit_alone(pictures: Path, what: str) -> None:
    before = files(plan(pictures))
    if what == "caption":
        (pictures / "5.txt").write_text("another")
    elif what == "picture":
        picture(pictures / "5.png", 200)
    else:
        for suffix in (".png", ".txt"):
            (pictures / f"5{suffix}").rename(pictures / f"5b{suffix}")
    after = files(plan(pictures))
    assert (before[0], before[2]) == (after[0], after[2])
    assert before[1] != after[1]


def test_what_comes_last_leaves_the_earlier_units_alone(pictures: Path) -> None:
    before = files(plan(pictures))
    for number in range(3):
        picture(pictures / f"z{number}.png", 100 + number)
    after = files(plan(pictures))
    assert after[:2] == before[:2]
    assert before[2] not in after
    assert len(after) == 4


def test_a_changed_mask_renames_its_unit_alone(pictures: Path, tmp_path: Path) -> None:
    for number in range(10):
        picture(tmp_path / "masks" / f"{number}.png", 255, caption=None)
    with_masks = [directory(pictures, mask_path=tmp_path / "masks")]
    before = files(plan(with_masks))
    assert set(before).isdisjoint(files(plan(pictures)))
    picture(tmp_path / "masks" / "9.png", 100, caption=None)
    after = files(plan(with_masks))
    assert before[:2] == after[:2]
    assert before[2] != after[2]


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ({**RECIPE, "t5_max_length": 32}, {}),
        ({**RECIPE, "vae": "another"}, {}),
        (RECIPE, {"flip": True}),
        (RECIPE, {"resolutions": [32]}),
        (RECIPE, {"caption_prefix": "photo of "}),
    ],
    ids=["t5 length", "vae", "flip", "resolution", "prefix"],
)
def test_what_touches_all_renames_all(pictures: Path, recipe: dict[str, Any], keys: dict[str, Any]) -> None:
    after = plan([directory(pictures, **keys)], recipe)
    assert len(after.units) == 3
    assert set(files(after)).isdisjoint(files(plan(pictures)))


def test_repeats_rename_nothing(pictures: Path) -> None:
    """How often a sample is shown is a matter of the order, not of the cache."""
    assert files(plan([directory(pictures, num_repeats=2.5)])) == files(plan(pictures))


def test_the_seed_matters_only_where_tags_are_shuffled(pictures: Path) -> None:
    shuffled = [directory(pictures, shuffle_tags=True, cache_shuffle_num=4)]
    assert files(plan(pictures, seed=1)) == files(plan(pictures, seed=2))
    assert files(plan(shuffled, seed=1)) != files(plan(shuffled, seed=2))


# --- rejects -----------------------------------------------------------------------------------


def test_what_cannot_be_used_is_named_and_the_rest_goes_on(pictures: Path) -> None:
    (pictures / "3.png").write_bytes(b"no picture")
    (pictures / "6.png").write_bytes(b"")
    (pictures / "8.txt").unlink()
    found = plan(pictures)
    assert {reject.key.rsplit("/", 1)[1]: reject.reason for reject in found.rejected} == {
        "3.png": "not_an_image",
        "6.png": "empty_file",
        "8.png": "no_caption",
    }
    assert [names(unit) for unit in found.units] == [
        ["0.png", "1.png", "2.png", "4.png"],
        ["5.png", "7.png", "9.png"],
    ]
    assert count_reasons(found.rejected) == {"not_an_image": 1, "empty_file": 1, "no_caption": 1}
