import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sd3_light.sources.locations import location_from_text, location_text
from sd3_light.sources.parquet import ParquetCell
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.records import FileBytes, FileRange, Location, Record, location_version
from sd3_light.sources.scan import scan
from sd3_light.sources.signature import signature
from tests.unit.sources.inputs import directory, png, write_files, write_tar

NOT_UTF8 = os.fsdecode(b"caf\xe9.jpg")
LOCATIONS = [
    (FileBytes("/data/set/sub/a.jpg"), '["sub/a.jpg"]'),
    (FileBytes("/data/set/日本.jpg"), '["日本.jpg"]'),
    (FileBytes(f"/data/set/{NOT_UTF8}"), r'["caf\udce9.jpg"]'),
    (FileBytes("/data/set2/a.jpg"), '["/data/set2/a.jpg"]'),
    (FileBytes("/data/set//a.jpg"), '["/data/set//a.jpg"]'),
    (FileRange("/data/set/00.tar", 512, 77), '["00.tar",512,77]'),
    (FileRange("/data/set", 512, 77), '["",512,77]'),
    (ParquetCell("/data/set/0.parquet", "image", 3, 14), '["0.parquet","image",3,14]'),
    (ParquetCell("/data/set/0.parquet", "image", 3, 14, 2000), '["0.parquet","image",3,14,2000]'),
    (None, ""),
]


@pytest.mark.parametrize(("location", "text"), LOCATIONS)
def test_locations_round_trip_as_short_texts(location: Location | None, text: str) -> None:
    assert location_text(location, Path("/data/set")) == text
    assert location_from_text(text, Path("/data/set")) == location
    assert location_text(location, Path("/data/set")).isprintable()


@pytest.mark.parametrize("root", ["/", "/data", "/elsewhere"])
@pytest.mark.parametrize("location", [location for location, _ in LOCATIONS])
def test_locations_round_trip_for_any_root(location: Location | None, root: str) -> None:
    assert location_from_text(location_text(location, Path(root)), Path(root)) == location


def test_an_invalid_location_is_an_error() -> None:
    with pytest.raises(ValueError, match="is not a location"):
        location_from_text('["a", 1]', Path("/data"))


def test_versions_follow_the_file(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "set.tar", [("a.png", png()), ("a.txt", b"a")])
    (item,) = scan(directory(path), 0)
    assert isinstance(item, Record)
    before = location_version(item.image)
    os.utime(path, ns=(1, 1))
    assert location_version(item.image) == before.split("-")[0] + "-1"
    path.unlink()
    for location in (item.image, FileBytes(str(path)), ParquetCell(str(path), "image", 0, 0)):
        with pytest.raises(Reject, match="unreadable"):
            location_version(location)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    read = {"a.jpg": png(), "a.txt": "a", "sub/b.png": png(), "sub/b.txt": "b", "0.parquet": b"", "captions.json": "{}"}
    write_files(tmp_path / "set", {**read, ".hidden.jpg": "x", "notes.md": "x", "cache/0.safetensors": "x"})
    write_files(tmp_path, {"masks/a.png": png(), "default.png": png()})
    return tmp_path


def sign(place: Path, index: int = 0, **keys: Any) -> str:
    keys = {"mask_path": place / "masks", "default_mask_file": place / "default.png"} | keys
    return signature(directory(place / "set", **keys), index)


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def same_time(path: Path, content: bytes) -> None:
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "another size": lambda place: same_time(place / "set/a.jpg", b"x"),
    "another time": lambda place: touch(place / "set/sub/b.png"),
    "a caption's time": lambda place: touch(place / "set/sub/b.txt"),
    "a table's time": lambda place: touch(place / "set/captions.json"),
    "a new image": lambda place: write_files(place / "set", {"sub/deep/c.jpg": b""}),
    "a new tar": lambda place: write_files(place / "set", {"c.tar": b""}),
    "an image that is not read": lambda place: write_files(place / "set", {"c.heic": b""}),
    "one gone": lambda place: (place / "set/a.txt").unlink(),
    "a new name": lambda place: (place / "set/a.jpg").rename(place / "set/c.jpg"),
    "a new place": lambda place: (place / "set/a.jpg").rename(place / "set/sub/a.jpg"),
    "a mask's time": lambda place: touch(place / "masks/a.png"),
    "a new mask": lambda place: write_files(place / "masks", {"sub/b.png": b""}),
    "the default mask's time": lambda place: touch(place / "default.png"),
    "a link up": lambda place: (place / "set/up").symlink_to(place / "set"),
    "a caption file": lambda place: write_files(place / "set", {"a.caption": b""}),
    "a caption file of another case": lambda place: write_files(place / "set", {"sub/c.TXT": b""}),
    "a table of another name": lambda place: write_files(place / "set", {"sub/labels.csv": b""}),
    "JSON lines of another name": lambda place: write_files(place / "set", {"labels.JSONL": b""}),
    "a table of sd-scripts": lambda place: write_files(place / "set", {"meta_cap.json": b""}),
}
OF_RUNS = ("cache/1.safetensors", "cache/manifest.json", "cache/rejects.jsonl", "run/log.jsonl")
NO_CHANGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda place: None,
    "a hidden file": lambda place: touch(place / "set/.hidden.jpg"),
    "a file of another kind": lambda place: touch(place / "set/notes.md"),
    "a cache inside": lambda place: write_files(place / "set", dict.fromkeys(OF_RUNS, b"")),
    "an empty folder": lambda place: (place / "set/empty").mkdir(),
    "a mask that is none": lambda place: write_files(place / "masks", {"a.txt": b""}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_signature_changes_with_what_a_scan_looks_at(place: Path, change: str) -> None:
    before = sign(place)
    CHANGES[change](place)
    assert sign(place) != before


@pytest.mark.parametrize("change", NO_CHANGES)
def test_the_signature_ignores_other_changes(place: Path, change: str) -> None:
    before = sign(place)
    NO_CHANGES[change](place)
    assert sign(place) == before


SETTINGS: dict[str, Any] = {
    **{"caption_prefix": "x", "image_column": "x", "caption_column": "x", "where": "x > 1", "subsample_ratio": 0.5},
    **{"skip_empty_caption": True, "shuffle_tags": True, "cache_shuffle_num": 3, "cache_shuffle_delimiter": ";"},
    **{"mask_path": None, "default_mask_file": None, "index": 1},
}


def test_every_scan_setting_changes_the_signature(place: Path) -> None:
    signatures = [sign(place), *(sign(place, **{key: value}) for key, value in SETTINGS.items())]
    assert len(set(signatures)) == len(signatures)
    assert sign(place, num_repeats=3.0, flip=True) == sign(place)


def test_a_moved_dataset_has_the_same_signature(place: Path) -> None:
    keys = {"mask_path": None, "default_mask_file": None}
    shutil.copytree(place / "set", place / "other/set")
    assert sign(place / "other", **keys) == sign(place, **keys)
