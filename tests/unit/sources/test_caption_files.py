"""Caption files of other suffixes and tables of other names: what is read, in which order, and what a reject says."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sd3_light.sources.records import Rejected
from tests.unit.sources.inputs import captions, png, rejects, scan_items, structs, write_files, write_tar


def detail(items: Any, name: str) -> str:
    return next(item.detail for item in items if isinstance(item, Rejected) and item.key.endswith(f"/{name}"))


def test_caption_files_of_all_suffixes(tmp_path: Path) -> None:
    names = ("a.txt", "b.caption", "c.TXT", "d.Caption", "e.CAPTION", "e.Txt", "f.caption", "f.txt", "g.CAPTION")
    write_files(tmp_path, {name: f"from {name}" for name in (*names, "g.caption")})
    write_files(tmp_path, {f"{stem}.png": png() for stem in "abcdefgh"} | {"sub/i.png": png(), "sub/i.caption": "sub"})
    items = scan_items(tmp_path)
    read = ("a.txt", "b.caption", "c.TXT", "d.Caption", "e.Txt", "f.txt", "g.caption")
    expected = {f"{name[0]}.png": (f"from {name}",) for name in read}
    assert captions(items) == {**expected, "sub/i.png": ("sub",)}
    assert rejects(items) == {"h.png": "no_caption"}
    assert detail(items, "h.png") == "no .txt or .caption file of the same name, and no table lists it"


def test_a_caption_file_without_an_image_is_listed(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.png": png(), "a.caption": "a", "lost.caption": "b", "gone.TXT": "c", "gone.txt": "d"})
    items = scan_items(tmp_path)
    assert rejects(items) == {"lost.caption": "missing_file", "gone.TXT": "missing_file", "gone.txt": "missing_file"}


ROWS = [("a.png", "a cat"), ("sub/b.png", "a dog"), ("a.png", "again")]


def as_csv(file: str, text: str) -> bytes:
    return "\n".join([f"{file},{text}", *(f"{name},{caption}" for name, caption in ROWS)]).encode()


def as_jsonl(file: str, text: str) -> bytes:
    return "\n".join(json.dumps({file: name, text: caption}) for name, caption in ROWS).encode()


def as_parquet(file: str, text: str) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({file: [name for name, _ in ROWS], text: [caption for _, caption in ROWS]}), sink)
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize(("file", "text"), [("file_name", "text"), ("Filename", "caption"), ("filepath", "prompt")])
@pytest.mark.parametrize(
    ("name", "write"),
    [("captions.csv", as_csv), ("Metadata.CSV", as_csv), ("train.jsonl", as_jsonl), ("my data.parquet", as_parquet)],
)
def test_the_only_table_is_read_whatever_its_name(tmp_path: Path, name: str, write: Any, file: str, text: str) -> None:
    write_files(tmp_path, {"a.png": png(), "sub/b.png": png(), name: write(file, text), "list.csv": "width\n1\n"})
    items = scan_items(tmp_path)
    assert captions(items) == {"a.png": ("a cat", "again"), "sub/b.png": ("a dog",)}
    assert rejects(items) == {}


def test_the_order_of_sources(tmp_path: Path) -> None:
    """Tables of fixed names, the image's own file, tables of other names; of each the nearest."""
    images = ("sub/a.png", "sub/b.png", "sub/c.png", "sub/d.png", "sub/e.png")
    write_files(tmp_path, dict.fromkeys(images, png()))
    far = "file,text\n" + "".join(f"{image},far\n" for image in images)
    write_files(tmp_path, {"metadata.csv": "file,text\nsub/a.png,fixed name\n", "other.csv": far})
    write_files(tmp_path / "sub", {f"{stem}.caption": ".caption" for stem in "abc"})
    write_files(tmp_path / "sub", {"a.txt": ".txt", "b.txt": ".txt"})
    write_files(tmp_path / "sub", {"labels.jsonl": '{"file": "d.png", "text": "near"}\n{"file": "a.png", "text": "x"}'})
    items = scan_items(tmp_path)
    expected = {"a": "fixed name", "b": ".txt", "c": ".caption", "d": "near", "e": "far"}
    assert captions(items) == {f"sub/{stem}.png": (text,) for stem, text in expected.items()}
    assert rejects(items) == {}


def test_tables_in_use_list_their_rows_and_others_nothing(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.png": png(), "a.txt": "own", "export.csv": "file,text\na.png,other\ngone.png,gone\n"})
    items = scan_items(tmp_path)
    assert captions(items) == {"a.png": ("own",)}
    assert rejects(items) == {}
    root = write_files(tmp_path / "used", {"a.png": png(), "b.png": png()})
    rows = ['{"file": "a.png", "text": "a"}', '{"file": "gone.png", "text": "gone"}', "[broken"]
    write_files(root, {"labels.jsonl": "\n".join(rows)})
    items = scan_items(root)
    broken = f"labels.jsonl:byte {len(rows[0]) + len(rows[1]) + 2}"
    assert rejects(items) == {"b.png": "no_caption", "gone.png": "missing_file", broken: "broken_row"}
    assert detail(items, "b.png").endswith("; labels.jsonl does not list it (it starts with 'a.png')")


def test_the_reject_of_an_image_names_the_tables_that_are_not_read(tmp_path: Path) -> None:
    table = "file_name,caption\na.png,a\n"
    write_files(tmp_path, {"two/a.png": png(), "two/captions.csv": table, "two/labels.csv": table})
    write_files(tmp_path, {"columns/a.png": png(), "columns/captions.csv": "img_id,label\n1,a\n"})
    write_files(tmp_path, {"broken/a.png": png(), "broken/captions.jsonl": "{", "broken/empty.csv": ""})
    write_files(tmp_path, {"rows/a.png": png(), "rows/captions.jsonl": '{"file": "a.png", "words": "a"}'})
    write_files(tmp_path, {"many/a.png": png()} | {f"many/{n}.csv": table for n in range(17)})
    items = scan_items(tmp_path)
    assert captions(items) == {}
    assert set(rejects(items).values()) == {"no_caption"}
    assert "two/captions.csv and two/labels.csv all have file names and captions" in detail(items, "two/a.png")
    assert "name the right one metadata.csv" in detail(items, "two/a.png")
    columns = detail(items, "columns/a.png")
    assert "columns/captions.csv is not read: none of the columns ['img_id', 'label'] is one of file_name, " in columns
    assert "(image_column and caption_column select other columns)" in columns
    assert "broken/captions.jsonl is not read: " in detail(items, "broken/a.png")
    assert "broken/empty.csv is not read: " in detail(items, "broken/a.png")
    assert "its first row has none of the columns text, caption" in detail(items, "rows/a.png")
    assert "17 tables are in many/, and none is read: name the right one metadata.csv" in detail(items, "many/a.png")


def test_configured_columns_select_those_of_any_table(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.png": png(), "labels.csv": "id,where_it_is,words,text\n1,a.png,right,wrong\n"})
    items = scan_items(tmp_path, image_column="where_it_is", caption_column="words")
    assert captions(items) == {"a.png": ("right",)}
    assert rejects(scan_items(tmp_path, caption_column="nowhere")) == {"a.png": "no_caption"}


@pytest.mark.parametrize("write", [as_csv, as_jsonl, as_parquet])
def test_where_uses_the_columns_of_any_table(tmp_path: Path, write: Any) -> None:
    name = {as_csv: "t.csv", as_jsonl: "t.jsonl", as_parquet: "t.parquet"}[write]
    write_files(tmp_path, {"a.png": png(), "sub/b.png": png(), name: write("file", "text")})
    assert captions(scan_items(tmp_path, where="text == 'a dog'")) == {"sub/b.png": ("a dog",)}


def test_a_table_of_sd_scripts(tmp_path: Path) -> None:
    rows = {
        "a": {"caption": "a cat", "train_resolution": [64, 64]},
        "b.png": {"caption": "a dog", "tags": "outdoors, 1dog"},
        str(tmp_path / "c.png"): {"tags": "sky, clouds"},
        "d": {"train_resolution": [64, 64]},
    }
    write_files(tmp_path, {f"{stem}.png": png() for stem in "abcd"} | {"meta_cap.json": json.dumps(rows)})
    items = scan_items(tmp_path)
    expected = {"a.png": ("a cat",), "b.png": ("a dog, outdoors, 1dog",), "c.png": ("sky, clouds",)}
    assert captions(items) == expected
    assert rejects(items) == {"d.png": "no_caption"}
    write_files(tmp_path, {"meta_lat.json": json.dumps(rows)})
    items = scan_items(tmp_path)
    assert captions(items) == {}
    assert "meta_cap.json and meta_lat.json all have file names and captions" in detail(items, "a.png")


def test_parquet_without_images_or_as_an_unneeded_table_is_listed(tmp_path: Path) -> None:
    """Also beside a tar or a folder of the same name."""
    log = pa.table({"url": ["u"], "caption": ["c"]})
    write_tar(tmp_path / "0.tar", [("k.png", png()), ("k.txt", b"k")])
    write_files(tmp_path, {"1/a.png": png(), "1/a.txt": "a", "b.png": png(), "c.png": png(), "c.txt": "c"})
    for name in ("0", "1", "2"):
        pq.write_table(log, tmp_path / f"{name}.parquet")
    items = scan_items(tmp_path)
    assert set(captions(items)) == {"0.tar/k.png", "1/a.png", "c.png"}
    assert rejects(items) == {**{f"{n}.parquet": "no_image_column" for n in range(3)}, "b.png": "no_caption"}
    assert "0.parquet is not read: none of the columns ['url', 'caption']" in detail(items, "b.png")
    other = {"a.png": png(), "a.txt": "own", "labels.parquet": as_parquet("file", "text")}
    items = scan_items(write_files(tmp_path / "other", other))
    assert captions(items) == {"a.png": ("own",)}
    assert rejects(items) == {"labels.parquet": "no_image_column"}


def test_parquet_with_images_is_beside_a_table(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": structs(2), "text": ["a", "b"]}), tmp_path / "rows.parquet")
    write_files(tmp_path, {"a.png": png(), "labels.csv": "file,text\na.png,a cat\n", "lonely.png": png()})
    items = scan_items(tmp_path)
    assert len(captions(items)) == 3
    assert "rows.parquet" not in detail(items, "lonely.png")


def test_a_pipe_with_the_name_of_a_table_is_not_opened(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.png": png()})
    for name in ("t.csv", "t.parquet", "meta_cap.json"):
        os.mkfifo(tmp_path / name)
    items = scan_items(tmp_path)
    assert rejects(items) == {"a.png": "no_caption", "t.parquet": "unreadable"}
    assert "t.csv is not read: " in detail(items, "a.png")
