"""The pages of `sd3-light ui` in a real browser, served by the real server."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sd3_light.assets import DEMO
from sd3_light.ui.folders import folder_id
from tests.e2e.browser import Browser, assert_readable_in_both_schemes, start_browser
from tests.e2e.ui_server import served
from tests.unit.ui.conftest import write_run
from tests.waiting import wait_until

pytest.importorskip("starlette", reason="needs starlette and uvicorn, the extra ui")
pytest.importorskip("uvicorn", reason="needs starlette and uvicorn, the extra ui")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first")
    write_run(folder / f"second_{'long' * 30}", total=40, offset=0.1)
    return folder


@pytest.fixture(scope="module")
def server(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(runs, [DEMO], tmp_path_factory.mktemp("state")) as address:
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = start_browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


def wait_for(browser: Browser, condition: str) -> None:
    wait_until(lambda: browser.evaluate(condition), lambda: browser.evaluate("document.body.innerText"), pause=0.1)


def paths(runs: Path) -> list[str]:
    ids = [folder_id(path) for path in sorted(runs.glob("*")) if (path / "log.jsonl").exists()]
    query = "&".join(f"run={run_id}" for run_id in ids)
    pages = ["/", "/queue", "/playground", "/data", "/runs/none"]
    return [*pages, f"/runs/{ids[1]}", f"/compare?{query}", f"/samples?{query}"]


def test_pages_request_only_their_server_fit_and_are_readable(browser: Browser, server: str, runs: Path) -> None:
    for path in paths(runs):
        for width in (390, 1280):
            browser.open_address(server + path, width)
            browser.evaluate("document.querySelectorAll('details').forEach(node => { node.open = true; })")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, path
        urls = [event["request"]["url"] for event in browser.events_of("Network.requestWillBeSent")]
        assert [url for url in urls if not url.startswith((server, "data:"))] == []
        assert browser.events_of("Runtime.exceptionThrown") == []
        if path != "/runs/none":
            assert browser.events_of("Log.entryAdded") == []
        assert_readable_in_both_schemes(browser, server + path)


def test_a_run_updates_itself_and_keeps_what_the_reader_set(browser: Browser, server: str, runs: Path) -> None:
    browser.open_address(f"{server}/runs/{folder_id(runs / 'first')}")
    assert browser.evaluate("document.querySelector('.tile b').textContent") == "40"
    browser.evaluate(
        "(() => { const slider = document.querySelector('.slider input'); slider.value = 1;"
        " slider.dispatchEvent(new Event('input')); document.querySelector('#samples details').open = true;"
        " window.notReloaded = true; })()"
    )
    assert "step 20" in browser.evaluate("document.querySelector('.slider output').textContent")
    write_run(runs / "first", steps=60)
    wait_for(browser, "document.querySelector('.tile b').textContent === '60'")
    assert browser.evaluate("window.notReloaded") is True
    assert "step 20" in browser.evaluate("document.querySelector('.slider output').textContent")
    assert browser.evaluate("document.querySelectorAll('.area > .tip').length") == browser.evaluate(
        "document.querySelectorAll('.area').length"
    )
    assert browser.evaluate("document.querySelectorAll('.grids figure').length") == 6
    assert browser.evaluate("document.querySelector('#samples details').open") is True


def test_a_run_that_fails_while_it_is_watched_says_why(
    browser: Browser, server: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "data.toml").write_text('resolutions = [64]\n[[directory]]\npath = "no_images"\n')
    model = '[model]\ndiffusers_path = "no_model"\ntrain_type = "sd3_light_pretrain"\nsize = "tiny2"\n'
    top = 'output_dir = "failing"\ndataset = "data.toml"\nmax_steps = 2\nsave_every_n_steps = 2\n'
    (runs / "train.toml").write_text(top + model)
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\nread -r _ < "$(dirname "$0")/go"\necho "error: no model"\nexit 2\n')
    fake.chmod(0o755)
    os.mkfifo(tmp_path / "go")
    monkeypatch.setattr(sys, "executable", str(fake))
    browser.open_address(server)
    browser.evaluate(
        f"(() => {{ document.querySelector('[name=config]').value = {json.dumps(str(runs / 'train.toml'))};"
        " document.querySelector('#start button').click(); })()"
    )
    notes = "(document.querySelector('main .notes')?.textContent ?? '')"
    wait_for(browser, f"{notes}.includes('The run is starting')")
    assert browser.evaluate(f"{notes}.includes('console')") is False
    browser.evaluate("window.notReloaded = true")
    (tmp_path / "go").write_text("go\n")
    wait_for(browser, f"{notes}.includes('exit code 2: error: no model')")
    assert browser.evaluate(f"{notes}.includes('The run is starting')") is False
    assert browser.evaluate("window.notReloaded") is True


def test_images_appear_in_the_playground_and_their_settings_return(browser: Browser, server: str) -> None:
    browser.open_address(f"{server}/playground")
    browser.evaluate(
        "(() => { const form = document.querySelector('#draw').elements; form.prompt.value = 'a red circle';"
        " form.seeds.value = '4-5'; form.steps.value = 2; document.querySelector('#draw button').click(); })()"
    )
    wait_for(browser, "document.querySelector('#state').textContent.startsWith('done')")
    wait_for(browser, "[...document.querySelectorAll('.drawn img')].every(image => image.naturalWidth > 0)")
    alts = json.loads(browser.evaluate("JSON.stringify([...document.querySelectorAll('.drawn img')].map(i => i.alt))"))
    assert [alt.rpartition(", ")[2] for alt in alts] == ["seed 4", "seed 5"]
    assert browser.evaluate("document.querySelector('#warnings').hidden")
    browser.evaluate(
        "document.querySelector('#draw').elements.prompt.value = 'a red circle '.repeat(12);"
        " document.querySelector('#draw button').click()"
    )
    wait_for(browser, "document.querySelector('#warnings').textContent.includes('is cut: CLIP reads 16')")
    wait_for(browser, "document.querySelector('#state').textContent.startsWith('done')")
    browser.open_address(f"{server}/playground")
    assert browser.evaluate("document.querySelectorAll('.thumbs button').length") == 4
    browser.evaluate("[...document.querySelectorAll('.thumbs button')].at(-1).click()")
    assert browser.evaluate("document.querySelector('[name=prompt]').value") == "a red circle"
    assert browser.evaluate("document.querySelector('[name=steps]').value") == "2"


def test_the_wide_chart_does_not_scroll_on_a_phone(browser: Browser, server: str, runs: Path) -> None:
    browser.open_address(f"{server}/runs/{folder_id(runs / 'first')}", 390)
    assert browser.evaluate("getComputedStyle(document.querySelector('.chart.wide')).overflowX") == "visible"
