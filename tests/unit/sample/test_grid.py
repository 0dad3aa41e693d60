"""The grid contains every image, its caption in lines that fit, and its mark."""

import numpy as np
import pytest
from PIL import Image, ImageFont

from sd3_light.sample import grid
from sd3_light.sample.grid import make_grid

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255)]
SIZES = [(64, 64), (80, 48), (48, 80), (64, 64), (64, 64)]
IMAGES = [Image.new("RGB", size, colour) for size, colour in zip(SIZES, COLOURS, strict=True)]
CAPTIONS = ["a red star", "a green star above a blue circle on a white background", "one two", "", "x" * 90]
ZH = "白色背景上有一个大的红色圆形"


def count(sheet: Image.Image, colour: tuple[int, int, int]) -> int:
    return int((np.asarray(sheet) == colour).all(axis=-1).sum())


@pytest.mark.parametrize("scale", [1, 3])
def test_every_image_is_complete(scale: int) -> None:
    sheet = make_grid(IMAGES, CAPTIONS, columns=2, scale=scale)
    for (width, height), colour in zip(SIZES, COLOURS, strict=True):
        assert count(sheet, colour) == width * height * scale**2


def test_columns_rows_and_title_determine_the_size() -> None:
    one = make_grid(IMAGES[:1], ["a"], columns=8, scale=1)
    three = make_grid(IMAGES[:1] * 3, ["a"] * 3, columns=3, scale=1)
    nine = make_grid(IMAGES[:1] * 9, ["a"] * 9, columns=3, scale=1, title="nine of them")
    assert three.width == one.width + 2 * (64 + 8)
    assert three.height == one.height
    assert nine.width == three.width
    assert nine.height > 3 * (64 + 14)
    black = [Image.new("RGB", (64, 64))] * 3
    sheet = make_grid(black, ["a", "b", "c"], columns=3, marks=[True, False, None])
    assert count(sheet, grid._RIGHT) == 81  # a full square of 9 x 9
    assert 50 < count(sheet, grid._WRONG) < 81  # a crossed one
    assert count(make_grid(black, ["a", "b", "c"], columns=3), grid._RIGHT) == 0


@pytest.mark.parametrize("text", [*CAPTIONS, ZH])
@pytest.mark.parametrize("width", [5, 60, 128])
def test_wrapped_lines_fit_and_lose_nothing(text: str, width: int) -> None:
    font = grid._latin(11)
    lines = grid._wrap(text, font, width)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(font.getlength(line) <= width or len(line) == 1 for line in lines)


def test_without_a_chinese_font_others_are(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(grid, "_chinese", lambda size: None)
    assert grid._readable(ZH, "a large red circle")[0] == "a large red circle [zh]"
    assert grid._readable("a star", "never")[0] == "a star"
    expected = make_grid(IMAGES[:1], ["a large red circle [zh]"], 1)
    sheet = make_grid(IMAGES[:1], [ZH], 1, fallback_captions=["a large red circle"])
    assert np.array_equal(np.asarray(sheet), expected)
    grid._report_missing_font.cache_clear()
    make_grid(IMAGES[:2], [ZH, ZH], 2)
    assert capfd.readouterr().err.count("fonts-noto-cjk") == 1


def test_the_caption_is_shown_with_a_chinese_font_if_the_machine_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    font = ImageFont.load_default(9)
    monkeypatch.setattr(grid, "_chinese", lambda size: font)
    assert grid._readable(ZH, "a large red circle") == (ZH, font)
    monkeypatch.undo()
    monkeypatch.setattr(grid, "_fontconfig_files", lambda: ["/no/such/font.ttc"])
    monkeypatch.setattr(grid, "_CJK_FILES", ("no such font.ttf",))
    assert grid._chinese.__wrapped__(11) is None
