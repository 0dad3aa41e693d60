"""Charts in a real browser: zoom, axes, smoothing, hidden lines, finer values, and what differs between runs."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sd3_light.report.verb import write_run_page
from sd3_light.ui.folders import folder_id
from tests.e2e.browser import Browser, assert_no_errors, drag, press, touch
from tests.e2e.ui_server import served
from tests.waiting import wait_until

STEPS = 3000
HOSTILE = "</script><b>&'\" off=1"


def write_log(folder: Path, lr: float, name: str = "adamw") -> Path:
    """Write a run of `STEPS` steps, 8 samples and 36 s each, with a spike that averages hide."""
    start = {"event": "start", "time": 1.8e9, "step": 0, "samples": 0, "total": STEPS}
    events: list[dict[str, Any]] = [start]
    for step in range(1, STEPS + 1):
        loss = 50.0 if step == 1500 else 1 + step % 2 / 100 + math.exp(-step / 500)
        fields = {"samples": 8 * step, "loss": loss, "lr": lr, "grad_norm": 0.5}
        events.append({"event": "step", "time": 1.8e9 + 36 * step, "step": step, **fields})
        if step % 500 == 0:
            for weights in ("raw", "ema"):
                common = {"time": 1.8e9 + 36 * step, "step": step, "set": "held", "weights": weights}
                events.append({"event": "eval", **common, "flow": 2.0, "flow_se": 0.1})
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = f'max_steps = {STEPS}\n[optimizer]\nlr = {lr}\nname = {json.dumps(name)}\n[nested."a b"]\n'
    (folder / "config.toml").write_text(text + ("only_here = 1\n" if name == HOSTILE else ""))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("charts")
    write_log(folder / "first", 1e-4)
    write_log(folder / "se'cond <i>&\" -->", 2e-4, HOSTILE)
    return folder


@pytest.fixture(scope="module")
def server(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(runs, [], tmp_path_factory.mktemp("state")) as address:
        yield address


@pytest.fixture
def opened(browser: Browser, server: str, runs: Path) -> Iterator[Browser]:
    """The page of the first run."""
    show(browser, f"{server}/runs/{folder_id(runs / 'first')}")
    yield browser
    assert_no_errors(browser)


def show(browser: Browser, address: str, width: int = 1280) -> None:
    browser.open_address("about:blank")  # otherwise a new fragment would not load the page again
    browser.open_address(address, width)


def compared(server: str, runs: Path) -> str:
    query = "&".join(f"run={folder_id(path)}" for path in sorted(runs.iterdir()) if path.name != "playground")
    return f"{server}/compare?{query}"


def at(browser: Browser, share: float) -> tuple[float, float]:
    """Return where a share of the width of the first chart is, after scrolling to it."""
    box: list[float] = browser.evaluate(
        "(() => { const area = document.querySelector('.area'); area.scrollIntoView({ block: 'center' });"
        " const box = area.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )
    return box[0] + share * box[2], box[1] + box[3] / 2


def zoomed(browser: Browser) -> list[float]:
    """Return the visible range of the address; empty without one."""
    text = browser.evaluate("new URLSearchParams(location.hash.slice(1)).get('z') ?? ''")
    return [float(value) for value in text.split(",")] if text else []


def wait_for_zoom(browser: Browser, low: float, high: float, tolerance: float = 20) -> None:
    wait_until(
        lambda: zoomed(browser) == pytest.approx([low, high], abs=tolerance), lambda: zoomed(browser), pause=0.05
    )
    wait_until(lambda: browser.evaluate("!document.querySelector('[name=reset]').disabled"), pause=0.05)


def tip(browser: Browser, share: float) -> list[str]:
    x, y = at(browser, share)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    text: str = browser.evaluate("document.querySelector('.area .tip').innerText")
    return text.split("\n")


def choose(browser: Browser, name: str, value: str) -> None:
    browser.evaluate(
        f"(() => {{ const field = document.querySelector('.chart-controls [name={name}]');"
        f" if (field.type === 'checkbox') field.checked = {json.dumps(value == '1')};"
        f" else field.value = {json.dumps(value)};"
        " field.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )


def axis(browser: Browser) -> str:
    text: str = browser.evaluate("document.querySelector('.axis')?.textContent ?? ''")
    return text


def test_a_drag_keys_and_the_wheel_zoom_and_reset(opened: Browser) -> None:
    drag(opened, at(opened, 0.25), at(opened, 0.5))
    wait_for_zoom(opened, 750, 1500)
    labels = "[...document.querySelectorAll('.x-labels')].map(node => node.lastElementChild.textContent)"
    wait_until(lambda: set(opened.evaluate(labels)) == {"1,500"} or set(opened.evaluate(labels)) == {"1,400"})
    drag(opened, at(opened, 0.5), at(opened, 0.25), modifiers=8)
    wait_for_zoom(opened, 937, 1687)
    opened.evaluate("document.querySelector('.area').focus()")
    press(opened, "Escape")
    wait_until(lambda: zoomed(opened) == [])
    opened.evaluate("document.querySelector('.area').focus()")
    press(opened, "+")
    wait_for_zoom(opened, 451, 2550)
    wait_until(lambda: opened.evaluate("document.querySelector('.x-labels span').textContent") == "500")
    press(opened, "ArrowLeft")
    wait_for_zoom(opened, 241, 2340)
    press(opened, "-")
    wait_until(lambda: zoomed(opened) == [])
    x, y = at(opened, 0.0)
    opened.call("Input.dispatchMouseEvent", type="mouseWheel", x=x + 1, y=y, deltaX=0, deltaY=-300, modifiers=2)
    wait_until(lambda: bool(zoomed(opened)))
    low, high = zoomed(opened)
    assert low < 10
    assert high < 2000
    x, y = at(opened, 0.5)
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            opened.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=count)
    wait_until(lambda: zoomed(opened) == [])


def test_two_fingers_zoom_and_one_pans(opened: Browser) -> None:
    left, right = at(opened, 0.4), at(opened, 0.6)
    touch(opened, "touchStart", [left, right])
    touch(opened, "touchMove", [at(opened, 0.3), at(opened, 0.7)])
    touch(opened, "touchMove", [at(opened, 0.1), at(opened, 0.9)])
    touch(opened, "touchEnd", [])
    wait_for_zoom(opened, 1125, 1875, 40)
    touch(opened, "touchStart", [at(opened, 0.5)])
    touch(opened, "touchMove", [at(opened, 0.6)])
    touch(opened, "touchMove", [at(opened, 0.7)])
    touch(opened, "touchEnd", [])
    wait_for_zoom(opened, 975, 1725, 40)


def test_axes_are_logarithmic_and_x_is_samples_or_time(opened: Browser) -> None:
    for field, value, text in (
        ("y", "log", "step, logarithmic y axis"),
        ("y", "linear", "step"),
        ("lx", "1", "step, logarithmic"),
        ("lx", "", "step"),
        ("x", "samples", "samples seen"),
        ("x", "time", "hours"),
    ):
        choose(opened, field, value)
        wait_until(lambda text=text: axis(opened) == text, lambda: axis(opened))  # type: ignore[misc]
    assert float(tip(opened, 0.5)[0].split()[0]) == pytest.approx(15, abs=0.1)
    assert opened.evaluate("document.querySelector('.chart-controls [name=x]').value") == "time"
    choose(opened, "x", "samples")
    wait_until(lambda: axis(opened) == "samples seen")
    assert int(tip(opened, 0.5)[0].split()[-1].replace(",", "")) == pytest.approx(4 * STEPS, rel=0.01)
    shapes = (
        "[...document.querySelector('.area').querySelectorAll('polyline')].map(line => line.getAttribute('points'))"
    )
    faint, bold = opened.evaluate(shapes)
    choose(opened, "s", "0")
    wait_until(lambda: opened.evaluate(shapes)[1] != bold)
    assert opened.evaluate(shapes)[0] == faint
    assert "s=0" in opened.evaluate("location.hash")


def test_the_tip_has_the_values_of_the_log(opened: Browser, server: str, runs: Path) -> None:
    """1499 to 1501 are seen only in the finer values that the server sends for the visible range."""
    show(opened, f"{server}/runs/{folder_id(runs / 'first')}#z=1490,1510&s=0")
    values = ["step 1,500", "logged 50", "smoothed 50"]
    wait_until(lambda: tip(opened, 0.5) == values, lambda: tip(opened, 0.5), pause=0.1)
    assert tip(opened, 0.4)[1] == f"logged {float(f'{1 + math.exp(-1498 / 500):.5g}')}"


def test_the_address_keeps_the_view_after_a_reload_and_a_link_to_a_section(opened: Browser) -> None:
    choose(opened, "y", "linear")
    opened.evaluate('document.querySelector(\'header a[href="#speed"], header a[href="#config"]\').click()')
    wait_until(lambda: "y=linear" in opened.evaluate("location.hash"))
    section = opened.evaluate("location.hash").split("&")[0]
    assert section in ("#speed", "#config")
    show(opened, opened.evaluate("location.href"))
    wait_until(lambda: axis(opened) == "step", pause=0.1)


@pytest.mark.parametrize(
    "fragment", ["#z=1e400,5", "#z=5,1", "#x=toString&s=nan&y=__proto__&lx=9", "#off=%FF&z=,", "#%"]
)
def test_hostile_fragments_change_nothing(opened: Browser, server: str, runs: Path, fragment: str) -> None:
    show(opened, f"{server}/runs/{folder_id(runs / 'first')}{fragment}")
    assert axis(opened) == "step, logarithmic y axis", "as the server drew it"
    assert opened.evaluate("document.querySelector('[name=reset]').disabled")
    assert opened.events_of("Runtime.exceptionThrown") == []


def test_compared_runs_show_what_differs_and_hide_lines(browser: Browser, server: str, runs: Path) -> None:
    show(browser, compared(server, runs))
    cells = browser.evaluate(
        "[...document.querySelectorAll('.differing tr')].map(row => [...row.children].map(cell => cell.textContent))"
    )
    assert cells[0][1:] == ["first", "se'cond <i>&\" -->"]
    assert cells[1:] == [
        ["nested.a b.only_here", "–", "1"],
        ["optimizer.lr", "0.0001", "0.0002"],
        ["optimizer.name", '"adamw"', json.dumps(HOSTILE)],
    ]
    assert browser.evaluate("document.querySelectorAll('main b').length") == browser.evaluate(
        "document.querySelectorAll('main .legend b').length"
    )
    visible = "[...document.querySelectorAll('.area')[0].querySelectorAll('polyline')].map(line => line.style.display)"
    browser.evaluate("document.querySelectorAll('.compared [data-line]')[1].click()")
    wait_until(lambda: browser.evaluate(visible) == ["", "none"], lambda: browser.evaluate(visible))
    show(browser, browser.evaluate("location.href"))
    assert browser.evaluate(visible) == ["", "none"], "the address has it"
    assert (
        browser.evaluate("document.querySelectorAll('.compared [data-line]')[1].getAttribute('aria-pressed')")
        == "false"
    )
    assert browser.events_of("Runtime.exceptionThrown") == []


def test_the_static_report_zooms_what_it_has(browser: Browser, runs: Path, tmp_path: Path) -> None:
    write_run_page(runs / "first", tmp_path / "page.html")
    show(browser, f"{(tmp_path / 'page.html').as_uri()}#z=1000,2000")
    drag(browser, at(browser, 0.25), at(browser, 0.5))
    wait_for_zoom(browser, 1250, 1500)
    assert tip(browser, 0.5)[0] == "step 1,375"
    assert_no_errors(browser)


def test_an_interval_is_drawn_and_follows_the_zoom(opened: Browser) -> None:
    points = "document.querySelector('#validation polygon').getAttribute('points')"
    before = opened.evaluate(points)
    assert len(before.split()) == 12
    drag(opened, at(opened, 0.25), at(opened, 0.5))
    wait_until(lambda: opened.evaluate(points) != before)
