"""A headless browser that opens pages as a reader sees them."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANG_SECONDS, wait_until

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root; the page is our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
LOWEST_CONTRAST = """
(() => {
  const luminance = color => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(value => value / 255)
      .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = node => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$/.test(color)) return color;
    }
  };
  const nodes = [...document.querySelectorAll('body *')].filter(
    node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim()) && node.offsetParent);
  return Math.min(...nodes.map(node => {
    const pair = [luminance(getComputedStyle(node).color), luminance(background(node))].sort((a, b) => a - b);
    return (pair[1] + 0.05) / (pair[0] + 0.05);
  }));
})()
"""


def start_browser(profile: Path) -> "Browser":
    """Start a browser of this machine; skip the test where there is none."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)} on the PATH")
    return Browser(binary, profile)


class Browser:
    """A headless browser driven by its debugging protocol over a pipe: JSON messages that end with a zero byte."""

    def __init__(self, binary: str, profile: Path) -> None:
        browser_read, self._write = os.pipe()
        self._read, browser_write = os.pipe()
        # the browser reads from file descriptor 3 and writes to 4
        shell = f'exec 3<&{browser_read} 4>&{browser_write}; exec "$@"'
        command = ["bash", "-c", shell, "bash", binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(command, pass_fds=(browser_read, browser_write), stderr=subprocess.DEVNULL)
        os.close(browser_read)
        os.close(browser_write)
        self._buffer, self._last_id, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run a command and return its result; events that arrive meanwhile are kept."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (reply := self._message()).get("id") != self._last_id:
            self.events.append(reply)
        assert "error" not in reply, reply
        result: dict[str, Any] = reply["result"]
        return result

    def open(self, path: Path, width: int = 1280, scheme: str = "light") -> None:
        """Open a file in a window of this width, and wait until it is loaded."""
        self.open_address(path.as_uri(), width, scheme)

    def open_address(self, address: str, width: int = 1280, scheme: str = "light") -> None:
        """Open an address in a window of this width, and wait until it is loaded."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not self.events_of("Page.loadEventFired"):
            self.events.append(self._message())

    def events_of(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of all events of a kind since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(HANG_SECONDS)
        os.close(self._read)
        os.close(self._write)

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + HANG_SECONDS
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], deadline - time.monotonic())[0], "the browser does not reply"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has exited"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


def assert_no_errors(browser: Browser) -> None:
    """Nothing failed and nothing was logged since the page was opened."""
    assert browser.events_of("Runtime.exceptionThrown") == []
    assert browser.events_of("Log.entryAdded") == []


def assert_asks_only(browser: Browser, server: str) -> None:
    """The open page requested nothing but files of its server."""
    urls = [event["request"]["url"] for event in browser.events_of("Network.requestWillBeSent")]
    assert [url for url in urls if not url.startswith((server, "data:"))] == []


def assert_self_contained(browser: Browser, page: Path) -> None:
    """The open page requested nothing but itself and logged nothing to the console."""
    urls = {event["request"]["url"].split(",")[0] for event in browser.events_of("Network.requestWillBeSent")}
    assert page.as_uri() in urls
    assert {url for url in urls - {page.as_uri()} if not url.startswith("data:image/")} == set()
    assert_no_errors(browser)
    assert browser.events_of("Runtime.consoleAPICalled") == []


def assert_fits_width(browser: Browser, width: int) -> None:
    """Nothing on the open page overflows its right edge, even with all details open."""
    browser.evaluate("document.querySelectorAll('details').forEach(node => { node.open = true; })")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    overflowing = browser.evaluate(
        "[...document.querySelectorAll('body *')].filter(node => node.getBoundingClientRect().right > innerWidth + 1)"
        ".map(node => node.outerHTML.slice(0, 200))"
    )
    assert overflowing == []


def assert_readable_in_both_schemes(browser: Browser, address: str) -> None:
    """The light and dark scheme differ, and all text has the contrast that WCAG AA requires."""
    backgrounds = {}
    for scheme in ("light", "dark"):
        browser.open_address(address, scheme=scheme)
        backgrounds[scheme] = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert browser.evaluate(LOWEST_CONTRAST) >= 4.5, scheme
    assert backgrounds["light"] != backgrounds["dark"]


def wait_for(browser: Browser, condition: str) -> None:
    """Wait until a condition is true in the page; it is false while another page is loaded."""
    text = "document.querySelector('main')?.innerText ?? ''"
    wait_until(lambda: browser.evaluate(f"Boolean({condition})"), lambda: browser.evaluate(text), pause=0.1)


_BUTTONS = "button, input[type=submit], a, summary"
_VISIBLE = "node => node.checkVisibility() && !node.disabled"
_CODES = {"Enter": 13, "Escape": 27, "Home": 36, "End": 35, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
_CODES |= {"ArrowDown": 40, "Tab": 9, "Backspace": 8, " ": 32}


def click_at(browser: Browser, node: str) -> None:
    """Scroll to an element, given as an expression, and click it with the mouse. It must be what the click meets."""
    box = (
        f"(() => {{ const node = {node}; node.scrollIntoView({{ block: 'center', behavior: 'instant' }});"
        " const box = node.getBoundingClientRect(); const x = box.left + box.width / 2, y = box.top + box.height / 2;"
        " const hit = document.elementFromPoint(x, y);"
        " return [x, y, node.contains(hit) || [...(hit?.labels ?? [])].includes(node)]; })()"
    )
    x, y, is_hit = browser.evaluate(box)
    assert is_hit, f"another element covers {node}"
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def click_text(browser: Browser, text: str) -> None:
    """Click the first visible button or link whose text begins with a text."""
    nodes = f"[...document.querySelectorAll({json.dumps(_BUTTONS)})].filter({_VISIBLE})"
    click_at(browser, f"{nodes}.find(each => each.textContent.trim().startsWith({json.dumps(text)}))")


def type_text(browser: Browser, selector: str, text: str) -> None:
    """Click a text field, select what it contains, and type."""
    click_at(browser, f"document.querySelector({json.dumps(selector)})")
    press(browser, "a", modifiers=2)
    press(browser, "Backspace")
    browser.call("Input.insertText", text=text)


def choose_option(browser: Browser, selector: str, label: str) -> None:
    """Choose an option of a list by typing its text, as with the keyboard."""
    browser.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
    press(browser, "Home")
    chosen = f"document.querySelector({json.dumps(selector)}).selectedOptions[0].textContent.trim()"
    for _ in range(browser.evaluate(f"document.querySelector({json.dumps(selector)}).length")):
        if browser.evaluate(chosen) == label:
            return
        press(browser, "ArrowDown")
    raise AssertionError(f"{selector} has no option {label!r}")


def press(browser: Browser, key: str, modifiers: int = 0) -> None:
    """Press and release a key where the focus is; 2 as ``modifiers`` is Ctrl."""
    code = _CODES.get(key, ord(key.upper()) if len(key) == 1 else 0)
    text = "" if modifiers else {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
    commands = ["selectAll"] if (key, modifiers) == ("a", 2) else []
    for kind in ("keyDown", "keyUp"):
        down = {"text": text, "commands": commands} if kind == "keyDown" else {}
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, modifiers=modifiers, **down
        )


def drag(browser: Browser, start: tuple[float, float], end: tuple[float, float], modifiers: int = 0) -> None:
    """Drag with the left button; 8 as ``modifiers`` is the Shift key."""
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    steps = (("mousePressed", start), ("mouseMoved", middle), ("mouseMoved", end), ("mouseReleased", end))
    for kind, (x, y) in steps:
        browser.call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1, modifiers=modifiers
        )


def touch(browser: Browser, kind: str, points: list[tuple[float, float]]) -> None:
    """Send a touch event: touchStart, touchMove or touchEnd."""
    named = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
    browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=named)
