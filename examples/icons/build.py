"""Builds a captioned set of icons from openly licensed npm packages.

    pip install resvg_py
    python examples/icons/build.py OUT                     # six styles of the same emoji, 21,000 images, two languages
    python examples/icons/build.py OUT --large             # and about 20,000 colour icons of Iconify, English names

OUT/train, OUT/held_out      images and captions.json, one folder per style
OUT/data.toml, held_out.toml  dataset TOMLs for `sd3-light parts`, `cache` and `train`
OUT/cells.json                one row per image: concept, style, captions, whether it is held out
OUT/ATTRIBUTION.md            what came from where, under which licence

4% of the groups of cells (concept, style) are held out. A group has all cells of a style whose concepts differ only in
skin tone, gender, hair or direction, and all cells of any style with the same file or a similar drawing, so no held-out
image has a close relative in training. Concepts of held-out cells appear in training in other styles, and their styles
with other concepts: every held-out prompt is answerable and has a true image.
"""

import argparse
import io
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from packages import ICONIFY, MORE_NAMES, NAMES, STYLES, Package, Style, fetch, members, read_json
from PIL import Image

from sd3_light.sources.decode import content_digest
from sd3_light.sources.groups import group_images, group_positions, image_hash
from sd3_light.sources.preprocess import make_thumbnail

HELD_OUT_SHARE = 0.04
VARIANTS = re.compile(
    r"\b((medium-)?(light|medium|dark) skin tone|man|men|woman|women|person|people|boy|girl|child|children|adults?|"
    r"older|male|female|(red|blonde?|curly|white) hair|hair|bald|beard|facing|pointing|backhand|"
    r"(left|right|up|down)(wards)?|(counter)?clockwise)\b"
)
SKIN_TONES = {chr(code) for code in range(0x1F3FB, 0x1F400)}
PERMISSIVE = {"MIT", "Apache-2.0", "CC0-1.0", "CC-BY-4.0", "ISC", "Unlicense", "BSD-3-Clause"}
SAME_ART = {"fluent-emoji", "fluent-emoji-flat", "twemoji", "noto", "noto-v1", "openmoji"}  # would leak held-out cells
MIN_CONTRAST = 24  # between the darkest and the lightest pixel; below this an icon is blank on white
DATA = """# {count:,} images; see ATTRIBUTION.md
resolutions = [{size}]
skip_empty_caption = true
"""
DIRECTORY = """
[[directory]]
path = "{path}"
"""


@dataclass(frozen=True)
class Cell:
    """One image: its file below `train` or `held_out`, what it shows, in which style."""

    file: str
    concept: str
    style: str
    captions: list[str]
    held_out: bool = False


@dataclass(frozen=True)
class Icon:
    """An image as its package has it."""

    cell: Cell
    content: bytes


def characters(stem: str) -> str | None:
    """Return the emoji of a file name such as `1f468-200d-1f33e`, without variation selectors; None for others."""
    try:
        text = "".join(chr(int(code, 16)) for code in stem.split("-"))
    except (ValueError, OverflowError):
        return None
    return text.replace("\ufe0f", "")


def emoji_names(folder: Path) -> dict[str, tuple[str, str]]:
    """Return emoji -> (English, Chinese name) of those that have both."""
    names: dict[str, dict[str, str]] = {"en": {}, "zh": {}}
    for package, kind in ((NAMES, "annotations"), (MORE_NAMES, "annotationsDerived")):
        archive = fetch(package, folder)
        for language, known in names.items():
            table = read_json(archive, f"package/{kind}/{language}/annotations.json")[kind]["annotations"]
            known |= {key.replace("\ufe0f", ""): row["tts"][0] for key, row in table.items() if row.get("tts")}
    return {key: (names["en"][key], names["zh"][key]) for key in names["en"].keys() & names["zh"].keys()}


def style_icons(
    name: str, style: Style, archive: Path, names: dict[str, tuple[str, str]], tones: bool
) -> Iterator[Icon]:
    """Yield the icons of one style, each concept once."""
    seen: set[str] = set()
    for file, content in members(archive, style.folder):
        stem = file.removesuffix("svg").removesuffix("webp").removesuffix("png").removesuffix(".")
        emoji = characters(stem)
        if emoji is None or emoji not in names or emoji in seen or (not tones and SKIN_TONES & set(emoji)):
            continue
        seen.add(emoji)
        english, chinese = names[emoji]
        captions = [f"{english}, {style.english}", f"{chinese}，{style.chinese}"]
        yield Icon(Cell(f"{name}/{stem.lower()}.png", english, name, captions), content)


def iconify_icons(archive: Path, logos: bool) -> Iterator[tuple[dict[str, Any], Iterator[Icon]]]:
    """Yield (facts of a set, its icons) of the permissively licensed colour sets."""
    collections = read_json(archive, "package/collections.json")
    for file, content in members(archive, "package/json/"):
        prefix = file.removesuffix(".json")
        facts = collections.get(prefix, {})  # retired sets are not listed
        is_open = facts.get("license", {}).get("spdx") in PERMISSIVE and (logos or facts.get("category") != "Logos")
        if facts.get("palette") and is_open and prefix not in SAME_ART:
            yield facts, set_icons(prefix, facts["name"], json.loads(content))


def set_icons(prefix: str, title: str, table: dict[str, Any]) -> Iterator[Icon]:
    """Yield the icons of an Iconify set as SVG."""
    for name, icon in table["icons"].items():
        box = {key: icon.get(key, table.get(key, default)) for key, default in
               (("left", 0), ("top", 0), ("width", 16), ("height", 16))}  # fmt: skip
        svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="{left} {top} {width} {height}">'.format(**box)
        concept = name.replace("-", " ")
        cell = Cell(f"{prefix}/{name}.png", concept, prefix, [f"{concept}, {title} style"])
        yield Icon(cell, f"{svg}{icon['body']}</svg>".encode())


def figure(concept: str) -> str:
    """Return what a concept shows, without words for skin tone, gender, hair and direction."""
    return " ".join(re.findall(r"\w+", VARIANTS.sub(" ", concept.lower())))


def hold_out(icons: list[Icon], thumbnails: list[bytes]) -> list[Cell]:
    """Return the cells with 4% of their groups held out, by a hash of their names.

    A concept keeps at least one other style for training. Groups with an icon of Iconify are for training.
    """
    cells = [icon.cell for icon in icons]
    names = [(f"{icon.cell.style}/{figure(icon.cell.concept)}", content_digest(icon.content)) for icon in icons]
    groups = group_images(zip(names, thumbnails, strict=True))
    hashes = np.array([image_hash(f"{cell.concept}/{cell.style}") for cell in cells], np.uint64)
    chosen = group_positions(groups, hashes) < HELD_OUT_SHARE
    trained = {cell.concept for cell, is_chosen in zip(cells, chosen, strict=True) if not is_chosen}
    kept = {
        group
        for group, cell in zip(groups.tolist(), cells, strict=True)
        if cell.style not in STYLES or cell.concept not in trained
    }
    return [
        replace(cell, held_out=bool(is_chosen) and group not in kept)
        for cell, is_chosen, group in zip(cells, chosen, groups.tolist(), strict=True)
    ]


def draw(icon: Icon, out: Path, size: int) -> bytes:
    """Write an icon on white, centred in a square; return its thumbnail, b"" if the icon is broken or blank."""
    try:
        image = open_image(icon.content, size)
    except (OSError, ValueError) as error:  # PIL's and resvg's
        print(f"skipped {icon.cell.file}: {error}", flush=True)
        return b""
    scale = size / max(image.size)
    fitted = image.resize([max(1, round(side * scale)) for side in image.size], Image.Resampling.LANCZOS)
    canvas = Image.new("RGBA", (size, size), "white")
    canvas.alpha_composite(fitted, ((size - fitted.width) // 2, (size - fitted.height) // 2))
    pixels = canvas.convert("RGB")
    low, high = zip(*pixels.getextrema(), strict=True)
    if max(high) - min(low) < MIN_CONTRAST:
        return b""
    path = out / "train" / icon.cell.file
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels.save(path)
    return make_thumbnail(path.read_bytes(), None)


def open_image(content: bytes, size: int) -> Image.Image:
    """Decode a raster image, or render an SVG with its longer side at ``size``."""
    if b"<svg" in content[:2000]:
        import resvg_py

        text = content.decode()
        content = bytes(resvg_py.svg_to_bytes(svg_string=text, width=size, skip_system_fonts=True))
    with Image.open(io.BytesIO(content)) as image:
        return image.convert("RGBA")


def write_set(
    icons: list[Icon],
    out: Path,
    size: int,
    processes: int,
    divide: Callable[[list[Icon], list[bytes]], list[Cell]] = hold_out,
) -> list[Cell]:
    """Draw the icons, hold some out, and write captions, dataset TOMLs and the list of cells that were drawn.

    ``divide`` returns the cells that are used, from the icons that were drawn and their thumbnails.
    """
    with ProcessPoolExecutor(processes) as pool:
        drawn = list(pool.map(partial(draw, out=out, size=size), icons, chunksize=32))
    cells = divide([icon for icon, good in zip(icons, drawn, strict=True) if good], list(filter(None, drawn)))
    used = {cell.file for cell in cells}
    for icon, good in zip(icons, drawn, strict=True):
        if good and icon.cell.file not in used:
            (out / "train" / icon.cell.file).unlink()
    for cell in cells:
        if cell.held_out:
            path = out / "held_out" / cell.file
            path.parent.mkdir(parents=True, exist_ok=True)
            (out / "train" / cell.file).rename(path)
    for part, toml in (("train", "data.toml"), ("held_out", "held_out.toml")):
        folders: dict[str, dict[str, list[str]]] = defaultdict(dict)
        for cell in cells:
            if cell.held_out == (part == "held_out"):
                folders[cell.style][cell.file.rpartition("/")[2]] = cell.captions
        for style, captions in folders.items():
            text = json.dumps(captions, ensure_ascii=False, indent=0)
            (out / part / style / "captions.json").write_text(text, encoding="utf-8")
        count = sum(map(len, folders.values()))
        tables = "".join(DIRECTORY.format(path=f"{part}/{style}") for style in sorted(folders))
        (out / toml).write_text(DATA.format(count=count, size=size) + tables, encoding="utf-8")
    lines = ",\n".join(json.dumps(asdict(cell), ensure_ascii=False) for cell in cells)
    (out / "cells.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return cells


def write_attribution(out: Path, packages: Iterable[Package], sets: Iterable[dict[str, Any]], size: int) -> None:
    """Write what the images are made of. Scaling to ``size`` pixels on white is the only change."""
    lines = [
        "# Attribution\n",
        f"The images were scaled to {size} px on a white background and are otherwise unchanged. Share-alike licences",
        "apply to redistributed images; keep this file with the set.\n",
        "| package | version | licence | by |\n|---|---|---|---|",
        *(f"| {item.name} | {item.version} | {item.licence} | {item.makers} |" for item in packages),
    ]
    rows = [f"| {facts['name']} | {facts['license']['spdx']} | {facts['author']['name']} |" for facts in sets]
    if rows:
        lines += ["\n| Iconify set | licence | by |\n|---|---|---|", *rows]
    (out / "ATTRIBUTION.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--packages", type=Path, default=Path("packages"), help="folder of the downloaded archives")
    parser.add_argument("--size", type=int, default=128, help="pixels, a multiple of 16")
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=list(STYLES))
    parser.add_argument("--no-skin-tones", action="store_true", help="leave out the five variants of people and hands")
    parser.add_argument("--large", action="store_true", help="add Iconify's permissively licensed colour sets")
    parser.add_argument("--logos", action="store_true", help="with --large: company logos too, which are trademarks")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="use every Nth concept, for a trial")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"{args.out} already exists; choose another folder")
    if find_spec("resvg_py") is None:
        raise SystemExit("resvg_py, which draws SVG files, is not installed; run: pip install resvg_py")
    names = emoji_names(args.packages)
    names = dict(sorted(names.items())[:: args.every])
    styles = {name: STYLES[name] for name in args.styles}
    icons = [
        icon
        for name, style in styles.items()
        for icon in style_icons(name, style, fetch(style.package, args.packages), names, not args.no_skin_tones)
    ]
    packages, sets = [NAMES, MORE_NAMES, *(style.package for style in styles.values())], []
    if args.large:
        packages.append(ICONIFY)
        for facts, more in iconify_icons(fetch(ICONIFY, args.packages), args.logos):
            sets.append(facts)
            icons += list(more)[:: args.every]
    unfinished = args.out.with_name(f"{args.out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of an interrupted build
    unfinished.mkdir(parents=True)
    cells = write_set(icons, unfinished, args.size, args.processes)
    write_attribution(unfinished, packages, sets, args.size)
    unfinished.rename(args.out)
    held_out = sum(cell.held_out for cell in cells)
    print(f"wrote {args.out}: {len(cells) - held_out:,} images to train on, {held_out:,} held out")


if __name__ == "__main__":
    main()
