"""Which images are held out: whole groups, the same ones whatever is added later."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sd3_light.data.split import MOST, RECORD, Decisions, ImageSplit, expected_split, largest_split, split_images
from sd3_light.randomness import sample_id
from sd3_light.sources.catalogue import InputRow
from sd3_light.sources.earlier_images import are_similar
from sd3_light.sources.preprocess import THUMBNAIL_SIDE
from tests.refusals import refused


def row(name: str, colour: int | None = None, digest: str = "") -> InputRow:
    thumbnail = b"" if colour is None else bytes([colour]) * (3 * THUMBNAIL_SIDE**2)
    return InputRow(f"set#0/{name}", digest=digest or f"digest of {name}", thumbnail=thumbnail)


def divide(rows: list[InputRow], record: Path, fixed: frozenset[str] = frozenset()) -> dict[str, str]:
    split = split_images(lambda: ((each, each.key not in fixed) for each in rows), record)
    assert split.images == len(rows)
    names = {sample_id(each.key): each.key.removeprefix("set#0/") for each in rows}
    sides = dict.fromkeys(names.values(), "train")
    sides |= {names[number]: "validation" for number in split.validation}
    return sides | {names[number]: "unused" for number in split.unused}


def sides_of_groups(sides: dict[str, str]) -> dict[str, set[str]]:
    by_group: dict[str, set[str]] = {}
    for name, side in sides.items():
        by_group.setdefault(name.split("/")[0], set()).add(side)
    return by_group


def held(sides: dict[str, str]) -> set[str]:
    return {name for name, side in sides.items() if side == "validation"}


@pytest.mark.parametrize(
    ("images", "fewest", "most"),
    [(1, 0, 0), (2, 1, 1), (3, 1, 1), (4, 2, 2), (20, 2, 2), (49, 2, 2), (1000, 8, 40), (40_000, MOST, MOST)],
)
def test_the_size_of_the_split(tmp_path: Path, images: int, fewest: int, most: int) -> None:
    sides = divide([row(str(number)) for number in range(images)], tmp_path / RECORD)
    assert fewest <= len(held(sides)) <= most
    assert "unused" not in sides.values()
    assert expected_split(images) <= largest_split(images)


def test_groups_stay_together(tmp_path: Path) -> None:
    """Copies and similar images of 400 groups of three."""
    rows = []
    for number in range(400):
        colour = None if number > 20 else 12 * number
        digest = f"content {number}"
        rows += [row(f"{number}/a", colour, digest), row(f"{number}/b", None, digest)]
        rows += [row(f"{number}/c", colour if colour is None else colour + 6, "" if colour is not None else digest)]
    sides = divide(rows, tmp_path / RECORD)
    by_group = sides_of_groups(sides)
    assert all(len(group) == 1 for group in by_group.values())
    # the first 21 are one group, larger than the split may be: each is similar to the next
    assert all(by_group[str(number)] == {"train"} for number in range(21))
    assert 0 < len(held(sides)) <= largest_split(1200)


def test_images_of_one_reference_stay_together(tmp_path: Path) -> None:
    """Two edits of each of 200 images, and a third that starts from the result of the first."""
    rows = []
    for number in range(200):
        source, first = f"source {number}", f"first {number}"
        rows.append(replace(row(f"{number}/a", digest=first), reference_digests=(source,)))
        rows.append(replace(row(f"{number}/b"), reference_digests=(source,)))
        rows.append(replace(row(f"{number}/c"), reference_digests=(first,)))
    sides = divide(rows, tmp_path / RECORD)
    assert all(len(group) == 1 for group in sides_of_groups(sides).values())
    assert 0 < len(held(sides)) <= largest_split(600)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 120), min_size=2, max_size=5))
def test_added_images_change_no_side(tmp_path_factory: pytest.TempPathFactory, seed: int, sizes: list[int]) -> None:
    record = tmp_path_factory.mktemp("split") / RECORD
    rng = np.random.default_rng(seed)
    rows: list[InputRow] = []
    before: dict[str, str] = {}
    for size in sizes:
        colours = rng.integers(0, 256, size) if rng.random() < 0.3 else [None] * size
        rows += [row(f"{len(rows)}/{at}", None if colour is None else int(colour)) for at, colour in enumerate(colours)]
        rng.shuffle(rows)  # type: ignore[arg-type]
        sides = divide(rows, record)
        assert before.items() <= sides.items()
        most = 0 if held(before) else len(rows) // 2  # more only if every group is larger than that
        assert len(held(sides)) <= max(largest_split(len(rows)), len(held(before)), most)
        assert divide(rows, record) == sides, "a second run decides the same"
        before = sides


def test_added_images_join_the_side_of_their_group(tmp_path: Path) -> None:
    rows = [row(str(number), colour) for number, colour in enumerate((0, 40, 80, 120, 160, 200, 240))]
    sides = divide(rows, tmp_path / RECORD)
    (one, *_) = sorted(held(sides))
    trained = sorted(set(sides) - held(sides))[0]
    colours = {each.key.removeprefix("set#0/"): each.thumbnail[0] for each in rows}
    more = [row(f"new {number}") for number in range(600)]
    like = [row("like held", colours[one] + 3), row("like trained", colours[trained] + 3)]
    after = divide([*rows, *more, *like], tmp_path / RECORD)
    assert (after["like held"], after["like trained"]) == ("validation", "train")
    assert sides.items() <= after.items()


def test_an_image_that_resembles_both_sides_is_on_neither(tmp_path: Path) -> None:
    """Colours 0 and 20 differ; 10 is similar to both. So is what is similar to 10 alone."""
    rows = [row("dark", 0), row("light", 20), *(row(str(number)) for number in range(30))]
    for attempt in range(200):  # until the two are on different sides
        record = tmp_path / f"{attempt}.arrow"
        rows[0] = row(f"dark {attempt}", 0)
        sides = divide(rows, record)
        if sides[f"dark {attempt}"] != sides["light"]:
            break
    assert {sides[f"dark {attempt}"], sides["light"]} == {"train", "validation"}
    after = divide([*rows, row("bridge", 10), row("near the bridge", 10, "another")], record)
    assert (after["bridge"], after["near the bridge"]) == ("unused", "unused")
    assert sides.items() <= after.items()
    # without the others it stays unused: it was similar to an image of each side
    alone = divide([row("bridge", 10), *rows[2:]], record)
    assert alone["bridge"] == "unused"


def test_a_few_added_images_are_compared_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known images are compared with the new ones, not with each other."""
    rng = np.random.default_rng(0)

    def noisy(number: int) -> InputRow:
        pixels = rng.integers(100, 140, 3 * THUMBNAIL_SIDE**2, dtype=np.uint8)  # no colour tells them apart
        return replace(row(str(number)), thumbnail=pixels.tobytes())

    rows = [noisy(number) for number in range(300)]
    sides = divide(rows, tmp_path / RECORD)
    compare = Mock(wraps=are_similar)
    monkeypatch.setattr("sd3_light.sources.earlier_images.are_similar", compare)
    assert sides.items() <= divide([noisy(300), *rows, noisy(301)], tmp_path / RECORD).items()
    assert sum(len(call.args[1]) for call in compare.call_args_list) <= 2 * 300 + 1
    compare.reset_mock()
    divide(rows, tmp_path / RECORD)
    compare.assert_not_called()  # nothing is new


def test_an_edited_image_keeps_its_side(tmp_path: Path) -> None:
    rows = [row(str(number)) for number in range(30)]
    sides = divide(rows, tmp_path / RECORD)
    edited = [row(str(number), digest=f"edited {number}") for number in range(30)]
    assert divide(edited, tmp_path / RECORD) == sides
    moved = [row(f"moved {number}", digest=f"digest of {number}") for number in range(30)]
    assert {name.removeprefix("moved "): side for name, side in divide(moved, tmp_path / RECORD).items()} == sides


def test_a_full_split_takes_no_more(tmp_path: Path) -> None:
    rows = [row(str(number), colour) for number, colour in enumerate(range(0, 250, 25))]
    sides = divide(rows, tmp_path / RECORD)
    held_row = next(each for each in rows if each.key.removeprefix("set#0/") in held(sides))
    after = divide([*rows, row("copy", digest=held_row.digest)], tmp_path / RECORD)
    assert after["copy"] == "unused", "trained, it would leak; held out, there are too many"
    assert divide([*rows, row("copy", digest=held_row.digest)], tmp_path / RECORD) == after


def test_images_of_other_directories_are_trained_on(tmp_path: Path) -> None:
    rows = [row(str(number)) for number in range(40)]
    fixed = frozenset(each.key for each in rows[:30])
    sides = divide(rows, tmp_path / RECORD, fixed)
    assert len(held(sides)) == 2
    assert held(sides) <= {str(number) for number in range(30, 40)}
    copies = [row(f"copy {number}", digest=f"digest of {number}") for number in range(30)]
    both = divide([*rows[:30], *copies], tmp_path / "other.arrow", fixed)
    assert not held(both), "every group has an image that is always trained on"


def test_the_smallest_group_is_held_out_if_all_are_large(tmp_path: Path) -> None:
    rows = [row(f"{group}/{at}", digest=str(group)) for group, size in ((0, 12), (1, 5), (2, 7)) for at in range(size)]
    assert held(divide(rows, tmp_path / RECORD)) == {f"1/{at}" for at in range(5)}
    equal = [row(str(number), digest="one") for number in range(20)]
    assert not held(divide(equal, tmp_path / "equal.arrow")), "there is nothing to train on then"


def test_the_sentence() -> None:
    assert ImageSplit(20, (1, 2), ()).sentence() == "2 of 20 images are held out"
    assert ImageSplit(20, (1, 2), (3,)).sentence().endswith("; 1 that resemble held-out ones are not used")
    assert ImageSplit(1, (), ()).sentence().startswith("none of 1 images can be held out")


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    divide([row(str(number)) for number in range(20)], tmp_path / RECORD)
    (tmp_path / RECORD).write_bytes((tmp_path / RECORD).read_bytes()[:100])
    refused(r"sides\.arrow is damaged .* restore it, or delete it", Decisions.load, tmp_path / RECORD)
