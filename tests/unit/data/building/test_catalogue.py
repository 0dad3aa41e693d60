"""The catalogue: nothing is listed or looked at twice, and every reject is named."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sd3_light.data import preprocess
from sd3_light.data.building import catalogue as module
from sd3_light.data.building import decode
from sd3_light.data.building.catalogue import Catalogue, make_sources, sample_location
from sd3_light.data.building.claims import Claims
from sd3_light.data.building.decode import Probe, SampleLocation
from sd3_light.data.preprocess import Reject
from sd3_light.data.sources.records import FileBytes
from tests.unit.data.building.catalogues import (
    COUNT,
    age,
    directory,
    looked,
    nothing,
    opened,
    parts_of,
    picture,
)
from tests.unit.data.inputs import lay, noise, save, write_tar
from tests.unit.data.inputs import picture as tiny


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty rows fill a few parts."""
    monkeypatch.setattr(module, "PART_ROWS", 8)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)


class Watched:
    """`probe_images` that keeps what it was asked to look at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        monkeypatch.setattr(module, "probe_images", self)

    def __call__(self, places: Sequence[SampleLocation]) -> list[Probe]:
        self.names += [name_of(place) for place in places]
        return decode.probe_images(places)


def name_of(place: SampleLocation) -> str:
    assert isinstance(place.image, FileBytes)
    return Path(place.image.path).name


# --- what is in it -------------------------------------------------------------------------------


def test_every_row_is_there_with_its_size_and_hash(pictures: Path, cache: Path) -> None:
    lay(pictures, {"wide.png": save(noise(size=(40, 20)), "PNG"), "wide.txt": "a wide one"})
    rows = looked(cache, directory(pictures))
    assert list(rows) == [*(f"{number:02}.png" for number in range(COUNT)), "wide.png"]
    wide = rows["wide.png"]
    assert (wide.key, wide.captions, wide.reason) == ("pictures#0/wide.png", ("a wide one",), "")
    assert (wide.width, wide.height) == (40, 20)
    assert wide.digest == decode.content_digest((pictures / "wide.png").read_bytes(), None)
    assert sample_location(wide, pictures) == SampleLocation(FileBytes(str(pictures / "wide.png")), None)
    assert len({row.digest for row in rows.values()}) == COUNT + 1


def test_a_row_is_read_by_its_number(pictures: Path, cache: Path) -> None:
    with opened(cache, directory(pictures)) as (found, listings):
        found.probe_images(listings, 0, nothing)
        (listing,) = listings
        part = listing.parts[0]
        rows = found.rows(part)
        assert len(rows) >= 2
        assert found.rows(part, [1, 0, 1]) == [rows[1], rows[0], rows[1]]
        assert all(len(found.rows(part)) <= 8 for part in listing.parts)


def test_masks_and_members_of_tars_are_found_again(tmp_path: Path, cache: Path) -> None:
    lay(tmp_path, {"set/a.png": tiny(1), "set/a.txt": "a", "masks/a.png": tiny(255)})
    write_tar(tmp_path / "set" / "x.tar", [("b.png", tiny(2)), ("b.txt", b"b")])
    rows = looked(cache, directory(tmp_path / "set", mask_path=tmp_path / "masks"))
    assert sorted(rows) == ["a.png", "b.png"]
    for name, colour in (("a.png", 1), ("b.png", 2)):
        assert sample_location(rows[name], tmp_path / "set").image.read() == tiny(colour)
    mask = sample_location(rows["a.png"], tmp_path / "set").mask
    assert mask is not None
    assert mask.read() == tiny(255)
    assert rows["a.png"].digest == decode.content_digest(tiny(1), tiny(255))


def test_rejects_are_kept_with_their_reasons(pictures: Path, cache: Path) -> None:
    lay(pictures, {"03.png": b"no picture", "06.png": b""})
    (pictures / "08.txt").unlink()
    expected = {"03.png": "not_an_image", "06.png": "empty_file", "08.png": "no_caption"}
    for again in (False, True):
        rows = looked(cache, directory(pictures))
        assert {name: row.reason for name, row in rows.items() if row.reason} == expected, again
        assert rows["03.png"].detail == "it starts with b'no picture'"
        assert json.loads(rows["08.png"].image) == ["08.png"], "so that it can be shown"
        assert Counter(row.reason for row in rows.values() if row.reason) == Counter(expected.values())


def test_equal_names_are_told_apart(tmp_path: Path, cache: Path) -> None:
    for folder in ("x/set", "y/set", "z/ünicode set"):
        picture(tmp_path / folder / "a.png")
    directories = [directory(tmp_path / folder) for folder in ("x/set", "y/set", "z/ünicode set")]
    sources = make_sources(directories)
    assert [source.label for source in sources] == ["set#0", "set#1", "ünicode set#0"]
    assert len({source.name for source in sources}) == 3
    assert all(source.name.isascii() and "/" not in source.name and " " not in source.name for source in sources)
    with opened(cache, *directories) as (found, listings):
        found.probe_images(listings, 0, nothing)
        keys = [row.key for listing in listings for part in listing.parts for row in found.rows(part)]
    assert keys == ["set#0/a.png", "set#1/a.png", "ünicode set#0/a.png"]
    assert [source.label for source in make_sources(directories[::-1])] == ["ünicode set#0", "set#0", "set#1"]


def test_progress_counts_rows_and_pictures(pictures: Path, cache: Path) -> None:
    (pictures / "08.txt").unlink()
    listed: list[int] = []
    seen: list[int] = []
    with Claims(cache / "claims") as claims:
        found = Catalogue(cache, claims)
        listings = found.refresh(make_sources([directory(pictures)]), listed.append)
        assert found.count_unprobed(listings) == COUNT
        found.probe_images(listings, 0, seen.append)
    assert (sum(listed), sum(seen)) == (COUNT, COUNT - 1)


# --- nothing twice -------------------------------------------------------------------------------


def test_what_has_not_changed_is_not_listed_again(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = looked(cache, directory(pictures))
    for name in ("scan", "probe_images"):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("the sources were read again"))
    assert looked(cache, directory(pictures)) == before


def test_the_same_set_elsewhere_is_not_looked_at_again(
    pictures: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = looked(cache, directory(pictures))
    (tmp_path / "moved").mkdir()
    moved = pictures.rename(tmp_path / "moved" / "pictures")
    monkeypatch.setattr(module, "probe_images", lambda *_: pytest.fail("the pictures were read again"))
    after = looked(cache, directory(moved))
    assert after == before
    assert sample_location(after["00.png"], moved).image.read() == (moved / "00.png").read_bytes()


def test_a_new_file_has_its_own_part_looked_at_alone(
    pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked(cache, directory(pictures))
    before = parts_of(cache)
    assert len(before) >= 4
    picture(pictures / "15b.png", 200)
    watched = Watched(monkeypatch)
    rows = looked(cache, directory(pictures))
    assert "15b.png" in rows
    assert "15b.png" in watched.names
    assert len(watched.names) <= 3 * 8, "its part, and as far as the next place to cut"
    assert len(before & parts_of(cache)) >= len(before) - 3


def test_a_changed_file_is_looked_at_again(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = looked(cache, directory(pictures))
    (pictures / "07.png").write_bytes(save(noise(size=(24, 24)), "PNG"))
    watched = Watched(monkeypatch)
    after = looked(cache, directory(pictures))
    assert {name for name in after if after[name].digest != before[name].digest} == {"07.png"}
    assert 1 <= len(watched.names) <= 8, "its part alone: it kept its name"


def test_another_time_of_the_same_bytes_changes_no_hash(pictures: Path, cache: Path) -> None:
    before = looked(cache, directory(pictures))
    os.utime(pictures / "07.png", (1, 1))
    after = looked(cache, directory(pictures))
    assert {name: row.digest for name, row in after.items()} == {name: row.digest for name, row in before.items()}
    assert after["07.png"].version != before["07.png"].version


def test_a_changed_caption_or_setting_is_listed_again(pictures: Path, cache: Path) -> None:
    looked(cache, directory(pictures))
    (pictures / "07.txt").write_text("another")
    assert looked(cache, directory(pictures))["07.png"].captions == ("another",)
    assert looked(cache, directory(pictures, caption_prefix="so "))["07.png"].captions == ("so another",)


def test_another_way_of_looking_looks_again(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a newer version would see in a header is not known from an older one's catalogue."""
    looked(cache, directory(pictures))
    monkeypatch.setattr(module, "PREPROCESS_VERSION", preprocess.PREPROCESS_VERSION + 1)
    watched = Watched(monkeypatch)
    looked(cache, directory(pictures))
    assert len(watched.names) == COUNT


def test_a_lost_part_is_made_again(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = looked(cache, directory(pictures))
    lost = cache / "catalogue" / "parts" / min(parts_of(cache))
    lost.unlink()
    watched = Watched(monkeypatch)
    assert looked(cache, directory(pictures)) == before
    assert 1 <= len(watched.names) <= 8
    assert lost.is_file()


# --- what could not be read ----------------------------------------------------------------------


def test_what_could_not_be_read_is_tried_again(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its time nor its size changes when a disk comes back or a permission is given."""
    real = FileBytes.read

    def read(self: FileBytes) -> bytes:
        if self.path.endswith("07.png"):
            raise Reject("unreadable", "Input/output error")
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(FileBytes, "read", read)
        for _ in range(2):
            rows = looked(cache, directory(pictures))
            assert {name: row.reason for name, row in rows.items() if row.reason} == {"07.png": "unreadable"}
    watched = Watched(monkeypatch)
    assert not any(row.reason for row in looked(cache, directory(pictures)).values())
    assert 1 <= len(watched.names) <= 8, "its part alone"
    watched.names.clear()
    looked(cache, directory(pictures))
    assert watched.names == []


def test_what_could_not_be_listed_is_listed_again(pictures: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.scan

    def scan(*given: Any) -> Iterator[Any]:
        for found in real(*given):
            if found.key.endswith("07.png"):
                yield module.Rejected(found.key, "unreadable", "its caption", found.image)
            else:
                yield found

    with monkeypatch.context() as patch:
        patch.setattr(module, "scan", scan)
        assert looked(cache, directory(pictures))["07.png"].reason == "unreadable"
    assert looked(cache, directory(pictures))["07.png"].reason == ""


# --- forgetting ----------------------------------------------------------------------------------


def test_parts_that_no_listing_has_are_forgotten_in_time(pictures: Path, cache: Path) -> None:
    """Not at once: a run that began before may still read them."""
    looked(cache, directory(pictures))
    before = parts_of(cache)
    (pictures / "07.txt").write_text("another")
    folder = cache / "catalogue" / "parts"
    with opened(cache, directory(pictures)) as (found, listings):
        found.probe_images(listings, 0, nothing)
        wanted = {f"{part}.arrow" for part in listings[0].parts}
        found.prune_except(listings)
        assert parts_of(cache) == before | wanted
        age(list(folder.iterdir()), 8 * 86400)
        found.prune_except(listings)
        assert parts_of(cache) == wanted != before


def test_a_run_shows_which_parts_it_uses(pictures: Path, cache: Path) -> None:
    """An old part, used by a run that has just begun, outlives another run that has no use for it."""
    looked(cache, directory(pictures))
    age(list((cache / "catalogue" / "parts").iterdir()), 8 * 86400)
    with opened(cache, directory(pictures)) as (_, first):
        (pictures / "07.txt").write_text("another")
        with opened(cache, directory(pictures)) as (second, listings):
            second.probe_images(listings, 0, nothing)
            second.prune_except(listings)
        assert {f"{part}.arrow" for part in first[0].parts} <= parts_of(cache)


def test_what_killed_processes_left_is_swept(pictures: Path, cache: Path) -> None:
    with opened(cache, directory(pictures)) as (found, listings):
        found.probe_images(listings, 0, nothing)
        left = [found.folder / ".a.json~elsewhere~1~0.tmp", found.folder / "parts" / ".b.arrow~elsewhere~1~0.tmp"]
        for path in left:
            path.touch()
        age(left, 2 * 86400)
        found.prune_except(listings)
        assert not any(path.exists() for path in left)
