"""A headless browser that shows a page as a person sees it."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
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


def start_browser(profile: Path) -> "Browser":
    """A browser of this machine; the test is skipped where there is none."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)} on the PATH")
    return Browser(binary, profile)


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


def assert_loads_alone(seen: Browser, page: Path) -> None:
    """The page that is open asked for nothing but itself, and said nothing on the console."""
    asked = {event["request"]["url"].split(",")[0] for event in seen.of("Network.requestWillBeSent")}
    assert page.as_uri() in asked
    assert {url for url in asked - {page.as_uri()} if not url.startswith("data:image/")} == set()
    assert seen.of("Log.entryAdded") == []
    assert seen.of("Runtime.exceptionThrown") == []
    assert seen.of("Runtime.consoleAPICalled") == []


def assert_nothing_runs_over(seen: Browser, width: int) -> None:
    """Nothing of the page that is open lies beyond its right edge, whatever is folded out."""
    seen.value("document.querySelectorAll('details').forEach(node => { node.open = true; })")
    assert seen.value("document.documentElement.scrollWidth") <= width
    beyond = seen.value(
        "[...document.querySelectorAll('body *')].filter(node => node.getBoundingClientRect().right > innerWidth + 1)"
        ".map(node => node.outerHTML.slice(0, 200))"
    )
    assert beyond == []
