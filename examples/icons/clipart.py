"""Builds a captioned set of clip art from Debian's package openclipart-svg: drawings of many makers, with their titles.

    pip install resvg_py
    python examples/icons/clipart.py OUT                   # about 4,300 images, English

OUT has what `build.py` writes: train, held_out, data.toml, held_out.toml, cells.json, ATTRIBUTION.md; a folder per
category. The first caption is the title, or the file name where many drawings share the title; the second has keywords
too. Drawings without a telling title, blank, broken and repeated ones, and those similar to another are left out. 8% of
the groups are held out: a group has all drawings with the same title except for numbers, or with similar drawings.
"""

import argparse
import html
import io
import lzma
import os
import re
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from build import Cell, Icon, write_attribution, write_set
from packages import Package, check_hash

from sd3_light.sources.decode import content_digest
from sd3_light.sources.earlier_images import Thumbnails
from sd3_light.sources.groups import group_images, group_positions, image_hash
from sd3_light.sources.temporary_database import temporary_database

CLIPART = Package(
    "openclipart-svg",
    "0.18+dfsg-19",
    "989712d90d57dfa3230049f553bb43b76c30ee4d4b8c5f6e106e33f7db5cbdc5",
    "public domain",
    "Open Clip Art Library, packaged by Debian",
)
FILE = "openclipart-svg_1%3a0.18+dfsg-19_all.deb"
ROOT = "./usr/share/openclipart/svg/"
HELD_OUT_SHARE = 0.08
SKIPPED = ("special/", "unsorted/", "recreation/games/cards/")  # examples of the program, duplicates, 200 card faces
MAX_BYTES = 400_000  # of a drawing; larger ones take minutes
TITLE, SUBJECT = "{http://purl.org/dc/elements/1.1/}title", "{http://purl.org/dc/elements/1.1/}subject"
ITEM = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li"
WORK = ("{http://web.resource.org/cc/}Work", "{http://creativecommons.org/ns#}Work")
EMPTY_WORDS = {
    "untitled",
    "unnamed",
    "clipart",
    "clip",
    "art",
    "image",
    "drawing",
    "new",
    "document",
    "svg",
    "icon",
    "unsorted",
}
NO_KEYWORD = re.compile(r"hash\b|0x")  # addresses that a program wrote
MOST_KEYWORDS = 5
MOST_EQUAL_TITLES = 3


def fetch(folder: Path) -> Path:
    """Return the package in ``folder``; download it with apt-get if it is not there. Another content is an error."""
    path = folder / FILE
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        apt = shutil.which("apt-get")
        if apt is None:
            raise SystemExit(f"apt-get is not installed; put Debian's {FILE} into {folder}")
        subprocess.run([apt, "download", f"{CLIPART.name}=1:{CLIPART.version}"], cwd=folder, check=True)
    check_hash(path, CLIPART)
    return path


def drawings(package: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path below the root, SVG) of the drawings in a Debian package, which is an ar archive."""
    data = lzma.decompress(ar_member(package.read_bytes(), b"data.tar.xz"))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            name = member.name.removeprefix(ROOT)
            if member.isfile() and name.endswith(".svg") and not name.startswith(SKIPPED) and member.size <= MAX_BYTES:
                file = tar.extractfile(member)
                assert file is not None
                yield name, file.read()


def ar_member(archive: bytes, name: bytes) -> bytes:
    """Return a member of an ar archive: headers of 60 bytes, contents padded to even lengths."""
    start = len(b"!<arch>\n")
    while start < len(archive):
        header = archive[start : start + 60]
        size = int(header[48:58])
        if header[:16].strip().rstrip(b"/") == name:
            return archive[start + 60 : start + 60 + size]
        start += 60 + size + size % 2
    raise SystemExit(f"the package has no {name.decode()}; delete it and run again")


@dataclass(frozen=True)
class Drawing:
    """A drawing: its path below the root, title and keywords."""

    name: str
    title: str
    keywords: tuple[str, ...]
    content: bytes


def read_drawing(name: str, content: bytes) -> Drawing | None:
    """Return a drawing with its metadata; None without any."""
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError:
        return None
    work = next((element for key in WORK for element in root.iter(key)), None)
    if work is None:
        return None
    subject = work.find(SUBJECT)
    keywords = [clean(item.text or "") for item in subject.iter(ITEM)] if subject is not None else []
    keywords = [word for word in keywords if not NO_KEYWORD.match(word)]
    return Drawing(name, clean(work.findtext(TITLE) or ""), tuple(dict.fromkeys(keywords)), content)


def captioned(drawings: list[Drawing]) -> Iterator[Icon]:
    """Yield the drawings whose title, or else file name, tells what they show.

    A title of more than `MOST_EQUAL_TITLES` drawings names a collection; then the file name may say more.
    """
    own = Counter(drawing.title for drawing in drawings)
    titles = [
        drawing.title if own[drawing.title] <= MOST_EQUAL_TITLES else file_title(drawing.name) for drawing in drawings
    ]
    counts = Counter(titles)
    for drawing, title in zip(drawings, titles, strict=True):
        if counts[title] > MOST_EQUAL_TITLES or not set(words(title)) - EMPTY_WORDS:
            continue
        keywords = [word for word in drawing.keywords if word and word not in title and word not in EMPTY_WORDS]
        captions = [title, f"{title}: {', '.join(keywords[:MOST_KEYWORDS])}"] if keywords else [title]
        category = drawing.name.split("/")[0]
        file = drawing.name.removesuffix(".svg").replace("/", "__")
        yield Icon(Cell(f"{category}/{file}.png", title, category, captions), drawing.content)


def file_title(name: str) -> str:
    """Return a file name as a title."""
    return clean(name.rpartition("/")[2].removesuffix(".svg").replace("-", " "))


def clean(text: str) -> str:
    """Return a title in lower case without underscores and the numbers of copies at its end."""
    text = re.sub(r"[\s_]+", " ", html.unescape(html.unescape(text))).strip().lower().removesuffix(".svg")
    return re.sub(r"[\s(#-]*\d+\)?$", "", text).strip()


def words(title: str) -> list[str]:
    """Return the words of at least three letters."""
    return re.findall(r"[^\W\d_]{3,}", title)


def hold_out(icons: list[Icon], thumbnails: list[bytes]) -> list[Cell]:
    """Return the cells of drawings that differ from those before them, with 8% of their groups held out."""
    kept = different(icons, thumbnails)
    cells = [icons[index].cell for index in kept]
    titles = [(" ".join(words(cell.concept)),) for cell in cells]
    groups = group_images(zip(titles, [thumbnails[index] for index in kept], strict=True))
    hashes = np.array([image_hash(cell.file) for cell in cells], np.uint64)
    chosen = group_positions(groups, hashes) < HELD_OUT_SHARE
    return [replace(cell, held_out=bool(flag)) for cell, flag in zip(cells, chosen, strict=True)]


def different(icons: list[Icon], thumbnails: list[bytes]) -> list[int]:
    """Return the indices of drawings without the file of an earlier one, and without similarity to one that is kept."""
    digests: set[str] = set()
    kept = []
    with closing(temporary_database()) as database:
        known = Thumbnails(database)
        for index, (icon, thumbnail) in enumerate(zip(icons, thumbnails, strict=True)):
            digest = content_digest(icon.content)
            if digest not in digests and not known.first(thumbnail):
                known.add(index + 1, thumbnail)
                kept.append(index)
            digests.add(digest)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--packages", type=Path, default=Path("packages"), help="folder of the downloaded package")
    parser.add_argument("--size", type=int, default=128, help="pixels, a multiple of 16")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="use every Nth drawing, for a trial")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"{args.out} already exists; choose another folder")
    if find_spec("resvg_py") is None:
        raise SystemExit("resvg_py, which draws SVG files, is not installed; run: pip install resvg_py")
    found = sorted(drawings(fetch(args.packages)))[:: args.every]
    icons = list(captioned([drawing for drawing in (read_drawing(*one) for one in found) if drawing is not None]))
    unfinished = args.out.with_name(f"{args.out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of an interrupted build
    unfinished.mkdir(parents=True)
    cells = write_set(icons, unfinished, args.size, args.processes, hold_out)
    write_attribution(unfinished, [CLIPART], [], args.size)
    unfinished.rename(args.out)
    held_out = sum(cell.held_out for cell in cells)
    print(f"{len(found):,} drawings, {len(icons):,} with a telling title, {len(cells):,} that differ")
    print(f"wrote {args.out}: {len(cells) - held_out:,} images to train on, {held_out:,} held out")


if __name__ == "__main__":
    main()
