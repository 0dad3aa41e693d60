import inspect
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sd3_light.randomness import sample_id
from sd3_light.sources.captions import caption_variants
from sd3_light.sources.records import Record, Rejected
from sd3_light.sources.scan import occurrences, scan
from sd3_light.sources.signature import signature
from tests.refusals import refused
from tests.unit.sources.inputs import captions, directory, png, rejects, scan_all, scan_items, write_files, write_tar


def test_folders_are_walked_in_sorted_order(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write_files(root, {"b.jpg": png(1), "a.PNG": png(2), "z/deep/c.webp": png(3), "m/d.jpeg": png(4)})
    write_files(root, {"b.txt": "bee", "a.txt": "  a \n\t bird  ", "z/deep/c.txt": "\ufeffsea", "m/d.txt": ""})
    write_files(root, {".hidden/e.jpg": png(), "._b.jpg": b"mac", "notes.md": "not an image"})
    items = scan_items(root)
    assert [item.key for item in items] == ["set#0/a.PNG", "set#0/b.jpg", "set#0/m/d.jpeg", "set#0/z/deep/c.webp"]
    assert captions(items) == {"a.PNG": ("a bird",), "b.jpg": ("bee",), "m/d.jpeg": ("",), "z/deep/c.webp": ("sea",)}
    assert [item.image.read() for item in items if isinstance(item, Record)] == [png(n) for n in (2, 1, 4, 3)]


def test_details_of_rejects_are_valid_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "loop").symlink_to(folder)
    write_tar(tmp_path / "x.tar", [(os.fsdecode(b"a.caf\xe9"), b"")])
    assert sorted(rejects(scan_items(tmp_path)).values()) == ["folder_loop", "missing_file"]


def test_rejects_have_the_location_of_their_image(tmp_path: Path) -> None:
    root = write_files(tmp_path, {"lonely.jpg": png(3), os.fsdecode(b"caf\xe9.jpg"): png(4), "orphan.txt": "x"})
    rejected = [item for item in scan_items(root) if isinstance(item, Rejected)]
    shown = {item.reason: item.image.read() if item.image else None for item in rejected}
    assert shown == {"no_caption": png(3), "name_not_utf8": png(4), "missing_file": None}


def test_folders_can_be_deeper_than_the_stack(tmp_path: Path) -> None:
    write_files(tmp_path / Path(*["d"] * 120), {"a.jpg": png(), "a.txt": "deep"})
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 80)
    try:
        signed, items = signature(directory(tmp_path), 0), scan_items(tmp_path)
    finally:
        sys.setrecursionlimit(limit)
    assert list(captions(items).values()) == [("deep",)]
    assert signed == signature(directory(tmp_path), 0)


def test_a_scan_is_lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{folder}/{n}.{end}" for folder in "abc" for n in range(3) for end in ("jpg", "txt")]
    root = write_files(tmp_path, dict.fromkeys(names, "x"))
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
        refused(str(gone), scan, directory(**keys), 0)
    write_files(tmp_path, {"x.zip": b""})
    refused(r"is not a folder, \.tar or \.parquet file", scan, directory(tmp_path / "x.zip"), 0)


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


def test_leading_tags_are_kept_and_others_dropped_at_their_rate(tmp_path: Path) -> None:
    tags = [f"tag{number}" for number in range(12)]
    keys = {"caption_prefix": "art, ", "cache_shuffle_num": 200}
    here = directory(tmp_path, keep_tokens=2, tag_dropout=0.25, **keys)
    variants = caption_variants((f"art, {', '.join(tags)}",), 7, "key", here)
    kept = [variant.split(", ") for variant in variants]
    assert all(parts[:3] == ["art", "tag0", "tag1"] for parts in kept)
    assert all(len(set(parts)) == len(parts) and set(parts[3:]) <= set(tags[2:]) for parts in kept)
    assert sum(len(parts) - 3 for parts in kept) / 2000 == pytest.approx(0.75, abs=0.03)
    assert variants == caption_variants((f"art, {', '.join(tags)}",), 7, "key", here), "a function of seed and key"
    plain = caption_variants((f"art, {', '.join(tags)}",), 7, "key", directory(tmp_path, **keys))
    undropped = caption_variants((f"art, {', '.join(tags)}",), 7, "key", directory(tmp_path, keep_tokens=0, **keys))
    assert plain == undropped


def test_shuffles_of_few_tags_and_of_prose(tmp_path: Path) -> None:
    here = directory(tmp_path, cache_shuffle_num=50, tag_dropout=0.99)
    assert all(variant in ("a", "b", "a, b", "b, a") for variant in caption_variants(("a, b",), 0, "key", here))
    once = directory(tmp_path, shuffle_tags=True)
    assert len(caption_variants(("a, b, c",), 0, "key", once)) == 1
    assert caption_variants(("a dog runs",), 0, "key", directory(tmp_path, cache_shuffle_num=9)) == ("a dog runs",)


def test_tags_on_separate_lines_are_preserved(tmp_path: Path) -> None:
    root = write_files(tmp_path, {"a.jpg": png(), "a.txt": "  red  fox \n\nsnow\n"})
    assert captions(scan_items(root, shuffle_tags=True, cache_shuffle_delimiter="\n")) == {"a.jpg": ("red fox\nsnow",)}
    assert captions(scan_items(root)) == {"a.jpg": ("red fox snow",)}


def test_directories_of_one_name_have_different_keys(tmp_path: Path) -> None:
    for place in ("x/set", "y/set", "y/set#0", "y/other"):
        write_files(tmp_path / place, {"a.jpg": png(), "a.txt": "a"})
    places = [tmp_path / place for place in ("x/set", "y/set", "y/set#0", "y/other", "x/set")]
    directories = [directory(place) for place in places]
    assert occurrences(directories) == (0, 1, 0, 0, 2)
    keys = [item.key for item in scan_all(directories)]
    assert keys == ["set#0/a.jpg", "set#1/a.jpg", "set#0#0/a.jpg", "other#0/a.jpg", "set#2/a.jpg"]


def test_a_subsample_is_a_function_of_the_key_and_its_other_rows_are_not_missing(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write_files(root, {f"{n}.{end}": str(n) for n in range(400) for end in ("jpg", "txt")})
    write_files(root, {"lonely.jpg": png()})
    whole, half, fifth = ({item.key for item in scan_items(root, subsample_ratio=ratio)} for ratio in (1.0, 0.5, 0.2))
    assert len(whole) == 401
    assert 160 <= len(half) <= 240
    assert 50 <= len(fifth) <= 110
    assert fifth < half < whole
    assert half == {key for key in whole if sample_id(key) < 2**62}
    names = [f"{n}.jpg" for n in range(60)]
    root = write_files(tmp_path / "rows", {name: png() for name in names})
    write_files(root, {"metadata.csv": "file,text\n" + "".join(f"{name},x\n" for name in names)})
    items = scan_items(root, subsample_ratio=0.3)
    assert 5 < len(items) < 35
    assert rejects(items) == {}


def masks(items: Iterable[Record | Rejected]) -> dict[str, str | None]:
    named = {}
    for item in items:
        assert isinstance(item, Record)
        named[item.key.split("/", 1)[1]] = item.mask.read().decode() if item.mask else None
    return named


def test_masks_have_the_name_of_their_image_below_mask_path(tmp_path: Path) -> None:
    names = ("a.jpg", "b.jpg", "sub/a.jpg")
    root = write_files(tmp_path / "set", {name: png() for name in names} | {n[:-3] + "txt": "x" for n in names})
    write_files(root / "masks", {"a.png": "mask a", "sub/a.webp": "mask sub a", "b.txt": "no mask"})
    write_files(root, {"default.png": "default"})
    items = scan_items(root, mask_path=root / "masks", default_mask_file=root / "default.png")
    assert masks(items) == {"a.jpg": "mask a", "b.jpg": "default", "sub/a.jpg": "mask sub a"}
    assert masks(list(scan(directory(root / "sub"), 0))) == {"a.jpg": None}
    assert masks(list(scan(directory(root / "sub", default_mask_file=root / "default.png"), 0))) == {"a.jpg": "default"}


def test_masks_of_tars_and_parquet_are_in_a_folder_of_the_same_name(tmp_path: Path) -> None:
    root = tmp_path / "set"
    root.mkdir()
    write_tar(root / "00.tar", [("k.png", png()), ("k.txt", b"k")])
    pq.write_table(pa.table({"image": [png(), png()], "text": ["a", "b"]}), root / "01.parquet")
    write_files(tmp_path / "masks", {"00/k.png": "mask k", "01/000000001.png": "mask row 1"})
    assert masks(scan_items(root, mask_path=tmp_path / "masks")) == {
        "00.tar/k.png": "mask k",
        "01.parquet/000000000": None,
        "01.parquet/000000001": "mask row 1",
    }
