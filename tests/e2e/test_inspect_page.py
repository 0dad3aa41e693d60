"""The page of `sd3-light inspect` as a person sees it: a real browser opens what a real build became."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from sd3_light import cli
from tests.e2e.browser import CONTRAST, Browser, assert_loads_alone, assert_nothing_runs_over, start_browser
from tests.project import Project

EVIL = "<img src=http://127.0.0.1:9/x onerror=alert(1)>"
CHINESE = "一只红色的猫坐在椅子上"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Path:
    """The page of a cache built from 40 sound pictures, one with captions of all sorts, and a few bad ones."""
    project = raw_project.copy(tmp_path_factory.mktemp("inspect") / "project")
    pictures = project.images
    captions = json.loads((pictures / "captions.json").read_text(encoding="utf-8"))
    captions["000000.png"] = [EVIL, CHINESE, "unbroken" * 200]
    (pictures / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
    Image.effect_noise((200, 150), 60).save(pictures / "cut.jpg")
    whole = (pictures / "cut.jpg").read_bytes()
    (pictures / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (pictures / "cut.txt").write_text("a cut picture")
    Image.new("RGB", (90, 60), "green").save(pictures / f"no_caption_{'long' * 30}.png")
    (pictures / "empty.png").touch()
    (pictures / "empty.txt").write_text("nothing")
    project.build_cache()
    out = Path(project.folder / "pages" / "page.html")
    call_inspect(project.cache, "--out", out)
    return out


def call_inspect(*arguments: object) -> None:
    """`sd3-light inspect` in this process; ends well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["sd3-light", "inspect", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert end.value.code in (0, None)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = start_browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def opened(browser: Browser, page: Path) -> Callable[..., Browser]:
    """The page in the browser, at a width and in a scheme."""

    def show(width: int = 1280, scheme: str = "light") -> Browser:
        browser.open(page, width, scheme)
        return browser

    return show


def test_the_page_loads_without_the_network_or_an_error(opened: Callable[..., Browser], page: Path) -> None:
    seen = opened()
    assert_loads_alone(seen, page)
    assert seen.value("document.scripts.length") == 0


def test_every_picture_is_shown(opened: Callable[..., Browser]) -> None:
    seen = opened()
    widths = seen.value("[...document.images].map(image => image.complete ? image.naturalWidth : 0)")
    assert len(widths) == 2 * 40 + 2  # 40 samples and their originals, two rejects that can be opened
    assert min(widths) >= 48
    ratios = seen.value(
        "[...document.querySelectorAll('.sample img')]"
        ".map(image => image.clientWidth / image.clientHeight * image.naturalHeight / image.naturalWidth)"
    )
    assert ratios == pytest.approx([1.0] * 80, abs=0.03)


def test_the_text_says_what_the_data_became(opened: Callable[..., Browser]) -> None:
    seen = opened()
    text = " ".join(seen.value("document.body.textContent").split())
    for words in ("40 samples in 3 buckets", "64x64", "80x48", "48x80", "3 inputs are not used", EVIL, CHINESE):
        assert words in text
    for reason in ("truncated", "no_caption", "empty_file"):
        assert reason in text
    assert seen.value("document.documentElement.lang") == "en"
    assert seen.value("document.characterSet") == "UTF-8"
    found = "[...document.querySelectorAll('[lang=zh]')].some(node => node.textContent.includes('%s'))"
    assert seen.value(found % CHINESE)


@pytest.mark.parametrize("width", [400, 800, 1280])
def test_nothing_runs_over_the_edge(opened: Callable[..., Browser], width: int) -> None:
    assert_nothing_runs_over(opened(width), width)


def test_light_and_dark_can_both_be_read(opened: Callable[..., Browser]) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        seen = opened(scheme=scheme)
        grounds[scheme] = seen.value("getComputedStyle(document.body).backgroundColor")
        assert seen.value(CONTRAST) >= 4.5, scheme  # what WCAG asks for text
    assert grounds["light"] != grounds["dark"]
