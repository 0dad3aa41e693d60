"""The page of `sd3-light report` in a real browser."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sd3_light.report.verb import write_run_page
from tests.e2e.browser import Browser, assert_fits_width, assert_readable_in_both_schemes, assert_self_contained, press

GRIDS = (50, 100, 150)


def events() -> Iterator[dict[str, Any]]:
    """Yield 200 steps with a resume, a skip, evaluations, grids, and a failed save with a very long word."""
    start = {"total": 200, "world": 8, "device": "NVIDIA H200", "engine": "torch ddp"}
    yield {"event": "start", "step": 0, **start}
    for step in range(1, 201):
        if step == 120:
            yield {"event": "resume", "step": 119, "checkpoint": "step-00000119", **start}
        loss = 0.5 + math.exp(-step / 40)
        yield {
            **{"event": "step", "step": step, "samples": 64 * step, "skipped": 1, "epoch": step / 100},
            **{"loss": "nan" if step == 60 else loss, "flow": loss, "text_recon": 0.1, "lr": 1e-4, "param_norm": 50.0},
            **{"grad_norm": 900.0 if step == 70 else 0.5, "samples_per_second": 1000.0, "data_wait": 0.02, "mfu": 0.4},
            **{
                "band": {f"0.{tenth}-0.{tenth + 1}": loss + tenth / 10 for tenth in range(9)},
                "ema_decay": {"ema": 0.99},
            },
            **{"gpu_memory_gib": 60.0, "gpu_reserved_gib": 70.0, "host_memory_gib": 20.0},
        }
        if step in GRIDS:
            quantiles = {f"flow@0.{tenth}": loss + tenth / 10 for tenth in range(1, 10)}
            yield {"event": "eval", "step": step, "set": "held_out", "weights": "ema", "flow": loss, **quantiles}
            file = f"samples/step-{step:08d}.png"
            yield {"event": "sample", "step": step, "samples": 64 * step, "weights": "ema", "file": file}
    yield {"event": "skip", "step": 60, "loss": "nan", "grad_norm": "inf"}
    yield {"event": "checkpoint_failed", "step": 200, "reason": "unbroken" * 60}
    yield {"event": "stop", "step": 200, "reason": "finished"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("report") / f"run_{'long' * 20}"
    (run / "samples").mkdir(parents=True)
    lines = [json.dumps({**event, "time": 1.8e9 + index}) + "\n" for index, event in enumerate(events())]
    (run / "log.jsonl").write_text("".join(lines))
    (run / "config.toml").write_text(f'output_dir = "{"long" * 60}"\n[sampling]\nprompts = ["一只红色的猫"]\n')
    for step in GRIDS:
        Image.new("RGB", (900, 300), (step, 80, 120)).save(run / "samples" / f"step-{step:08d}.png")
    out = run.parent / "page.html"
    assert write_run_page(run, out) == []
    return out


def test_curves_are_drawn_inside_their_charts_without_network(open_page: Callable[..., Browser], page: Path) -> None:
    opened = open_page()
    assert_self_contained(opened, page)
    is_inside = opened.evaluate(
        "[...document.querySelectorAll('.area')].map(area => {"
        " const box = area.getBoundingClientRect();"
        " return [...area.querySelectorAll('polyline')].map(line => {"
        "  const own = line.getBoundingClientRect();"
        "  return own.width > box.width / 4 && own.left >= box.left - 3 && own.right <= box.right + 3"
        "   && own.top >= box.top - 3 && own.bottom <= box.bottom + 3; }); })"
    )
    assert len(is_inside) == 14
    assert all(all(lines) and lines for lines in is_inside)
    invisible = opened.evaluate(
        "[...document.querySelectorAll('polyline')].map(line => getComputedStyle(line).stroke)"
        ".filter(stroke => stroke === 'none' || /, 0\\)$/.test(stroke))"
    )
    assert invisible == []


def visible_images(opened: Browser) -> list[str]:
    titles: list[str] = opened.evaluate(
        "[...document.images].filter(image => image.offsetParent && image.naturalWidth).map(image => image.alt)"
    )
    return titles


def test_the_slider_changes_the_grid_and_the_tooltip_shows_values(open_page: Callable[..., Browser]) -> None:
    opened = open_page()
    assert visible_images(opened) == ["samples at step 150"]
    opened.evaluate("document.querySelector('.slider input').focus()")
    for key, step in (("ArrowLeft", 100), ("ArrowLeft", 50), ("ArrowLeft", 50), ("ArrowRight", 100)):
        press(opened, key)
        assert visible_images(opened) == [f"samples at step {step}"]
        assert f"step {step} · {64 * step:,} samples seen" in opened.evaluate(
            "document.querySelector('output').textContent"
        )
    opened = open_page()
    x, y = opened.evaluate(
        "(() => { const box = document.querySelector('.area').getBoundingClientRect();"
        " return [box.left + box.width / 2 + 1, box.top + box.height / 2]; })()"  # of 199 steps 101 is next
    )
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = opened.evaluate("document.querySelector('.area .cross:not([hidden]) .tip').innerText").split("\n")
    assert tip[0] == "step 101"
    name, value = tip[1].split()
    assert name == "logged"
    assert float(value) == pytest.approx(0.5 + math.exp(-101 / 40), abs=0.01)


def test_without_scripts_the_page_shows_every_grid(browser: Browser, page: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page)
        root = browser.call("DOM.getDocument")["root"]["nodeId"]
        figures = browser.call("DOM.querySelectorAll", nodeId=root, selector="figure")["nodeIds"]
        heights = [browser.call("DOM.getBoxModel", nodeId=node)["model"]["height"] for node in figures]
        slider = browser.call("DOM.querySelector", nodeId=root, selector=".slider")["nodeId"]
        hidden = browser.call("DOM.getAttributes", nodeId=slider)["attributes"]
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert len(heights) == len(GRIDS)
    assert min(heights) > 300
    assert "hidden" in hidden


def test_the_page_fits_its_window_readably(open_page: Callable[..., Browser], browser: Browser, page: Path) -> None:
    for width in (390, 800, 1280):
        assert_fits_width(open_page(width), width)
    assert_readable_in_both_schemes(browser, page.as_uri())
