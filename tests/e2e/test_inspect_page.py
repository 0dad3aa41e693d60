"""The page of `sd3-light inspect` in a real browser, from a real cache."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sd3_light import cli
from tests.e2e.browser import Browser, assert_fits_width, assert_readable_in_both_schemes, assert_self_contained
from tests.project import Project

HOSTILE = "<img src=http://127.0.0.1:9/x onerror=alert(1)>"
CHINESE = "一只红色的猫坐在椅子上"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Path:
    """The page of a cache with 40 valid images, one of them with unusual captions, and a few invalid ones."""
    project = raw_project.copy(tmp_path_factory.mktemp("inspect") / "project")
    images = project.images
    captions = json.loads((images / "captions.json").read_text(encoding="utf-8"))
    captions["000000.png"] = [HOSTILE, CHINESE, "unbroken" * 200]
    (images / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
    Image.effect_noise((200, 150), 60).save(images / "cut.jpg")
    data = (images / "cut.jpg").read_bytes()
    (images / "cut.jpg").write_bytes(data[: len(data) // 2])
    (images / "cut.txt").write_text("a truncated image")
    Image.new("RGB", (90, 60), "green").save(images / f"no_caption_{'long' * 30}.png")
    (images / "empty.png").touch()
    (images / "empty.txt").write_text("nothing")
    project.build_cache()
    out = Path(project.folder / "pages" / "page.html")
    run_inspect(project.cache, "--out", out)
    return out


def run_inspect(*arguments: object) -> None:
    """Run `sd3-light inspect` in this process; it must succeed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["sd3-light", "inspect", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert end.value.code in (0, None)


def test_the_page_shows_the_cache_without_network_and_errors(open_page: Callable[..., Browser], page: Path) -> None:
    opened = open_page()
    assert_self_contained(opened, page)
    assert opened.evaluate("document.scripts.length") == 0
    widths = opened.evaluate("[...document.images].map(image => image.complete ? image.naturalWidth : 0)")
    assert len(widths) == 2 * 40 + 2  # 40 samples and their originals, two rejects that can be opened
    assert min(widths) >= 48
    ratios = opened.evaluate(
        "[...document.querySelectorAll('.sample img')]"
        ".map(image => image.clientWidth / image.clientHeight * image.naturalHeight / image.naturalWidth)"
    )
    assert ratios == pytest.approx([1.0] * 80, abs=0.03)
    text = " ".join(opened.evaluate("document.body.textContent").split())
    for part in ("40 samples in 3 buckets", "64x64", "80x48", "48x80", "3 inputs rejected", HOSTILE, CHINESE):
        assert part in text
    for reason in ("truncated", "no_caption", "empty_file"):
        assert reason in text
    assert opened.evaluate("document.documentElement.lang") == "en"
    assert opened.evaluate("document.characterSet") == "UTF-8"
    is_marked = "[...document.querySelectorAll('[lang=zh]')].some(node => node.textContent.includes('%s'))"
    assert opened.evaluate(is_marked % CHINESE)


def test_the_page_fits_its_window_readably(open_page: Callable[..., Browser], browser: Browser, page: Path) -> None:
    for width in (390, 800, 1280):
        assert_fits_width(open_page(width), width)
    assert_readable_in_both_schemes(browser, page.as_uri())
