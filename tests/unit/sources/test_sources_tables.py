import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from sd3_light.sources.records import Rejected
from tests.unit.sources.inputs import captions, png, rejects, scan_items, write_files


def test_captions_json(tmp_path: Path) -> None:
    table = {"a.jpg": "one", "sub/b.png": ["one", "two  words"], "stem": "by stem", "notes.md": "no image"}
    root = write_files(tmp_path / "set", {name: png() for name in ("a.jpg", "sub/b.png", "stem.webp", "extra.jpg")})
    write_files(root, {"captions.json": json.dumps(table), "extra.txt": "from a file", "notes.md": ""})
    items = scan_items(root)
    named = {"a.jpg": ("one",), "sub/b.png": ("one", "two words")}
    assert captions(items) == {**named, "stem.webp": ("by stem",), "extra.jpg": ("from a file",)}
    assert rejects(items) == {"notes.md": "unsupported_format"}


ROWS = [
    ("a.jpg", "a bird"),
    ("sub/b.jpg", 'says "hi",\nthen goes'),
    ("./sub/../c.jpg", "c"),
    ("sub\\d.jpg", "d"),
    ("a.jpg", "a bird again"),
    ("gone.jpg", "gone"),
    ("", "nameless"),
    ("empty.jpg", ""),
]
EXPECTED = {
    "a.jpg": ("a bird", "a bird again"),
    "c.jpg": ("c",),
    "empty.jpg": ("",),
    "sub/b.jpg": ('says "hi", then goes',),
    "sub/d.jpg": ("d",),
}


def as_csv(file: str, text: str) -> bytes:
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([("id", file, text), *((n, *row) for n, row in enumerate(ROWS)), ()])
    return b"\xef\xbb\xbf" + buffer.getvalue().encode()


def as_jsonl(file: str, text: str) -> bytes:
    rows = [json.dumps({"id": n, file: name, text: caption}) for n, (name, caption) in enumerate(ROWS)]
    return "\n".join([*rows[:3], "", *rows[3:]]).encode()


def as_json(file: str, text: str) -> bytes:
    return json.dumps([{file: name, text: caption} for name, caption in ROWS]).encode()


@pytest.mark.parametrize(("file", "text"), [("file_name", "text"), ("image", "caption"), ("Path", "PROMPT")])
@pytest.mark.parametrize(("kind", "write"), [("csv", as_csv), ("jsonl", as_jsonl), ("json", as_json)])
def test_metadata_tables(tmp_path: Path, kind: str, write: Any, file: str, text: str) -> None:
    root = write_files(tmp_path, {name: png() for name in EXPECTED})
    write_files(root, {f"metadata.{kind}": write(file, text)})
    items = scan_items(root)
    assert captions(items) == EXPECTED
    assert sorted(rejects(items).values()) == ["broken_row", "missing_file"]
    assert rejects(items)["gone.jpg"] == "missing_file"


def test_the_nearest_table_wins_and_other_rows_are_not_missing(tmp_path: Path) -> None:
    root = write_files(tmp_path, {"sub/a.jpg": png(), "b.jpg": png()})
    write_files(root, {"captions.json": '{"sub/a.jpg": "far", "b": "b"}'})
    write_files(root, {"sub/metadata.csv": "file,text\na.jpg,near\n"})
    items = scan_items(root)
    assert captions(items) == {"b.jpg": ("b",), "sub/a.jpg": ("near",)}
    assert rejects(items) == {}


def test_tables_match_composed_and_absolute_names(tmp_path: Path) -> None:
    root = write_files(tmp_path, {"cafe\u0301.jpg": png(), "b.jpg": png()})
    write_files(root, {"captions.json": json.dumps({"caf\u00e9.jpg": "coffee", str(tmp_path / "b.jpg"): "b"})})
    assert sorted(captions(scan_items(root)).values()) == [("b",), ("coffee",)]


COLUMN_ROWS = [{"file": "wrong.jpg", "Photo": f"{name}.jpg", "text": "wrong", "alt": name} for name in "ab"]
COLUMN_TABLES = {
    "csv": lambda rows: "\n".join(",".join(row) for row in [list(rows[0]), *(row.values() for row in rows)]),
    "json": json.dumps,
    "jsonl": lambda rows: "\n".join(json.dumps(row) for row in rows),
}


@pytest.mark.parametrize("kind", COLUMN_TABLES)
def test_configured_columns_are_used(tmp_path: Path, kind: str) -> None:
    root = write_files(tmp_path, {name: png() for name in ("a.jpg", "b.jpg", "wrong.jpg")})
    write_files(root, {f"metadata.{kind}": COLUMN_TABLES[kind](COLUMN_ROWS), "wrong.txt": "from its file"})
    items = scan_items(root, image_column="photo", caption_column="alt")
    assert captions(items) == {"a.jpg": ("a",), "b.jpg": ("b",), "wrong.jpg": ("from its file",)}
    assert rejects(items) == {}
    assert captions(scan_items(root)) == {"wrong.jpg": ("wrong", "wrong")}


@pytest.mark.parametrize("kind", COLUMN_TABLES)
@pytest.mark.parametrize("key", ["image_column", "caption_column"])
def test_a_missing_configured_column_is_reported(tmp_path: Path, kind: str, key: str) -> None:
    root = write_files(tmp_path, {"a.jpg": png(), "a.txt": "a", f"metadata.{kind}": COLUMN_TABLES[kind](COLUMN_ROWS)})
    items = scan_items(root, **{key: "nowhere"})
    assert captions(items) == {"a.jpg": ("a",)}, "from the text file"
    (reject,) = (item for item in items if isinstance(item, Rejected))
    assert (reject.key.split("/")[1], reject.reason) == (f"metadata.{kind}", "broken_table")
    assert f"'nowhere' ({key})" in reject.detail


def test_rows_without_a_configured_column_are_rejected(tmp_path: Path) -> None:
    rows = [{"p": "a.jpg", "c": "a"}, {"p": "b.jpg", "text": "b"}, {"file": "c.jpg", "c": "c"}]
    root = write_files(tmp_path, {"a.jpg": png(), "b.jpg": png(), "metadata.json": json.dumps(rows)})
    items = scan_items(root, image_column="p", caption_column="c")
    assert captions(items) == {"a.jpg": ("a",)}
    details = {item.reason: item.detail for item in items if isinstance(item, Rejected)}
    missing = {"no_caption": "no value in 'c' (caption_column)", "broken_row": "no file name in 'p' (image_column)"}
    assert details == missing


def test_rows_in_captions_json_use_only_caption_column(tmp_path: Path) -> None:
    table = {"a.jpg": {"text": "short", "long": ["a long one", "another"]}, "b.jpg": {"text": "b"}, "c.jpg": "plain"}
    root = write_files(tmp_path, {**{name: png() for name in table}, "captions.json": json.dumps(table)})
    items = scan_items(root, image_column="nowhere", caption_column="long")
    assert captions(items) == {"a.jpg": ("a long one", "another"), "c.jpg": ("plain",)}
    assert rejects(items) == {"b.jpg": "no_caption"}


@pytest.mark.parametrize("kind", COLUMN_TABLES)
def test_several_columns_give_one_caption_each(tmp_path: Path, kind: str) -> None:
    """In their order; a missing or empty one is replaced by the first that has a value."""
    rows = [{"file": "a.jpg", "long": "a long one", "short": "short"}, {"file": "b.jpg", "long": "", "short": "b"}]
    files = {"a.jpg": png(), "b.jpg": png(), "c.jpg": png(), "c.txt": "from its file"}
    root = write_files(tmp_path, {**files, f"metadata.{kind}": COLUMN_TABLES[kind](rows)})
    both = captions(scan_items(root, caption_column=["long", "short"]))
    assert both == {"a.jpg": ("a long one", "short"), "b.jpg": ("b", "b"), "c.jpg": ("from its file",) * 2}
    assert captions(scan_items(root, caption_column=["short", "long"]))["a.jpg"] == ("short", "a long one")
    details = [item.detail for item in scan_items(root, caption_column=["long", "no"]) if isinstance(item, Rejected)]
    assert any("'no' (caption_column)" in detail for detail in details)


def test_several_columns_reject_lists_and_rows_without_a_value(tmp_path: Path) -> None:
    rows = {"a.jpg": {"long": ["one", "two"], "short": "s"}, "b.jpg": {"other": "b"}, "c.jpg": ["one", "two", "three"]}
    rows["d.jpg"] = {"long": "  ", "short": "d"}
    root = write_files(tmp_path, {**{name: png() for name in rows}, "captions.json": json.dumps(rows)})
    items = scan_items(root, caption_column=["long", "short"], caption_prefix="x: ")
    assert rejects(items) == {"a.jpg": "bad_caption", "b.jpg": "no_caption", "c.jpg": "bad_caption"}
    assert captions(items) == {"d.jpg": ("x: d", "x: d")}


def test_an_exact_column_name_wins(tmp_path: Path) -> None:
    row = {"file": "a.jpg", "Caption": "upper", "caption": "lower"}
    root = write_files(tmp_path, {"a.jpg": png(), "metadata.jsonl": json.dumps(row)})
    assert captions(scan_items(root, caption_column="Caption")) == {"a.jpg": ("upper",)}
    assert captions(scan_items(root, caption_column="caption")) == {"a.jpg": ("lower",)}


def test_the_limit_of_csv_cells(tmp_path: Path) -> None:
    root = write_files(tmp_path, {"a.jpg": png(), "b.jpg": png()})
    write_files(root, {"metadata.csv": f"file,text\na.jpg,{'word ' * 40_000}\nb.jpg,{'x' * (1 << 20)}x\n"})
    before = csv.field_size_limit()
    items = scan_items(root)
    assert csv.field_size_limit() == before
    assert captions(items)["a.jpg"][0].count("word") == 40_000
    assert sorted(rejects(items).values()) == ["broken_row", "no_caption"]


@pytest.mark.parametrize("text", ["é" * (1 << 19) + "é", ["short", "x" * (1 << 20) + "x"]])
def test_the_caption_limit_applies_to_tables(tmp_path: Path, text: Any) -> None:
    root = write_files(tmp_path, {"a.jpg": png(), "captions.json": json.dumps({"a.jpg": text})})
    assert rejects(scan_items(root)) == {"a.jpg": "caption_too_long"}


def test_a_missing_file_of_several_rows_is_one_reject(tmp_path: Path) -> None:
    root = write_files(tmp_path, {"metadata.csv": "file,text\ngone.jpg,a\ngone.jpg,b\n"})
    assert rejects(scan_items(root)) == {"gone.jpg": "missing_file"}
