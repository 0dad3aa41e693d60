"""The script that builds a set of clip art, on a small package in Debian's layout."""

import hashlib
import importlib
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd3_light.config.load_dataset import load_directories
from sd3_light.sources.preprocess import make_thumbnail

FOLDER = Path(__file__).parents[3] / "examples" / "icons"
COUNT = 120
SVG = """<svg xmlns="http://www.w3.org/2000/svg"><metadata><rdf:RDF xmlns:cc="http://web.resource.org/cc/"
 xmlns:dc="http://purl.org/dc/elements/1.1/" xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><cc:Work>
<dc:title>{title}</dc:title><dc:subject><rdf:Bag>{items}</rdf:Bag></dc:subject>
<dc:publisher><cc:Agent><dc:title>Open Clip Art Project</dc:title></cc:Agent></dc:publisher>
</cc:Work></rdf:RDF></metadata><desc>{look}</desc></svg>"""


@pytest.fixture(scope="module")
def clipart() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("clipart")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("clipart", "build", "packages"):
            sys.modules.pop(name, None)


def svg(title: str, look: str, *keywords: str) -> bytes:
    items = "".join(f"<rdf:li>{word}</rdf:li>" for word in keywords)
    return SVG.format(title=title, items=items, look=look).encode()


def deb(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./usr/share/openclipart/svg/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    archive = b"!<arch>\n"
    for name, content in ((b"debian-binary", b"2.0"), (b"data.tar.xz", lzma.compress(data.getvalue()))):
        archive += name.ljust(48) + str(len(content)).encode().ljust(10) + b"`\n" + content + b"\n" * (len(content) % 2)
    return archive


@pytest.fixture
def package(clipart: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Drawings of COUNT things, twins of the first by file, title and look, and drawings that are left out."""
    files = {f"animals/mammals/thing{n}.svg": svg(f"Thing {chr(97 + n % 26)}{chr(97 + n // 26)}x", f"look {n}", "zoo")
             for n in range(COUNT)}  # fmt: skip
    files |= {
        "food/same_file.svg": files["animals/mammals/thing0.svg"],
        "food/same_look.svg": svg("Another title", "look 1"),
        "food/big_apple_1.svg": svg("Big_Apple 1", "apple 1", "fruit", "red", "big apple"),
        "food/big_apple_2.svg": svg("big apple 2", "apple 2"),
        "food/untitled.svg": svg("Untitled 3", "look a"),
        "food/no_title.svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "food/broken.svg": b"<svg",
        "special/example.svg": svg("example", "look b"),
    }
    folder = tmp_path / "packages"
    folder.mkdir()
    content = deb(files)
    (folder / clipart.FILE).write_bytes(content)
    monkeypatch.setattr(clipart, "CLIPART", replace(clipart.CLIPART, sha256=hashlib.sha256(content).hexdigest()))
    monkeypatch.setattr(sys.modules["build"], "open_image", drawn)
    return folder


def drawn(content: bytes, size: int) -> Image.Image:
    """Draw noise that depends on the look alone."""
    look = content.split(b"<desc>")[1].split(b"</desc>")[0]
    pixels = np.random.default_rng(list(look)).integers(0, 256, (8, 8, 3), np.uint8)
    return Image.fromarray(pixels).resize((size, size), Image.Resampling.NEAREST).convert("RGBA")


def run(clipart: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    class Threads:  # processes would not see the patches
        def __init__(self, _: int) -> None:
            pass

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def map(self, function: Any, items: Any, chunksize: int) -> Any:
            return map(function, items)

    monkeypatch.setattr(sys.modules["build"], "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(clipart, "find_spec", lambda name: name)
    monkeypatch.setattr(sys, "argv", ["clipart.py", *map(str, arguments), "--size", "32"])
    clipart.main()


def test_no_twins_and_whole_groups(clipart: Any, package: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "clipart"
    run(clipart, monkeypatch, out, "--packages", package)
    cells = {cell["file"]: cell for cell in json.loads((out / "cells.json").read_text(encoding="utf-8"))}
    things = {f"animals/animals__mammals__thing{number}.png" for number in range(COUNT)}
    apples = {"food/food__big_apple_1.png", "food/food__big_apple_2.png"}
    assert set(cells) == things | apples, "the twins of things 0 and 1 are left out"
    assert cells["food/food__big_apple_1.png"]["captions"] == ["big apple", "big apple: fruit, red"]
    assert len({cells[file]["held_out"] for file in apples}) == 1, "titles that differ in numbers are one group"
    held_out = [file for file, cell in cells.items() if cell["held_out"]]
    assert 0 < len(held_out) < COUNT // 6
    for file, cell in cells.items():
        path = out / ("held_out" if cell["held_out"] else "train") / file
        captions = json.loads((path.parent / "captions.json").read_text(encoding="utf-8"))
        assert captions[path.name] == cell["captions"]
    assert len(list(out.rglob("*.png"))) == len(cells)
    for toml in ("data.toml", "held_out.toml"):
        assert not load_directories(out / toml)[1]
    assert "| openclipart-svg | 0.18+dfsg-19 | public domain |" in (out / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert f"{COUNT + 7} drawings, {COUNT + 4} with a telling title, {COUNT + 2} that differ" in capsys.readouterr().out


def test_another_package_is_refused(clipart: Any, package: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (package / clipart.FILE).write_bytes(b"!<arch>\n")
    with pytest.raises(SystemExit, match="has sha256"):
        run(clipart, monkeypatch, tmp_path / "clipart", "--packages", package)
    assert not (tmp_path / "clipart").exists()


def test_titles_are_cleaned_and_give_way_to_file_names(clipart: Any) -> None:
    names = ("a/go-home.svg", "a/go-back.svg", "a/001.svg", "b/trash_full.svg", "b/kiwi.svg")
    titles = ("lemon theme", "lemon theme", "lemon theme", "lemon theme", "Kiwi")
    numbered = [(f"b/star{number}.svg", "lemon theme") for number in range(4)]  # four equal names
    drawings = [
        clipart.read_drawing(name, svg(title, "x", "icon", "hash(0x86a4aa)", "HASH", "fruit"))
        for name, title in (*zip(names, titles, strict=True), *numbered)
    ]
    captions = {icon.cell.file: icon.cell.captions for icon in clipart.captioned(drawings)}
    assert captions == {
        "a/a__go-home.png": ["go home", "go home: fruit"],
        "a/a__go-back.png": ["go back", "go back: fruit"],
        "b/b__trash_full.png": ["trash full", "trash full: fruit"],
        "b/b__kiwi.png": ["kiwi", "kiwi: fruit"],
    }
    assert clipart.clean(" Big_Red  Apple (2)") == "big red apple"
    assert clipart.clean("gelato all&amp;#39;italiana") == "gelato all'italiana"
    assert clipart.clean("tux-01.svg") == "tux"
    assert clipart.clean("boeing 747 jet") == "boeing 747 jet"
    # a twin of a drawing that is left out is compared with those that are kept alone.
    base = make_thumbnail(png(0), None)
    assert clipart.different([icon(clipart, 0), icon(clipart, 1)], [base, base]) == [0]
    far = make_thumbnail(png(9), None)
    assert clipart.different([icon(clipart, number) for number in range(3)], [base, far, base]) == [0, 1]
    same_file = [icon(clipart, 0), icon(clipart, 0)]
    assert clipart.different(same_file, [base, far]) == [0]


def icon(clipart: Any, number: int) -> Any:
    return clipart.Icon(clipart.Cell(f"{number}.png", "", "", []), bytes([number]))


def png(seed: int) -> bytes:
    data = io.BytesIO()
    drawn(b"<desc>%d</desc>" % seed, 32).convert("RGB").save(data, "PNG")
    return data.getvalue()
