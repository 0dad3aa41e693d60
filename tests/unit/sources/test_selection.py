"""`where`: which samples of each kind of source match, by columns, captions and sizes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sd3_light.config import UserError
from sd3_light.sources.records import Record, Rejected
from sd3_light.sources.scan import scan
from sd3_light.sources.selection import matches_size
from tests.refusals import refused
from tests.unit.sources.inputs import captions, directory, png, rejects, scan_items, write_files, write_tar

SCORES: list[Any] = [6.5, 5.0, None, "high", 7]
LABELS = ["cat", "dog", "cat", "cat", "bird"]


def rows() -> list[dict[str, Any]]:
    pairs = zip(SCORES, LABELS, strict=True)
    scores = [{"Aesthetic": score, "label": label} for score, label in pairs]
    return [{"file_name": f"{n}.png", "text": f"row {n}", **each} for n, each in enumerate(scores)]


def as_jsonl(root: Path) -> None:
    write_files(root, {"metadata.jsonl": "\n".join(map(json.dumps, rows()))})


def as_json(root: Path) -> None:
    write_files(root, {"metadata.json": json.dumps({row.pop("file_name"): row for row in rows()})})


def as_csv(root: Path) -> None:
    lines = [",".join("" if cell is None else str(cell) for cell in row.values()) for row in rows()]
    write_files(root, {"metadata.csv": "\n".join(["file_name,text,Aesthetic,label", *lines])})


def as_two_tables(root: Path) -> None:
    write_files(root, {"captions.json": json.dumps({row["file_name"]: row["text"] for row in rows()})})
    as_jsonl(root)


def as_tar(root: Path) -> None:
    members = []
    for n, row in enumerate(rows()):
        members += [(f"{n}.png", png()), (f"{n}.txt", row["text"].encode()), (f"{n}.json", json.dumps(row).encode())]
    write_tar(root / "set.tar", members)


TABLES: list[Callable[[Path], None]] = [as_jsonl, as_json, as_csv, as_two_tables]


@pytest.mark.parametrize("write", [*TABLES, as_tar])
def test_samples_are_selected_by_columns(tmp_path: Path, write: Callable[[Path], None]) -> None:
    if write is not as_tar:
        write_files(tmp_path, {f"{n}.png": png() for n in range(5)})
    write(tmp_path)
    prefix = "set.tar/" if write is as_tar else ""
    items = scan_items(tmp_path, where="aesthetic > 5.5 and label != 'bird'")
    assert captions(items) == {f"{prefix}0.png": ("row 0",)}
    assert rejects(items) == {f"{prefix}3.png": "bad_column"}
    (reject,) = (item for item in items if isinstance(item, Rejected))
    assert reject.detail == "Aesthetic = 'high', and where needs a number there".replace("Aes", "aes")
    assert set(captions(scan_items(tmp_path, where="aesthetic is None"))) == {f"{prefix}2.png"}
    assert len(captions(scan_items(tmp_path, where=" "))) == 5


def test_rows_of_parquet_are_selected(tmp_path: Path) -> None:
    numbers = [6.5, 5.0, None, float("nan"), 7.0]
    table = {"image": [png(n) for n in range(5)], "text": [f"row {n}" for n in range(5)], "Aesthetic": numbers}
    pq.write_table(pa.table({**table, "label": LABELS}), tmp_path / "set.parquet", row_group_size=2)
    names = [f"set.parquet/{n:09d}" for n in range(5)]
    items = scan_items(tmp_path, where="aesthetic > 5.5 and label in ['cat', 'bird']")
    assert captions(items) == {names[0]: ("row 0",), names[4]: ("row 4",)}
    assert all(isinstance(item, Record) and item.image.read() == png(int(item.key[-1])) for item in items)
    assert list(captions(scan_items(tmp_path, where="'1' in text"))) == [names[1]]
    assert rejects(scan_items(tmp_path, where="label > 3")) == dict.fromkeys(names, "bad_column")
    assert rejects(scan_items(tmp_path, where="image == 'x'")) == {"set.parquet": "bad_column"}


def test_unmatched_samples_are_counted_and_their_captions_not_read(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{n}.png": png() for n in range(5)})
    lines = [json.dumps({"file_name": f"{n}.png", "text": 7, "score": n}) for n in range(5)]
    write_files(tmp_path, {"metadata.jsonl": "\n".join(lines)})
    unmatched: list[int] = []
    items = list(scan(directory(tmp_path, where="score == 3"), 0, on_unmatched=lambda: unmatched.append(1)))
    assert rejects(items) == {"3.png": "bad_caption"}
    assert len(unmatched) == 4


def test_the_length_of_the_longest_caption_without_prefix(tmp_path: Path) -> None:
    table = {"a.png": ["a", "four"], "b.png": "五个字的话", "c.png": "  a   b "}
    write_files(tmp_path, {**{name: png() for name in table}, "captions.json": json.dumps(table)})
    keys = {"caption_prefix": "a long prefix "}
    assert set(captions(scan_items(tmp_path, where="caption_length >= 4", **keys))) == {"a.png", "b.png"}
    assert set(captions(scan_items(tmp_path, where="caption_length == 3", **keys))) == {"c.png"}


def test_terms_over_the_size_keep_the_values_that_they_need(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{n}.png": png() for n in range(5)})
    as_csv(tmp_path)
    where = "label == 'cat' and (width >= 512 or aesthetic > 6 and caption_length < 9)"
    items = scan_items(tmp_path, where=where)
    kept = {item.key[-5]: item.attributes for item in items if isinstance(item, Record)}
    assert {name: json.loads(text) for name, text in kept.items()} == {
        "0": {"<caption_length>": 5, "aesthetic": 6.5},
        "2": {"<caption_length>": 5},
    }
    assert matches_size(where, kept["0"], 64, 64)
    assert not matches_size(where, kept["2"], 511, 64)
    assert matches_size(where, kept["2"], 512, 64)
    assert matches_size("label == 'cat'", "", 1, 1)
    (first, *_) = scan_items(tmp_path, where="width > height")
    assert isinstance(first, Record)
    assert first.attributes == ""


def test_a_directory_without_the_column_is_an_error_unless_it_is_empty(tmp_path: Path) -> None:
    root = write_files(tmp_path / "set", {"a.png": png(), "a.txt": "a"})
    refused("it has no columns at all", list, scan(directory(root, where="score > 5.5"), 0))
    write_files(tmp_path, {f"{n}.png": png() for n in range(5)})
    as_csv(tmp_path)
    with pytest.raises(UserError, match=r"no sample of .* has a column 'aestetic'; did you mean 'Aesthetic'\?"):
        list(scan(directory(tmp_path, where="aestetic > 5.5"), 0))
    (tmp_path / "empty").mkdir()
    assert list(scan(directory(tmp_path / "empty", where="score > 5.5"), 0)) == []


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"score": 1' + b"0" * 400 + b"}", b'{"score": [1]}'])
def test_a_broken_json_in_a_tar_rejects_its_sample(tmp_path: Path, content: bytes) -> None:
    good = [("b.png", png()), ("b.txt", b"b"), ("b.json", b'{"score": 6}')]
    write_tar(tmp_path / "set.tar", [("a.png", png()), ("a.txt", b"a"), ("a.json", content), *good])
    items = scan_items(tmp_path, where="score > 5.5")
    assert captions(items) == {"set.tar/b.png": ("b",)}
    assert rejects(items) == {"set.tar/a.png": "bad_column"}


@pytest.mark.parametrize(
    ("cell", "matches"), [("true", True), ("1", True), ("False", False), ("0", False), ("", False)]
)
def test_booleans_in_csv(tmp_path: Path, cell: str, matches: bool | int) -> None:
    write_files(tmp_path, {"a.png": png(), "metadata.csv": f"file_name,text,ok\na.png,a,{cell}\n"})
    assert bool(scan_items(tmp_path, where="ok")) == matches
