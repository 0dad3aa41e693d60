"""A scan's memory does not grow with the number of rows, and only by the names of files and members."""

import json
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sd3_light.sources import rows, tables
from sd3_light.sources.listing import FolderNames
from sd3_light.sources.records import Record, Rejected
from sd3_light.sources.scan import scan
from sd3_light.sources.signature import signature
from tests.refusals import refused
from tests.unit.sources.inputs import captions, directory, png, rejects, scan_items, write_files, write_tar

NOT_UTF8 = os.fsdecode(b"a\xe9.jpg")
ODD_NAMES = ["a", "a-b.jpg", "a.jpg", "a.", "a.b.jpg", "a.txt", "aé.jpg", NOT_UTF8, "\U0001f600.png", "\uffff.png"]


def test_names_are_sorted_like_python_strings_and_found_by_their_stem() -> None:
    expected = [*ODD_NAMES, "a.jpg.txt", *(f"{n}.jpg" for n in range(50))]
    names = FolderNames(dict.fromkeys(random.Random(0).sample(expected, len(expected)), "note"))
    assert list(names) == sorted(expected)
    assert all(name in names and names.note(name) == "note" for name in expected)
    assert "b.jpg" not in names
    assert names.note("b.jpg") == ""
    assert list(names.with_stem("a")) == ["a", "a.", "a.jpg", "a.txt"]
    assert list(names.with_stem("a.b")) == ["a.b.jpg"]
    assert list(names.with_stem("a.jpg")) == ["a.jpg.txt"]
    assert list(names.with_stem("b")) == []


def test_a_caption_belongs_to_a_file_of_exactly_its_stem(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.webp": png(), "a.txt": "a", "b.png": png(), "b.png.txt": "b", "c": "", "c.txt": "c"})
    items = scan_items(tmp_path)
    assert captions(items) == {"a.webp": ("a",)}
    assert rejects(items) == {"b.png": "no_caption", "b.png.txt": "missing_file"}


class Entry:
    def __init__(self, folder: str, name: str) -> None:
        self.name, self.path = name, f"{folder}/{name}"

    def is_dir(self) -> bool:
        return False

    def stat(self) -> os.stat_result:
        return os.stat(os.path.dirname(self.path))


class Listing:
    """A fake folder of many files that exist only while they are listed."""

    def __init__(self, count: int, folder: str) -> None:
        self._folder, self._count = folder, count

    def __enter__(self) -> Iterator[Entry]:
        return (Entry(self._folder, f"{n * 7919 % self._count:09d}.jpg") for n in range(self._count))

    def __exit__(self, *fault: object) -> None:
        pass


FEW, MANY = 400, 1600


def peak(work: Callable[[], object]) -> int:
    work()  # fill caches first
    tracemalloc.start()
    work()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


NAME_BYTES = 250
"""A name with its place in a dict and in a list."""


def assert_grows(few: int, many: int, most: int) -> None:
    """Assert that at most that many bytes are kept per item."""
    assert many - few < most * (MANY - FEW)


def count(path: Path, kind: type, **keys: Any) -> int:
    return sum(isinstance(item, kind) for item in scan(directory(path, **keys), 0))


def test_of_a_large_folder_only_the_names_are_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans, signatures = [], []
    for size in (FEW, MANY):
        monkeypatch.setattr(os, "scandir", partial(Listing, size))
        assert count(tmp_path, Rejected) == size
        scans.append(peak(lambda: count(tmp_path, Rejected)))
        signatures.append(peak(lambda: signature(directory(tmp_path), 0)))
    monkeypatch.undo()  # the folder is removed with the real function
    assert_grows(*scans, NAME_BYTES)
    assert_grows(*signatures, 10)


def test_of_many_masks_only_the_names_are_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_files(tmp_path / "set", {"000000007.jpg": png(), "000000007.txt": "x"})
    masks = write_files(tmp_path / "masks", {"000000007.jpg": b"mask"})
    listed, peaks = os.scandir, []
    for size in (FEW, MANY):
        fake = partial(Listing, size)
        monkeypatch.setattr(os, "scandir", lambda path, fake=fake: (listed if "set" in path else fake)(path))
        (item,) = scan(directory(root, mask_path=masks), 0)
        assert isinstance(item, Record)
        assert item.mask is not None
        assert item.mask.read() == b"mask"
        peaks.append(peak(lambda: count(root, Record, mask_path=masks)))
    monkeypatch.undo()  # the folder is removed with the real function
    assert_grows(*peaks, NAME_BYTES)


TABLES: dict[str, Callable[[list[tuple[str, str]]], str]] = {
    "captions.json": lambda rows: json.dumps(dict(rows)),
    "metadata.json": lambda rows: json.dumps([{"file": file, "text": text} for file, text in rows]),
    "metadata.jsonl": lambda rows: "".join(json.dumps({"file": file, "text": text}) + "\n" for file, text in rows),
    "metadata.csv": lambda rows: "file,text\n" + "".join(f"{file},{text}\n" for file, text in rows),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_long_table_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(rows, "_CHUNK", 500)  # both sizes fill it
    peaks = []
    for size in (FEW, MANY):
        listed = [(f"{n:09d}.jpg", f"caption {n}") for n in range(size)]
        root = write_files(tmp_path / str(size), {name: TABLES[name](listed), "000000007.jpg": png()})
        assert captions(scan(directory(root), 0)) == {"000000007.jpg": ("caption 7",)}
        assert count(root, Rejected) == size - 1
        peaks.append(peak(lambda root=root: count(root, Rejected)))
    assert_grows(*peaks, 10)


def test_of_a_long_tar_only_the_names_are_held_in_memory(tmp_path: Path) -> None:
    peaks = []
    for size in (FEW, MANY):
        members = [(f"{n}.{end}", b"x") for n in range(size) for end in ("jpg", "txt")]
        path = write_tar(tmp_path / f"{size}.tar", members)
        assert count(path, Record) == size
        peaks.append(peak(lambda path=path: count(path, Record)))
    assert_grows(*peaks, NAME_BYTES)


def test_a_full_temporary_disk_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = tables.temporary_database

    def small() -> Any:
        opened = database()
        opened.execute("PRAGMA max_page_count = 8")
        return opened

    monkeypatch.setattr(tables, "temporary_database", small)
    write_files(tmp_path, {"captions.json": json.dumps({f"{n}.jpg": "x" for n in range(2000)})})
    refused(r"full.*SQLITE_TMPDIR", count, tmp_path, Rejected)


DOCUMENTS = [
    {},
    [],
    {"a": 1, "b": [1, -2.5e3, True, None], "c": {"d": "e"}},
    [1, 22, 333, 'text " \\ \n é \U0001f600', [[]], {"x": {}}],
    {"": "", "long": "x" * 300},
    [12345678901234567890, 1.5, 15e-7, -1.5e21],
]


@pytest.mark.parametrize("chunk", [1, 2, 5, 1 << 16])
@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("indent", [None, 2])
def test_documents_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, document: Any, indent: int | None
) -> None:
    monkeypatch.setattr(rows, "_CHUNK", chunk)
    path = write_files(tmp_path, {"x.json": f" \n{json.dumps(document, indent=indent)}\n "}) / "x.json"
    with path.open(encoding="utf-8") as file:
        members = list(rows.members(file))
    assert members == (list(document.items()) if isinstance(document, dict) else [(None, item) for item in document])


# fmt: off
BROKEN = [
    "", " ", "{", "[", "1", '"a"', '{"a" 1}', '{"a": 1,}', "[1,]", "[1 2]", "{1: 2}", '{"a": 1} x', "[1]]", '["a',
    "[tru]", "[1, ,2]", '{"a": 1, "b"}', "]", "[1.]", "[1e+]",
]
# fmt: on


@pytest.mark.parametrize("chunk", [1, 1 << 16])
@pytest.mark.parametrize("text", BROKEN)
def test_broken_documents_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, text: str) -> None:
    monkeypatch.setattr(rows, "_CHUNK", chunk)
    path = write_files(tmp_path, {"x.json": text}) / "x.json"
    with path.open(encoding="utf-8") as file, pytest.raises(ValueError, match=r"character \d"):
        list(rows.members(file))


def test_hostile_tables_are_rejected_and_the_scan_continues(tmp_path: Path) -> None:
    for text in ("[1" + "0" * 5000 + "]", "[" * 100_000, '{"a.jpg": ' + "[" * 100_000):
        write_files(tmp_path, {"a.jpg": png(), "a.txt": "a", "captions.json": text})
        items = scan_items(tmp_path)
        assert captions(items) == {"a.jpg": ("a",)}
        assert rejects(items) == {"captions.json": "broken_table"}


def test_a_member_has_a_maximum_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_MEMBER", 1000)
    monkeypatch.setattr(rows, "_CHUNK", 100)
    path = write_files(tmp_path, {"x.json": json.dumps(["ok", "x" * 5000])}) / "x.json"
    with path.open(encoding="utf-8") as file:
        members = rows.members(file)
        assert next(members) == (None, "ok")
        with pytest.raises(ValueError, match="Unterminated string"):
            next(members)
