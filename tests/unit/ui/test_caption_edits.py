"""Captions are changed in their files: what stays, what is refused, and what can be taken back."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sd3_light.config.faults import UserError
from sd3_light.sources.caption_places import CaptionPlaces
from sd3_light.sources.records import FileBytes, Record
from sd3_light.sources.scan import scan
from sd3_light.ui.caption_edits import CaptionEdit, EditResult, Journal, apply_edits, edited_captions
from sd3_light.ui.caption_text import make_transform
from sd3_light.ui.served_files import ServedFiles
from tests.refusals import refused
from tests.unit.sources.inputs import captions, directory, png, write_files, write_tar


def edit(root: Path, name: str, old: str, new: str, number: int = 0, **keys: Any) -> EditResult:
    """Change a caption of an image of the folder `set` in ``root``."""
    return apply_edits(ServedFiles([root]), [located(root, name, old, new, number, **keys)])


def located(root: Path, name: str, old: str, new: str, number: int = 0, **keys: Any) -> CaptionEdit:
    with CaptionPlaces(directory(root / "set", **keys), 0) as places:
        place = places.find(f"set#0/{name}", FileBytes(f"{root}/set/{name}"))
        return CaptionEdit(f"set#0/{name}", place, places.columns, number, old, new)


def texts(root: Path, **keys: Any) -> dict[str, tuple[str, ...]]:
    return captions(list(scan(directory(root / "set", **keys), 0)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"old", b"new, \xe7\x8c\xab"),
        (b"old\n", b"new, \xe7\x8c\xab\n"),
        (b"\xef\xbb\xbfold\r\n\r\n", b"\xef\xbb\xbfnew, \xe7\x8c\xab\r\n\r\n"),
    ],
)
def test_a_text_file_keeps_its_mark_and_line_ends(tmp_path: Path, before: bytes, after: bytes) -> None:
    write_files(tmp_path / "set", {"a.png": png(), "a.txt": before})
    (tmp_path / "set/a.txt").chmod(0o640)
    assert not edit(tmp_path, "a.png", "old", "new, 猫").problems
    assert (tmp_path / "set/a.txt").read_bytes() == after
    assert (tmp_path / "set/a.txt").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == ["a.png", "a.txt"]


def test_a_caption_that_changed_since_is_not_overwritten(tmp_path: Path) -> None:
    write_files(tmp_path / "set", {"a.png": png(), "a.txt": b"old\n"})
    pending = located(tmp_path, "a.png", "old", "mine")
    (tmp_path / "set/a.txt").write_bytes(b"theirs\n")
    ((key, why),) = apply_edits(ServedFiles([tmp_path]), [pending]).problems
    assert key == "set#0/a.png"
    assert "has changed since the page read it" in why
    (tmp_path / "set/a.txt").unlink()
    assert apply_edits(ServedFiles([tmp_path]), [pending]).problems
    assert not (tmp_path / "set/a.txt").exists()
    write_files(tmp_path / "set", {"a.png": png(), "a.txt": b"x\r\ny\r\n"})
    assert not edit(tmp_path, "a.png", "x\ny", "x\nz\nw\n").problems
    assert (tmp_path / "set/a.txt").read_bytes() == b"x\r\nz\r\nw\r\n"


CSV = (
    b'\xef\xbb\xbffile_name,score, text \r\na.png,1,"one, ""two"""\r\n\r\n'
    b'b.png,2,plain\r\nc.png,3,"two\r\nlines"\r\nbad.png,\xff,x\r\nb.png,4,second'
)


def test_a_csv_row_changes_and_every_other_byte_stays(tmp_path: Path) -> None:
    write_files(tmp_path / "set", {**{f"{name}.png": png() for name in ("a", "b", "c")}, "metadata.csv": CSV})
    assert not edit(tmp_path, "a.png", 'one, "two"', 'x "y"').problems
    assert not edit(tmp_path, "b.png", "second", "with, comma", 1).problems
    assert not edit(tmp_path, "c.png", "two\r\nlines", "one line").problems
    expected = CSV.replace(b'"one, ""two"""', b'"x ""y"""').replace(b"4,second", b'4,"with, comma"')
    expected = expected.replace(b'"two\r\nlines"', b'"one line"')
    assert (tmp_path / "set/metadata.csv").read_bytes() == expected
    assert texts(tmp_path)["b.png"] == ("plain", "with, comma")
    assert edit(tmp_path, "b.png", "second", "x", 1).problems  # it is another text now
    assert edit(tmp_path, "b.png", "plain", "x", 7).problems


JSONL = (
    b'{"file_name": "a.png", "n": 1.50, "text":"\\u732b"  , "x": {"text": "inner"}}\n\n'
    b'{"text": ["one", "two"], "file_name": "b"}\r\nnot json\n{"image":"sub/c.png","caption":"\xe7\x8c\xab"}'
)


def test_a_json_line_changes_and_every_other_byte_stays(tmp_path: Path) -> None:
    files = {"a.png": png(), "b.png": png(), "sub/c.png": png(), "metadata.jsonl": JSONL}
    write_files(tmp_path / "set", files)
    assert not edit(tmp_path, "a.png", "猫", "犬").problems
    assert not edit(tmp_path, "b.png", "two", '"2"', 1).problems
    assert not edit(tmp_path, "sub/c.png", "猫", "犬").problems
    expected = JSONL.replace(b"\\u732b", b"\\u72ac").replace(b'"two"', b'"\\"2\\""')
    assert (tmp_path / "set/metadata.jsonl").read_bytes() == expected.replace("猫".encode(), "犬".encode())
    assert texts(tmp_path) == {"a.png": ("犬",), "b.png": ("one", '"2"'), "sub/c.png": ("犬",)}


def test_columns_and_names_of_a_table_are_those_of_the_dataset(tmp_path: Path) -> None:
    table = b'img;,\npic,long,short\na.png,"a, b",s\n'
    write_files(tmp_path / "set", {"a.png": png(), "info.csv": table.partition(b"\n")[2]})
    keys = {"image_column": "pic", "caption_column": ("long", "short")}
    assert not edit(tmp_path, "a.png", "s", "t", 1, **keys).problems
    assert (tmp_path / "set/info.csv").read_bytes() == b'pic,long,short\na.png,"a, b",t\n'


def test_captions_in_tars_and_other_tables_are_refused_with_the_reason(tmp_path: Path) -> None:
    for table in ("captions.json", "metadata.json", "meta_cap.json"):
        write_files(tmp_path / table / "set", {"a.png": png(), table: json.dumps({"a.png": {"caption": "old"}})})
        ((_, why),) = edit(tmp_path / table, "a.png", "old", "new").problems
        assert why.startswith(f"the caption is in {table}, whose rows cannot be changed in place")
    write_tar(tmp_path / "set.tar", [("a.png", png()), ("a.txt", b"old")])
    (item,) = scan(directory(tmp_path / "set.tar"), 0)
    assert isinstance(item, Record)
    message = "tar files cannot be changed in place: unpack it"
    with CaptionPlaces(directory(tmp_path / "set.tar"), 0) as places, pytest.raises(UserError, match=message):
        places.find(item.key, item.image)
    assert make_transform("text", "cat", "dog", ", ")("a cat, cats") == "a dog, dogs"
    assert make_transform("tag", "cat", "dog", ", ")("cat,  cats, cat") == "dog,  cats, dog"
    assert make_transform("tag", "cat", "", ", ")("cat, cats, cat") == "cats"
    assert make_transform("tag", "cat", "", ", ")("concat") == "concat"
    assert make_transform("start", "", "zwx", ", ")("a") == "zwx, a"
    assert make_transform("end", "", "zwx", ", ")("") == "zwx"
    for mode in ("text", "tag", "start", "regex"):
        refused("", make_transform, mode, "", "", ", ")


def test_the_place_is_the_one_that_a_scan_reads(tmp_path: Path) -> None:
    names = ("a.png", "sub/b.png", "sub/c.png", "sub/d.png", "e.png")
    write_files(tmp_path / "set", {name: png() for name in names})
    write_files(tmp_path / "set", {"a.txt": "own", "sub/b.txt": "own", "sub/c.caption": "own", "e.TXT": "own"})
    write_files(tmp_path / "set", {"metadata.csv": "file_name,text\nsub/b.png,table\n", "sub/metadata.jsonl": ""})
    write_files(tmp_path / "set", {"sub/other.csv": "image,caption\nd.png,other\nc.png,other\n"})
    read = texts(tmp_path)
    with CaptionPlaces(directory(tmp_path / "set"), 0) as places:
        for name in names:
            place = places.find(f"set#0/{name}", FileBytes(f"{tmp_path}/set/{name}"))
            assert edited_captions(place) == read[name], name
    assert [read[name] for name in names] == [("own",), ("table",), ("own",), ("other",), ("own",)]


def test_a_missing_caption_becomes_a_new_file_once(tmp_path: Path) -> None:
    write_files(tmp_path / "set", {"a.png": png()})
    pending = located(tmp_path, "a.png", "", "a cat")
    assert edited_captions(pending.place) == ("",)
    assert not apply_edits(ServedFiles([tmp_path]), [pending]).problems
    assert (tmp_path / "set/a.txt").read_bytes() == b"a cat\n"
    assert apply_edits(ServedFiles([tmp_path]), [pending]).problems
    journal = Journal()
    journal.add("new", [pending])
    assert not journal.undo(ServedFiles([tmp_path])).problems
    assert not (tmp_path / "set/a.txt").exists()
    assert (tmp_path / "set/a.png").exists()


def test_undo_restores_what_did_not_change_since(tmp_path: Path) -> None:
    write_files(tmp_path / "set", {"a.png": png(), "a.txt": "a", "b.png": png(), "b.txt": "b"})
    files, journal = ServedFiles([tmp_path]), Journal()
    edits = [located(tmp_path, f"{name}.png", name, f"{name}2") for name in "ab"]
    journal.add("two", apply_edits(files, edits).done)
    (tmp_path / "set/b.txt").write_text("b3")
    result = journal.undo(files)
    assert [edit.key for edit in result.done] == ["set#0/a.png"]
    assert [key for key, _ in result.problems] == ["set#0/b.png"]
    assert ((tmp_path / "set/a.txt").read_text(), (tmp_path / "set/b.txt").read_text()) == ("a", "b3")
    refused("nothing to undo", journal.undo, files)


@pytest.mark.parametrize("text", ["\ud800", "a\0b", "x" * (1 << 20) + "y"])
def test_texts_that_are_no_captions_are_refused(tmp_path: Path, text: str) -> None:
    write_files(tmp_path / "set", {"a.png": png(), "a.txt": "a", "b.png": png()})
    assert edit(tmp_path, "a.png", "a", text).problems
    assert edit(tmp_path, "b.png", "", text).problems
    assert (tmp_path / "set/a.txt").read_text() == "a"
    assert not (tmp_path / "set/b.txt").exists()


def mutated(draw: random.Random, data: bytes) -> bytes:
    """Return a table with some bytes replaced, removed or repeated."""
    changed = bytearray(data)
    for _ in range(draw.randrange(4)):
        at = draw.randrange(len(changed))
        changed[at : at + draw.randrange(3)] = draw.choice((b'"', b"\n", b",", b"\xff", b"{", b"\r", b"\0", b""))
    return bytes(changed)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_damaged_table_is_refused_or_one_caption_changes(tmp_path: Path, kind: str) -> None:
    draw = random.Random(1)
    rows = [{"file_name": f"{name}.png", "text": f'{name}, "x"', "n": "7"} for name in "abc"]
    lines = ["file_name,text,n", *('{file_name},"{name}, ""x""",7'.format(**row, name=row["text"][0]) for row in rows)]
    whole = "\n".join(lines if kind == "csv" else map(json.dumps, rows)).encode()
    changed = 0
    for number in range(60):
        root = tmp_path / str(number)
        write_files(root / "set", {f"{name}.png": png() for name in "abc"})
        write_files(root / "set", {f"metadata.{kind}": mutated(draw, whole)})
        before, data = texts(root), (root / f"set/metadata.{kind}").read_bytes()
        if "b.png" not in before:
            continue
        with CaptionPlaces(directory(root / "set"), 0) as places:
            old = places.find("set#0/b.png", FileBytes(f"{root}/set/b.png")).captions[0]
        result = edit(root, "b.png", old, "new")
        after = texts(root)
        if result.problems:
            assert (root / f"set/metadata.{kind}").read_bytes() == data
        else:
            changed += 1
            assert after == {**before, "b.png": ("new", *before["b.png"][1:])}, data
    assert changed > 20


ODD = ['"', ",", "\n", "\r\n", "\r", "a", "é", "\u2028", " ", "\ufeff", "\\", "'", "{", "</script>", "\x1c"]


def test_any_caption_survives_in_any_file(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(60):
        old, new = ("".join(draw.choices(ODD, k=draw.randrange(1, 8))) for _ in range(2))
        kind = draw.choice(("csv", "jsonl"))
        quoted = '"' + old.replace('"', '""') + '"'
        row = f"a.png,{quoted},1\n" if kind == "csv" else json.dumps({"file_name": "a.png", "text": old}) + "\n"
        head = "file_name,text,n\n" if kind == "csv" else ""
        other = "b.png,b,2\n" if kind == "csv" else '{"file_name": "b.png", "text": "b"}\n'
        root = tmp_path / str(number)
        write_files(root / "set", {"a.png": png(), "b.png": png()})
        write_files(root / "set", {f"metadata.{kind}": (head + row + other).encode()})
        result = edit(root, "a.png", old, new)
        assert not result.problems, (old, new, kind, result.problems)
        with CaptionPlaces(directory(root / "set"), 0) as places:
            assert places.find("set#0/a.png", FileBytes(f"{root}/set/a.png")).captions == (new,), (old, new, kind)
            assert places.find("set#0/b.png", FileBytes(f"{root}/set/b.png")).captions == ("b",)
