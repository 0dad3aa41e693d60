"""The catalogue: unchanged inputs are not listed or probed again, and every reject is reported."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sd3_light.sources import catalogue as module
from sd3_light.sources import decode, preprocess
from sd3_light.sources.catalogue import sample_location
from sd3_light.sources.decode import Probe, SampleLocation
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import FileBytes
from tests.unit.sources.catalogues import (
    COUNT,
    age,
    directory,
    ignore,
    list_and_probe,
    name_of,
    open_catalogue,
    parts_of,
    write_image,
)
from tests.unit.sources.inputs import noise, save, write_files, write_tar
from tests.unit.sources.inputs import png as tiny

pytestmark = pytest.mark.usefixtures("small_parts")


class RecordingProbe:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        monkeypatch.setattr(module, "probe_images", self)

    def __call__(self, locations: Sequence[SampleLocation]) -> list[Probe]:
        self.names += [name_of(location) for location in locations]
        return decode.probe_images(locations)


def test_every_row_has_its_size_and_hash(images: Path, cache: Path) -> None:
    write_files(images, {"wide.png": save(noise(size=(40, 20)), "PNG"), "wide.txt": "a wide one"})
    rows = list_and_probe(cache, directory(images))
    assert list(rows) == [*(f"{number:02}.png" for number in range(COUNT)), "wide.png"]
    wide = rows["wide.png"]
    assert (wide.key, wide.captions, wide.reason) == ("images#0/wide.png", ("a wide one",), "")
    assert (wide.width, wide.height) == (40, 20)
    assert wide.digest == decode.content_digest((images / "wide.png").read_bytes())
    assert sample_location(wide, images) == SampleLocation(FileBytes(str(images / "wide.png")), None)
    assert len({row.digest for row in rows.values()}) == COUNT + 1


def test_rows_are_read_by_number(images: Path, cache: Path) -> None:
    with open_catalogue(cache, directory(images)) as (catalogue, listings):
        catalogue.probe_images(listings, 0, ignore)
        (listing,) = listings
        part = listing.parts[0]
        rows = catalogue.rows(part)
        assert len(rows) >= 2
        assert catalogue.rows(part, [1, 0, 1]) == [rows[1], rows[0], rows[1]]
        assert all(len(catalogue.rows(part)) <= 8 for part in listing.parts)


def test_locations_of_masks_and_tar_members_are_restored(tmp_path: Path, cache: Path) -> None:
    write_files(tmp_path, {"set/a.png": tiny(1), "set/a.txt": "a", "masks/a.png": tiny(255)})
    write_tar(tmp_path / "set" / "x.tar", [("b.png", tiny(2)), ("b.txt", b"b")])
    rows = list_and_probe(cache, directory(tmp_path / "set", mask_path=tmp_path / "masks"))
    assert sorted(rows) == ["a.png", "b.png"]
    for name, colour in (("a.png", 1), ("b.png", 2)):
        assert sample_location(rows[name], tmp_path / "set").image.read() == tiny(colour)
    mask = sample_location(rows["a.png"], tmp_path / "set").mask
    assert mask is not None
    assert mask.read() == tiny(255)
    assert rows["a.png"].digest == decode.content_digest(tiny(1))
    assert rows["a.png"].mask_digest == decode.content_digest(tiny(255))


def test_rejects_are_stored_with_their_reasons(images: Path, cache: Path) -> None:
    write_files(images, {"03.png": b"no image", "06.png": b""})
    (images / "08.txt").unlink()
    expected = {"03.png": "not_an_image", "06.png": "empty_file", "08.png": "no_caption"}
    for again in (False, True):
        rows = list_and_probe(cache, directory(images))
        assert {name: row.reason for name, row in rows.items() if row.reason} == expected, again
        assert rows["03.png"].detail == "starts with b'no image'"
        assert json.loads(rows["08.png"].image) == ["08.png"], "needed to show it on the inspect page"
        assert Counter(row.reason for row in rows.values() if row.reason) == Counter(expected.values())


def test_unchanged_sources_are_not_listed_again(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list_and_probe(cache, directory(images))
    for name in ("scan", "probe_images"):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("the sources were read again"))
    assert list_and_probe(cache, directory(images)) == before


def test_a_moved_folder_is_known(images: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list_and_probe(cache, directory(images))
    (tmp_path / "moved").mkdir()
    moved = images.rename(tmp_path / "moved" / "images")
    monkeypatch.setattr(module, "probe_images", lambda *_: pytest.fail("the images were read again"))
    after = list_and_probe(cache, directory(moved))
    assert after == before
    assert sample_location(after["00.png"], moved).image.read() == (moved / "00.png").read_bytes()


def test_of_a_new_file_only_its_part_is_probed(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list_and_probe(cache, directory(images))
    before = parts_of(cache)
    assert len(before) >= 4
    write_image(images / "15b.png", 200)
    probe = RecordingProbe(monkeypatch)
    rows = list_and_probe(cache, directory(images))
    assert "15b.png" in rows
    assert "15b.png" in probe.names
    assert len(probe.names) <= 3 * 8, "its part, up to the next content-defined end"
    assert len(before & parts_of(cache)) >= len(before) - 3


def test_a_new_preprocess_version_probes_again(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer version may read headers differently."""
    list_and_probe(cache, directory(images))
    monkeypatch.setattr(module, "PREPROCESS_VERSION", preprocess.PREPROCESS_VERSION + 1)
    probe = RecordingProbe(monkeypatch)
    list_and_probe(cache, directory(images))
    assert len(probe.names) == COUNT


def test_a_lost_part_is_rebuilt(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list_and_probe(cache, directory(images))
    lost = cache / "catalogue" / "parts" / min(parts_of(cache))
    lost.unlink()
    probe = RecordingProbe(monkeypatch)
    assert list_and_probe(cache, directory(images)) == before
    assert 1 <= len(probe.names) <= 8
    assert lost.is_file()


def test_unreadable_images_are_retried(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither time nor size of a file changes when a disk returns or a permission is granted."""
    real = FileBytes.read

    def read(self: FileBytes) -> bytes:
        if self.path.endswith("07.png"):
            raise Reject("unreadable", "Input/output error")
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(FileBytes, "read", read)
        for _ in range(2):
            rows = list_and_probe(cache, directory(images))
            assert {name: row.reason for name, row in rows.items() if row.reason} == {"07.png": "unreadable"}
    probe = RecordingProbe(monkeypatch)
    assert not any(row.reason for row in list_and_probe(cache, directory(images)).values())
    assert 1 <= len(probe.names) <= 8, "only its part"
    probe.names.clear()
    list_and_probe(cache, directory(images))
    assert probe.names == []


def test_unreadable_captions_are_listed_again(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.scan

    def scan(*args: Any, **keys: Any) -> Iterator[Any]:
        for entry in real(*args, **keys):
            if entry.key.endswith("07.png"):
                yield module.Rejected(entry.key, "unreadable", "its caption", entry.image)
            else:
                yield entry

    with monkeypatch.context() as patch:
        patch.setattr(module, "scan", scan)
        assert list_and_probe(cache, directory(images))["07.png"].reason == "unreadable"
    assert list_and_probe(cache, directory(images))["07.png"].reason == ""


def test_unlisted_parts_and_temporary_files_are_pruned_after_a_while(images: Path, cache: Path) -> None:
    """Not immediately: a run that started earlier may still read them."""
    list_and_probe(cache, directory(images))
    before = parts_of(cache)
    (images / "07.txt").write_text("another")
    folder = cache / "catalogue" / "parts"
    with open_catalogue(cache, directory(images)) as (catalogue, listings):
        catalogue.probe_images(listings, 0, ignore)
        wanted = {f"{part}.arrow" for part in listings[0].parts}
        catalogue.prune_except(listings)
        assert parts_of(cache) == before | wanted
        leftovers = [folder.parent / ".a.json~elsewhere~1~0.tmp", folder / ".b.arrow~elsewhere~1~0.tmp"]
        for path in leftovers:
            path.touch()
        age([*folder.iterdir(), leftovers[0]], 8 * 86400)
        catalogue.prune_except(listings)
        assert parts_of(cache) == wanted != before
        assert not leftovers[0].exists()


def test_a_run_marks_the_parts_it_uses(images: Path, cache: Path) -> None:
    """An old part that a new run uses is not pruned by another run."""
    list_and_probe(cache, directory(images))
    age(list((cache / "catalogue" / "parts").iterdir()), 8 * 86400)
    with open_catalogue(cache, directory(images)) as (_, first):
        (images / "07.txt").write_text("another")
        with open_catalogue(cache, directory(images)) as (second, listings):
            second.probe_images(listings, 0, ignore)
            second.prune_except(listings)
        assert {f"{part}.arrow" for part in first[0].parts} <= parts_of(cache)
