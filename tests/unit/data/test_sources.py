import csv
import io
import json
import os
import pickle
import random
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sd3_light.config import DirectoryConfig
from sd3_light.config.faults import UserError
from sd3_light.data.preprocess import REASONS, Reject, decode
from sd3_light.data.sources import Record, Rejected, caption_variants, occurrences, scan, scan_all
from sd3_light.randomness import sample_id


def picture(colour: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (colour, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def lay(root: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def directory(path: Path, **keys: Any) -> DirectoryConfig:
    return DirectoryConfig(path=path, resolutions=[64], **keys)


def found(path: Path, **keys: Any) -> list[Record | Rejected]:
    items = list(scan(directory(path, **keys), 0))
    names = [item.key for item in items]
    assert len(set(names)) == len(names), "keys are unique"
    assert all(item.reason in REASONS for item in items if isinstance(item, Rejected))
    assert items == list(scan(directory(path, **keys), 0)), "a second scan sees the same"
    return items


def captions(items: Iterable[Record | Rejected]) -> dict[str, tuple[str, ...]]:
    return {item.key.split("/", 1)[1]: item.captions for item in items if isinstance(item, Record)}


def rejects(items: Iterable[Record | Rejected]) -> dict[str, str]:
    return {item.key.split("/", 1)[1]: item.reason for item in items if isinstance(item, Rejected)}


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


# --- folders ----------------------------------------------------------------------------------


def test_folders_are_walked_in_the_order_of_names(tmp_path: Path) -> None:
    root = lay(
        tmp_path / "set",
        {
            "b.jpg": picture(1),
            "b.txt": "bee",
            "a.PNG": picture(2),
            "a.txt": "  a \n\t bird  ",
            "z/deep/c.webp": picture(3),
            "z/deep/c.txt": "\ufeffsea",
            "m/d.jpeg": picture(4),
            "m/d.txt": "",
            ".hidden/e.jpg": picture(),
            "._b.jpg": b"mac",
            "notes.md": "not a picture",
        },
    )
    items = found(root)
    assert [item.key for item in items] == ["set#0/a.PNG", "set#0/b.jpg", "set#0/m/d.jpeg", "set#0/z/deep/c.webp"]
    assert captions(items) == {"a.PNG": ("a bird",), "b.jpg": ("bee",), "m/d.jpeg": ("",), "z/deep/c.webp": ("sea",)}
    assert [item.read() for item in items if isinstance(item, Record)] == [picture(n) for n in (2, 1, 4, 3)]


def test_what_is_wrong_in_a_folder_is_named_and_stops_nothing(tmp_path: Path) -> None:
    root = lay(
        tmp_path / "set",
        {
            "good.jpg": picture(),
            "good.txt": "good",
            "latin.jpg": picture(),
            "latin.txt": "café".encode("latin-1"),
            "lonely.jpg": picture(),
            "orphan.txt": "no picture",
            "photo.heic": b"heic",
            "photo.txt": "a phone's photo",
            "huge.jpg": picture(),
            "huge.txt": "x" * (1 << 20) + "y",
            "set.tar.gz": b"\x1f\x8b",
        },
    )
    (root / "loop").symlink_to(root)
    items = found(root)
    assert captions(items) == {"good.jpg": ("good",)}
    assert rejects(items) == {
        "latin.jpg": "caption_not_utf8",
        "lonely.jpg": "no_caption",
        "orphan.txt": "missing_file",
        "photo.heic": "unsupported_format",
        "huge.jpg": "caption_too_long",
        "set.tar.gz": "unsupported_format",
        "loop": "folder_loop",
    }


def test_a_name_that_is_not_utf8_is_rejected_printably(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    (tmp_path / name).write_bytes(picture())
    (item,) = found(tmp_path)
    assert isinstance(item, Rejected)
    assert item.reason == "name_not_utf8"
    assert item.key.encode().endswith(rb"caf\udce9.jpg")


def test_a_picture_that_vanishes_is_rejected_when_read(tmp_path: Path) -> None:
    root = lay(tmp_path, {"a.jpg": picture(), "a.txt": "a"})
    (item,) = found(root)
    assert isinstance(item, Record)
    (root / "a.jpg").unlink()
    with pytest.raises(Reject, match="unreadable"):
        item.read()


def test_records_are_light_and_picklable(tmp_path: Path) -> None:
    (item,) = found(lay(tmp_path, {"a.jpg": picture(), "a.txt": "a"}))
    assert pickle.loads(pickle.dumps(item)) == item
    assert len(pickle.dumps(item)) < 500


def test_a_scan_is_lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = lay(tmp_path, {f"{folder}/{n}.{end}": "x" for folder in "abc" for n in range(3) for end in ("jpg", "txt")})
    opened: list[str] = []
    listed = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: opened.append(Path(path).name) or listed(path))
    items = scan(directory(root), 0)
    assert opened == []
    next(items)
    assert opened == [root.name, "a"]


def test_missing_paths_are_user_errors_before_the_first_sample(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for keys in ({"path": gone}, {"path": tmp_path, "mask_path": gone}, {"path": tmp_path, "default_mask_file": gone}):
        with pytest.raises(UserError, match=str(gone)):
            scan(directory(**keys), 0)
    lay(tmp_path, {"x.zip": b""})
    with pytest.raises(UserError, match="neither a folder"):
        scan(directory(tmp_path / "x.zip"), 0)


# --- captions ---------------------------------------------------------------------------------


def test_empty_captions_are_kept_or_skipped(tmp_path: Path) -> None:
    root = lay(tmp_path, {"a.jpg": picture(), "a.txt": " \n", "b.jpg": picture(), "b.txt": "b"})
    assert captions(found(root)) == {"a.jpg": ("",), "b.jpg": ("b",)}
    items = found(root, skip_empty_caption=True, caption_prefix="photo: ")
    assert captions(items) == {"b.jpg": ("photo: b",)}
    assert rejects(items) == {"a.jpg": "empty_caption"}


def test_the_prefix_stands_before_every_caption(tmp_path: Path) -> None:
    root = lay(tmp_path, {"a.jpg": picture(), "captions.json": json.dumps({"a.jpg": ["one", "two"]})})
    assert captions(found(root, caption_prefix="photo of ")) == {"a.jpg": ("photo of one", "photo of two")}


def test_captions_stay_as_they_are_without_shuffling(tmp_path: Path) -> None:
    assert caption_variants(("a, b", "c"), 0, "key", directory(tmp_path)) == ("a, b", "c")


def test_shuffles_keep_the_prefix_and_the_tags(tmp_path: Path) -> None:
    tags = "a, b, c, d, e, f"
    here = directory(tmp_path, caption_prefix="art, ", cache_shuffle_num=8)
    variants = caption_variants((f"art, {tags}", "art, alone"), 7, "key", here)
    assert len(variants) == 16
    assert all(variant.startswith("art, ") for variant in variants)
    assert all(sorted(variant.removeprefix("art, ").split(", ")) == list("abcdef") for variant in variants[:8])
    assert len(set(variants[:8])) > 5
    assert set(variants[8:]) == {"art, alone"}
    assert variants == caption_variants((f"art, {tags}", "art, alone"), 7, "key", here)
    assert variants != caption_variants((f"art, {tags}", "art, alone"), 8, "key", here)
    assert variants != caption_variants((f"art, {tags}", "art, alone"), 7, "other", here)


def test_shuffle_tags_alone_is_one_shuffle_and_prose_is_left_alone(tmp_path: Path) -> None:
    here = directory(tmp_path, shuffle_tags=True)
    assert len(caption_variants(("a, b, c",), 0, "key", here)) == 1
    assert caption_variants(("a dog runs",), 0, "key", directory(tmp_path, cache_shuffle_num=9)) == ("a dog runs",)


def test_tags_one_a_line_survive_tidying(tmp_path: Path) -> None:
    root = lay(tmp_path, {"a.jpg": picture(), "a.txt": "  red  fox \n\nsnow\n"})
    assert captions(found(root, shuffle_tags=True, cache_shuffle_delimiter="\n")) == {"a.jpg": ("red fox\nsnow",)}
    assert captions(found(root)) == {"a.jpg": ("red fox snow",)}


# --- keys and subsamples ----------------------------------------------------------------------


def test_directories_of_one_name_have_different_keys(tmp_path: Path) -> None:
    for place in ("x/set", "y/set", "y/set#0", "y/other"):
        lay(tmp_path / place, {"a.jpg": picture(), "a.txt": "a"})
    places = [tmp_path / place for place in ("x/set", "y/set", "y/set#0", "y/other", "x/set")]
    directories = [directory(place) for place in places]
    assert occurrences(directories) == (0, 1, 0, 0, 2)
    keys = [item.key for item in scan_all(directories)]
    assert keys == ["set#0/a.jpg", "set#1/a.jpg", "set#0#0/a.jpg", "other#0/a.jpg", "set#2/a.jpg"]


def test_a_subsample_is_a_function_of_the_key(tmp_path: Path) -> None:
    root = tmp_path / "set"
    lay(root, {f"{n}.{end}": str(n) for n in range(400) for end in ("jpg", "txt")})
    lay(root, {"lonely.jpg": picture()})
    whole, half, fifth = ({item.key for item in found(root, subsample_ratio=ratio)} for ratio in (1.0, 0.5, 0.2))
    assert len(whole) == 401
    assert 160 <= len(half) <= 240
    assert 50 <= len(fifth) <= 110
    assert fifth < half < whole
    assert half == {key for key in whole if sample_id(key) < 2**62}


def test_a_subsample_does_not_call_unchosen_rows_missing(tmp_path: Path) -> None:
    names = [f"{n}.jpg" for n in range(60)]
    root = lay(tmp_path / "set", {name: picture() for name in names})
    lay(root, {"metadata.csv": "file,text\n" + "".join(f"{name},x\n" for name in names)})
    items = found(root, subsample_ratio=0.3)
    assert 5 < len(items) < 35
    assert rejects(items) == {}


# --- tables -----------------------------------------------------------------------------------


def test_captions_json(tmp_path: Path) -> None:
    table = {
        "a.jpg": "one",
        "sub/b.png": ["one", "two  words"],
        "stem": "by stem",
        "gone.jpg": "gone",
        "number.jpg": 7,
        "null.jpg": None,
        "half.jpg": "half a pair \ud83d",
        "notes.md": "no picture",
    }
    pictures = ("a.jpg", "sub/b.png", "stem.webp", "number.jpg", "null.jpg", "half.jpg", "extra.jpg", "extra2.jpg")
    root = lay(tmp_path / "set", {name: picture() for name in pictures})
    lay(root, {"captions.json": json.dumps(table), "extra.txt": "from a file", "notes.md": ""})
    items = found(root)
    assert captions(items) == {
        "a.jpg": ("one",),
        "sub/b.png": ("one", "two words"),
        "stem.webp": ("by stem",),
        "extra.jpg": ("from a file",),
    }
    assert rejects(items) == {
        "gone.jpg": "missing_file",
        "number.jpg": "bad_caption",
        "null.jpg": "no_caption",
        "half.jpg": "caption_not_utf8",
        "extra2.jpg": "no_caption",
        "notes.md": "unsupported_format",
    }


def test_a_table_that_is_none_leaves_the_text_files(tmp_path: Path) -> None:
    broken = {
        "captions.json": "{",
        "metadata.json": '"a text"',
        "metadata.csv": "width,height\n1,2\n",
        "metadata.jsonl": "\xff\xfe",
    }
    root = lay(tmp_path, {"a.jpg": picture(), "a.txt": "a", **broken})
    items = found(root)
    assert captions(items) == {"a.jpg": ("a",)}
    assert set(rejects(items).values()) == {"broken_table", "broken_row"}
    assert {name for name, reason in rejects(items).items() if reason == "broken_table"} == set(broken) - {
        "metadata.jsonl"
    }


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
    root = lay(tmp_path, {name: picture() for name in EXPECTED})
    lay(root, {f"metadata.{kind}": write(file, text)})
    items = found(root)
    assert captions(items) == EXPECTED
    assert sorted(rejects(items).values()) == ["broken_row", "missing_file"]
    assert rejects(items)["gone.jpg"] == "missing_file"


def test_broken_rows_are_named_and_the_others_used(tmp_path: Path) -> None:
    lines = [
        b'{"file": "a.jpg", "text": "a"}',
        b"{broken",
        b"[1]",
        b'{"file": "b.jpg", "text": "caf\xe9"}',
        b'{"file": "c.jpg", "text": ["c", "see"]}',
        b'{"file": "d.jpg"}',
        b'{"text": "nameless"}',
    ]
    root = lay(tmp_path, {f"{name}.jpg": picture() for name in "abcd"})
    lay(root, {"metadata.jsonl": b"\n".join(lines)})
    items = found(root)
    assert captions(items) == {"a.jpg": ("a",), "c.jpg": ("c", "see")}
    by_reason = sorted(rejects(items).values())
    assert by_reason == ["broken_row", "broken_row", "broken_row", "caption_not_utf8", "no_caption"]
    assert any(name.startswith("metadata.jsonl:byte 31") for name in rejects(items))


def test_the_nearest_table_wins_and_none_calls_its_row_missing(tmp_path: Path) -> None:
    root = lay(tmp_path, {"sub/a.jpg": picture(), "b.jpg": picture()})
    lay(root, {"captions.json": '{"sub/a.jpg": "far", "b": "b"}', "sub/metadata.csv": "file,text\na.jpg,near\n"})
    items = found(root)
    assert captions(items) == {"b.jpg": ("b",), "sub/a.jpg": ("near",)}
    assert rejects(items) == {}


def test_tables_find_composed_and_absolute_names(tmp_path: Path) -> None:
    root = lay(tmp_path, {"cafe\u0301.jpg": picture(), "b.jpg": picture()})
    lay(root, {"captions.json": json.dumps({"caf\u00e9.jpg": "coffee", str(tmp_path / "b.jpg"): "b"})})
    assert sorted(captions(found(root)).values()) == [("b",), ("coffee",)]


def test_csv_rows_are_found_at_any_place_of_a_long_table(tmp_path: Path) -> None:
    rng = random.Random(0)
    expected = {f"{n}.jpg": f'word {n} "{rng.random()}"\n, line' for n in range(500)}
    buffer = io.StringIO(newline="")
    rows = list(expected.items())
    rng.shuffle(rows)
    csv.writer(buffer).writerows([("file", "text"), *rows])
    root = lay(tmp_path, dict.fromkeys(expected, b""))
    lay(root, {"metadata.csv": buffer.getvalue()})
    assert captions(found(root)) == {name: (" ".join(text.split()),) for name, text in expected.items()}


# --- tars -------------------------------------------------------------------------------------


def test_tars_as_img2dataset_writes_them(tmp_path: Path) -> None:
    for shard in ("00001", "00000"):
        members = []
        for n in range(3):
            key = f"{shard}{n:04d}"
            about = json.dumps({"caption": f"json {key}", "url": "http://example.org", "status": "success"})
            members += [(f"{key}.jpg", picture(n)), (f"{key}.json", about.encode())]
            if n != 2:
                members.append((f"{key}.txt", f"text {key}".encode()))
        write_tar(tmp_path / f"{shard}.tar", members)
        lay(tmp_path, {f"{shard}_stats.json": "{}"})
        pq.write_table(pa.table({"url": ["u"], "caption": ["c"]}), tmp_path / f"{shard}.parquet")
    items = found(tmp_path)
    assert rejects(items) == {}
    assert list(captions(items)) == [
        f"{shard}.tar/{shard}{n:04d}.jpg" for shard in ("00000", "00001") for n in range(3)
    ]
    assert captions(items)["00000.tar/000000000.jpg"] == ("text 000000000",)
    assert captions(items)["00000.tar/000000002.jpg"] == ("json 000000002",)
    assert [item.read() for item in items if isinstance(item, Record)] == [picture(n) for n in (0, 1, 2)] * 2


def test_what_is_wrong_in_a_tar_is_named(tmp_path: Path) -> None:
    members = [
        ("./good.png", picture()),
        ("./good.txt", b"good"),
        ("./lonely.png", picture()),
        ("./textonly.txt", b"no picture"),
        ("./good.png", picture()),
        ("./good.txt", b"again"),
        ("./latin.png", picture()),
        ("./latin.txt", b"caf\xe9"),
        ("./odd.png", picture()),
        ("./odd.json", b"{"),
        ("dir/dotted.name.png", picture()),
        (".hidden", b""),
    ]
    path = write_tar(tmp_path / "set.tar", members)
    items = list(scan(directory(path), 0))
    assert captions(items) == {"set.tar/good.png": ("good",)}
    assert rejects(items) == {
        "set.tar/lonely.png": "no_caption",
        "set.tar/textonly": "missing_file",
        "set.tar/good.png": "duplicate_key",
        "set.tar/latin.png": "caption_not_utf8",
        "set.tar/odd.png": "bad_caption",
        "set.tar/dir/dotted": "missing_file",
    }


def test_damaged_tars_give_what_is_whole(tmp_path: Path) -> None:
    members = [(f"{n}.{end}", data) for n in range(4) for end, data in (("txt", b"caption"), ("png", picture(n)))]
    whole = write_tar(tmp_path / "whole.tar", members).read_bytes()
    third = whole.index(b"2.txt")
    lay(
        tmp_path,
        {
            "cut.tar": whole[: third + 1600],
            "garbled.tar": whole[:third] + b"\x07" * 512 + whole[third + 512 :],
            "no.tar": b"this is no tar at all",
            "empty.tar": b"",
        },
    )
    items = found(tmp_path)
    names = captions(items)
    assert [name for name in names if name.startswith("whole")] == [f"whole.tar/{n}.png" for n in range(4)]
    assert [name for name in names if name.startswith("garbled")] == ["garbled.tar/0.png", "garbled.tar/1.png"]
    assert [name for name in names if name.startswith("cut")][:2] == ["cut.tar/0.png", "cut.tar/1.png"]
    assert {name for name, reason in rejects(items).items() if reason == "broken_tar"} == {
        "cut.tar",
        "garbled.tar",
        "no.tar",
        "empty.tar",
    }


def test_a_tar_that_shrinks_is_rejected_when_read(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "set.tar", [("a.png", picture()), ("a.txt", b"a")])
    (item,) = found(path)
    assert isinstance(item, Record)
    path.write_bytes(path.read_bytes()[:520])
    with pytest.raises(Reject, match="truncated"):
        item.read()


# --- Parquet ----------------------------------------------------------------------------------


def structs(count: int) -> list[dict[str, Any]]:
    return [{"bytes": picture(n), "path": f"{n}.png"} for n in range(count)]


@pytest.mark.parametrize(
    "columns",
    [
        {"image": structs(50), "text": [f"row {n}" for n in range(50)]},
        {"image": [picture(n) for n in range(50)], "caption": [f"row {n}" for n in range(50)]},
        {"jpg": [picture(n) for n in range(50)], "txt": [f"row {n}".encode() for n in range(50)]},
        {"PNG": [picture(n) for n in range(50)], "Prompt": [f"row {n}" for n in range(50)], "text": list(range(50))},
    ],
)
@pytest.mark.parametrize("row_group_size", [7, 1000])
def test_parquet_with_picture_bytes(tmp_path: Path, columns: dict[str, Any], row_group_size: int) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    items = found(tmp_path)
    assert captions(items) == {f"train.parquet/{n:09d}": (f"row {n}",) for n in range(50)}
    order = list(enumerate(items))
    random.Random(0).shuffle(order)
    for n, item in [*order[:20], *enumerate(items)]:
        assert isinstance(item, Record)
        assert pickle.loads(pickle.dumps(item)).read() == picture(n)


def test_odd_parquet(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"image": [*structs(2), None], "text": [["one", "two"], None, ["null picture"]]}),
        tmp_path / "a.parquet",
    )
    pq.write_table(pa.table({"url": ["u"], "text": ["t"]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"image": [picture()], "label": [1]}), tmp_path / "c.parquet")
    lay(tmp_path, {"d.parquet": b"PAR1 or not"})
    items = found(tmp_path)
    assert captions(items) == {"a.parquet/000000000": ("one", "two"), "a.parquet/000000002": ("null picture",)}
    assert rejects(items) == {
        "a.parquet/000000001": "no_caption",
        "b.parquet": "no_image_column",
        "c.parquet": "no_caption_column",
        "d.parquet": "broken_parquet",
    }
    null = [item for item in items if isinstance(item, Record)][-1]
    with pytest.raises(Reject, match="empty_file"):
        decode(null.read())


# --- masks ------------------------------------------------------------------------------------


def masks(items: Iterable[Record | Rejected]) -> dict[str, str | None]:
    named = {}
    for item in items:
        assert isinstance(item, Record)
        named[item.key.split("/", 1)[1]] = item.mask.read().decode() if item.mask else None
    return named


def test_masks_have_the_name_of_their_picture_below_mask_path(tmp_path: Path) -> None:
    names = ("a.jpg", "b.jpg", "sub/a.jpg")
    root = lay(tmp_path / "set", {name: picture() for name in names} | {n[:-3] + "txt": "x" for n in names})
    lay(root / "masks", {"a.png": "mask a", "sub/a.webp": "mask sub a", "b.txt": "no mask"})
    lay(root, {"default.png": "default"})
    inside = {"mask_path": root / "masks", "default_mask_file": root / "default.png"}
    assert masks(found(root, mask_path=inside["mask_path"], default_mask_file=inside["default_mask_file"])) == {
        "a.jpg": "mask a",
        "b.jpg": "default",
        "sub/a.jpg": "mask sub a",
    }
    assert masks(list(scan(directory(root / "sub"), 0))) == {"a.jpg": None}
    assert masks(list(scan(directory(root / "sub", default_mask_file=root / "default.png"), 0))) == {"a.jpg": "default"}


def test_masks_of_tars_and_parquet_lie_in_a_folder_of_their_name(tmp_path: Path) -> None:
    root = tmp_path / "set"
    root.mkdir()
    write_tar(root / "00.tar", [("k.png", picture()), ("k.txt", b"k")])
    pq.write_table(pa.table({"image": structs(2), "text": ["a", "b"]}), root / "01.parquet")
    lay(tmp_path / "masks", {"00/k.png": "mask k", "01/000000001.png": "mask row 1"})
    assert masks(found(root, mask_path=tmp_path / "masks")) == {
        "00.tar/k.png": "mask k",
        "01.parquet/000000000": None,
        "01.parquet/000000001": "mask row 1",
    }
