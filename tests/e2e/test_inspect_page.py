"""The page of `sd3-light inspect` as a person sees it: a real browser opens what a real build became."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sd3_light import cli

Project = Any  # the class is in tests/conftest.py

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
EVIL = "<img src=http://127.0.0.1:9/x onerror=alert(1)>"
CHINESE = "一只红色的猫坐在椅子上"
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root; the page is our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)
PATIENCE = 60.0  # seconds for one answer of the browser
CONTRAST = """
(() => {
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(value => value / 255)
      .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
  };
  const nodes = [...document.querySelectorAll('body *')].filter(
    node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim()) && node.offsetParent);
  return Math.min(...nodes.map(node => {
    const pair = [light(getComputedStyle(node).color), light(ground(node))].sort((a, b) => a - b);
    return (pair[1] + 0.05) / (pair[0] + 0.05);
  }));
})()
"""


class Browser:
    """A headless browser, driven by its debugging protocol over a pipe: JSON with a zero byte behind it."""

    def __init__(self, binary: str, profile: Path) -> None:
        its_read, self._write = os.pipe()
        self._read, its_write = os.pipe()
        # it reads from file 3 and writes to file 4
        shell = f'exec 3<&{its_read} 4>&{its_write}; exec "$@"'
        command = ["bash", "-c", shell, "bash", binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(command, pass_fds=(its_read, its_write), stderr=subprocess.DEVNULL)
        os.close(its_read)
        os.close(its_write)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, width: int = 1280, scheme: str = "light") -> None:
        """Show a file in a window of this width, and wait until all of it is loaded."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not self.of("Page.loadEventFired"):
            self.events.append(self._message())

    def of(self, method: str) -> list[dict[str, Any]]:
        """What events of a kind told since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def value(self, expression: str) -> Any:
        """What an expression is worth in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)
        os.close(self._read)
        os.close(self._write)

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], deadline - time.monotonic())[0], "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Path:
    """The page of a cache built from 40 sound pictures, one with captions of all sorts, and a few bad ones."""
    project = raw_project.copy(tmp_path_factory.mktemp("inspect") / "project")
    pictures = project.pictures
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
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)} on the PATH")
    started = Browser(binary, tmp_path_factory.mktemp("profile"))
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
    asked = {event["request"]["url"].split(",")[0] for event in seen.of("Network.requestWillBeSent")}
    assert page.as_uri() in asked
    assert {url for url in asked - {page.as_uri()} if not url.startswith("data:image/")} == set()
    assert seen.of("Log.entryAdded") == []
    assert seen.of("Runtime.exceptionThrown") == []
    assert seen.of("Runtime.consoleAPICalled") == []
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
    seen = opened(width)
    seen.value("document.querySelectorAll('details').forEach(node => { node.open = true; })")
    assert seen.value("document.documentElement.scrollWidth") <= width
    beyond = seen.value(
        "[...document.querySelectorAll('body *')].filter(node => node.getBoundingClientRect().right > innerWidth + 1)"
        ".map(node => node.outerHTML.slice(0, 200))"
    )
    assert beyond == []


def test_light_and_dark_can_both_be_read(opened: Callable[..., Browser]) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        seen = opened(scheme=scheme)
        grounds[scheme] = seen.value("getComputedStyle(document.body).backgroundColor")
        assert seen.value(CONTRAST) >= 4.5, scheme  # what WCAG asks for text
    assert grounds["light"] != grounds["dark"]
