"""A grid of images with captions."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from sd3_light.inputs import open_regular
from sd3_light.runlog import info

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

_TEXT_SIZE = 11
_TITLE_SIZE = 16
_LINE = 14  # from one line of a caption to the next, in pixels
_GAP = 8  # between cells, and between an image and its caption
_LARGEST_SIDE = 384  # of a thumbnail
_SMALL_SIDE = 128  # to about which smaller images are enlarged
_MARK = 8  # the side of the square that marks right or wrong
# not white, so that white images show their edges
_PAPER = (232, 232, 236)
_INK = (30, 30, 30)
_RIGHT = (20, 160, 60)
_WRONG = (215, 30, 40)

# Without fontconfig: common fonts with Chinese glyphs, by file name.
_CJK_FILES = (
    "NotoSansCJK-Regular.ttc",
    "NotoSansSC-Regular.otf",
    "SourceHanSansSC-Regular.otf",
    "wqy-microhei.ttc",
    "wqy-zenhei.ttc",
    "DroidSansFallbackFull.ttf",
    "Hiragino Sans GB.ttc",
    "STHeiti Light.ttc",
    "msyh.ttc",
    "simsun.ttc",
)


@dataclass(frozen=True)
class _Cell:
    image: Image.Image
    lines: tuple[str, ...]
    font: Font
    mark: bool | None


def make_grid(
    images: Sequence[Image.Image],
    captions: Sequence[str],
    columns: int,
    scale: int = 2,
    title: str | None = None,
    marks: Sequence[bool | None] | None = None,
    fallback_captions: Sequence[str] | None = None,
) -> Image.Image:
    """Lay out the images, `columns` per row, enlarged `scale` times and centred in equal cells.

    `marks` adds a green (right) or crossed red (wrong) square before a caption, or none (None). If a caption is Chinese
    and the machine has no font for it, its fallback caption is shown instead, followed by " [zh]".
    The result's `info["cells"]` has the box (left, top, right, bottom) of each image.
    """
    assert images and columns >= 1 and scale >= 1, (len(images), columns, scale)
    assert len(captions) == len(images), (len(captions), len(images))
    columns = min(columns, len(images))
    nearest = Image.Resampling.NEAREST
    large = [image.convert("RGB").resize((image.width * scale, image.height * scale), nearest) for image in images]
    width = max(image.width for image in large)
    height = max(image.height for image in large)
    indent = _MARK + 4 if marks is not None else 0
    cells = []
    for image, caption, fallback, mark in zip_longest(large, captions, fallback_captions or (), marks or ()):
        text, font = _readable(caption, fallback)
        cells.append(_Cell(image, tuple(_wrap(text, font, width - indent)), font, mark))
    return _draw(cells, columns, (width, height), indent, title)


def make_thumbnail_grid(
    paths: Sequence[Path], captions: Sequence[str], columns: int, title: str | None = None
) -> Image.Image:
    """Lay out images in files: large ones are shrunk, small ones are enlarged; see `make_grid`."""
    images = []
    for path in paths:
        with open_regular(path) as file, Image.open(file) as image:
            image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE), Image.Resampling.LANCZOS)  # never enlarges
            images.append(image.convert("RGB"))
    largest = max(max(image.size) for image in images)
    return make_grid(images, captions, columns, max(1, _SMALL_SIDE // largest), title)


def _draw(
    cells: Sequence[_Cell], columns: int, cell_size: tuple[int, int], indent: int, title: str | None
) -> Image.Image:
    """Draw the sheet; each row is as high as its longest caption needs."""
    width, height = cell_size
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    heights = [height + _GAP // 2 + _LINE * max(len(cell.lines) for cell in row) + _GAP for row in rows]
    sheet_width = _GAP + columns * (width + _GAP)
    font = _latin(_TITLE_SIZE)
    heading = [] if title is None else _wrap(title, font, sheet_width - 2 * _GAP)
    top = _GAP + len(heading) * (_TITLE_SIZE + 6)
    sheet = Image.new("RGB", (sheet_width, top + sum(heights)), _PAPER)
    draw = ImageDraw.Draw(sheet)
    boxes = []
    for number, line in enumerate(heading):
        draw.text((_GAP, _GAP + number * (_TITLE_SIZE + 6) - 2), line, font=font, fill=_INK)
    for row, row_height in zip(rows, heights, strict=True):
        for column, cell in enumerate(row):
            left = _GAP + column * (width + _GAP)
            corner = (left + (width - cell.image.width) // 2, top + (height - cell.image.height) // 2)
            sheet.paste(cell.image, corner)
            boxes.append((*corner, corner[0] + cell.image.width, corner[1] + cell.image.height))
            _draw_caption(draw, cell, left, top + height + _GAP // 2, indent)
        top += row_height
    sheet.info["cells"] = boxes
    return sheet


def _draw_caption(draw: ImageDraw.ImageDraw, cell: _Cell, left: int, top: int, indent: int) -> None:
    if cell.mark is not None:
        box = (left, top + 2, left + _MARK, top + 2 + _MARK)
        draw.rectangle(box, fill=_RIGHT if cell.mark else _WRONG)
        if not cell.mark:  # distinguishable without colours
            draw.line(box, fill=_PAPER)
            draw.line((box[0], box[3], box[2], box[1]), fill=_PAPER)
    for number, line in enumerate(cell.lines):
        draw.text((left + indent, top + number * _LINE), line, font=cell.font, fill=_INK)


def _readable(caption: str, fallback: str | None) -> tuple[str, Font]:
    """Return the text to show, and a font for it."""
    if not _is_chinese(caption):
        return caption, _latin(_TEXT_SIZE)
    font = _chinese(_TEXT_SIZE)
    if font is not None:
        return caption, font
    if fallback is None:
        _report_missing_font()
    return caption if fallback is None else f"{fallback} [zh]", _latin(_TEXT_SIZE)


@cache
def _report_missing_font() -> None:
    """Print once that Chinese captions are not readable, and the remedy."""
    info("grids show Chinese text as boxes: no font has its glyphs; apt install fonts-noto-cjk adds one")


def _wrap(text: str, font: Font, width: int) -> list[str]:
    """Wrap a text to `width` pixels, at spaces, or anywhere in Chinese and in words that are too long."""
    lines = [""]
    for piece in _pieces(text):
        if font.getlength((lines[-1] + piece).rstrip()) <= width or not lines[-1]:
            lines[-1] += piece
        else:
            lines.append(piece.lstrip())
        while len(lines[-1]) > 1 and font.getlength(lines[-1].rstrip()) > width:
            fits = next(n for n in range(len(lines[-1]) - 1, 0, -1) if n == 1 or font.getlength(lines[-1][:n]) <= width)
            lines[-1:] = [lines[-1][:fits], lines[-1][fits:]]
    return [line.rstrip() for line in lines]


def _pieces(text: str) -> list[str]:
    """Split a text where lines may break: words with their leading space, or single Chinese characters."""
    if _is_chinese(text):
        return list(text)
    words = text.split()
    return words[:1] + [f" {word}" for word in words[1:]]


def _is_chinese(text: str) -> bool:
    return any("\u2e80" <= letter <= "\u9fff" or "\uff00" <= letter <= "\uffef" for letter in text)


@cache
def _latin(size: int) -> Font:
    return ImageFont.load_default(size)


@cache
def _chinese(size: int) -> Font | None:
    """Return an installed font with Chinese glyphs; None if there is none."""
    for file in (*_fontconfig_files(), *_CJK_FILES):
        try:
            return ImageFont.truetype(file, size)
        except OSError:  # missing, or not a font that FreeType reads
            continue
    return None


def _fontconfig_files() -> list[str]:
    """Return the fonts that cover Chinese, regular ones first. (`fc-match` falls back to any font.)"""
    if shutil.which("fc-list") is None:
        return []
    result = subprocess.run(["fc-list", ":lang=zh-cn", "file"], capture_output=True, text=True, check=False)
    files = [line.strip().rstrip(":") for line in result.stdout.splitlines() if line.strip()]
    return sorted(files, key=lambda file: ("Regular" not in Path(file).name, file))
