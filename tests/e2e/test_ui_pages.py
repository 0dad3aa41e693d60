"""The pages of `sd3-light ui` in a real browser, served by the real server."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sd3_light.assets import DEMO
from sd3_light.sample.png import read_png_facts
from sd3_light.ui.folders import folder_id
from tests.e2e.browser import (
    Browser,
    assert_asks_only,
    assert_no_errors,
    assert_readable_in_both_schemes,
    press,
    wait_for,
)
from tests.e2e.ui_server import served
from tests.families import save_pipeline
from tests.unit.ui.conftest import write_run
from tests.unit.ui.test_evaluation_pages import write_evaluation

READ_ONLY_PAGES = ["Runs", "Queue", "Evaluations", "Data"]


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


def paths(runs: Path) -> list[str]:
    ids = [folder_id(path) for path in sorted(runs.glob("*")) if (path / "log.jsonl").exists()]
    query = "&".join(f"run={run_id}" for run_id in ids)
    pages = ["/", "/queue", "/playground", "/evaluations", "/data", "/runs/none"]
    return [*pages, f"/runs/{ids[1]}", f"/compare?{query}", f"/samples?{query}"]


def test_pages_request_only_their_server_fit_and_are_readable(browser: Browser, server: str, runs: Path) -> None:
    for path in paths(runs):
        for width in (390, 1280):
            browser.open_address(server + path, width)
            browser.evaluate("document.querySelectorAll('details').forEach(node => { node.open = true; })")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, path
        assert_asks_only(browser, server)
        assert browser.events_of("Runtime.exceptionThrown") == []
        if path != "/runs/none":
            assert browser.events_of("Log.entryAdded") == []
        assert_readable_in_both_schemes(browser, server + path)


def test_a_team_reads_runs_and_can_change_nothing(browser: Browser, runs: Path, tmp_path: Path) -> None:
    run = folder_id(runs / "first")
    with served(runs, state=tmp_path, is_read_only=True) as address:
        for path in ("/", "/queue", "/evaluations", "/data", f"/runs/{run}"):
            browser.open_address(address + path)
            assert browser.evaluate("document.querySelectorAll('form[method=post]').length") == 0, path
            assert browser.evaluate("[...document.querySelectorAll('nav.site a')].map(a => a.text)") == READ_ONLY_PAGES
            assert_no_errors(browser)
        assert browser.evaluate("document.querySelectorAll('.chart svg').length") > 0
        post = f"const request = new XMLHttpRequest(); request.open('POST', '/runs/{run}/stop', false); request.send();"
        assert browser.evaluate(f"(() => {{ {post} return request.status; }})()") in (404, 405)


def test_a_run_updates_itself_and_keeps_what_the_reader_set(browser: Browser, server: str, runs: Path) -> None:
    browser.open_address(f"{server}/runs/{folder_id(runs / 'first')}")
    assert browser.evaluate("document.querySelector('.tile b').textContent") == "40"
    browser.evaluate(
        "(() => { const slider = document.querySelector('.slider input'); slider.value = 1;"
        " slider.dispatchEvent(new Event('input')); document.querySelector('#samples details').open = true;"
        " document.querySelector('.area').focus(); window.notReloaded = true; })()"
    )
    assert "step 20" in browser.evaluate("document.querySelector('.slider output').textContent")
    write_run(runs / "first", steps=60)
    wait_for(browser, "document.querySelector('.tile b').textContent === '60'")
    assert browser.evaluate("window.notReloaded") is True
    assert browser.evaluate("document.activeElement === document.querySelector('.area')")
    assert "step 20" in browser.evaluate("document.querySelector('.slider output').textContent")
    assert browser.evaluate("document.querySelectorAll('.area .tip').length") == browser.evaluate(
        "document.querySelectorAll('.area').length"
    )
    assert browser.evaluate("document.querySelectorAll('.grids figure').length") == 6
    assert browser.evaluate("document.querySelector('#samples details').open") is True
    browser.open_address(f"{server}/runs/{folder_id(runs / 'first')}", 390)
    assert browser.evaluate("getComputedStyle(document.querySelector('.chart.wide')).overflowX") == "visible"


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
    alts = browser.evaluate("[...document.querySelectorAll('.drawn img')].map(image => image.alt)")
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
    wait_for(browser, "document.querySelector('[name=prompt]').value === 'a red circle'")
    assert browser.evaluate("document.querySelector('[name=steps]').value") == "2"


def set_value(selector: str, value: object, kind: str = "change") -> str:
    """Return a script that sets a field as a reader does."""
    return (
        f"(() => {{ const field = document.querySelector({json.dumps(selector)}); field.value = {json.dumps(value)};"
        f" field.dispatchEvent(new Event({json.dumps(kind)}, {{ bubbles: true }})); }})()"
    )


OUTPUT = "document.querySelector('#matrix output').textContent"
SOURCES = "[...document.querySelectorAll('#matrix td img')].map(image => image.getAttribute('src'))"


def test_the_matrix_of_samples_moves_by_keys_and_keeps_its_address(browser: Browser, server: str, runs: Path) -> None:
    ids = [folder_id(path) for path in sorted(runs.glob("*")) if (path / "log.jsonl").exists()]
    browser.open_address(f"{server}/samples?{'&'.join(f'run={each}' for each in ids)}")
    assert browser.evaluate("document.querySelectorAll('#matrix th[dir]').length") == 4 + 2  # prompts, runs
    last = browser.evaluate(OUTPUT)
    press(browser, "ArrowLeft")
    press(browser, "ArrowLeft")
    assert browser.evaluate(OUTPUT) != last
    browser.evaluate("document.querySelector('#matrix .slider input').focus()")
    press(browser, "ArrowLeft")
    moved = browser.evaluate(OUTPUT)
    sources = browser.evaluate(SOURCES)
    assert len(sources) == 8
    browser.open_address(browser.evaluate("location.href"))
    assert browser.evaluate(OUTPUT) == moved
    assert browser.evaluate(SOURCES) == sources
    wait_for(browser, "[...document.querySelectorAll('#matrix td img')].every(image => image.naturalWidth > 0)")
    browser.evaluate(set_value("[name=rows]", "step"))
    assert browser.evaluate("document.querySelector('#matrix th[dir]:nth-child(1)').textContent").startswith("step")
    assert "a red cat" in browser.evaluate(OUTPUT)
    assert browser.events_of("Runtime.exceptionThrown") == []


def test_two_samples_are_compared_in_full_size(browser: Browser, server: str, runs: Path) -> None:
    browser.open_address(f"{server}/samples?run={folder_id(runs / 'first')}", 390)
    cell = "document.querySelectorAll('#matrix td button')"
    browser.evaluate(f"{cell}[0].click()")
    assert browser.evaluate("viewer.open")
    browser.evaluate("document.querySelector('#viewer [data-keep]').click()")
    assert browser.evaluate("viewer.open") is False
    assert browser.evaluate("document.querySelectorAll('#matrix .kept').length") == 1
    browser.evaluate(f"{cell}[1].click()")
    shown = "document.querySelectorAll('#viewer figure:not([hidden])').length"
    assert browser.evaluate(shown) == 2
    browser.evaluate("document.querySelector('#viewer [data-mode=swipe]').click()")
    browser.evaluate("(() => { edge.value = 20; edge.dispatchEvent(new Event('input')); })()")
    assert "20%" in browser.evaluate("getComputedStyle(other).clipPath")
    browser.evaluate("document.querySelector('#viewer [data-mode=toggle]').click()")
    before = browser.evaluate("mine.hidden")
    browser.evaluate("stage.click()")
    assert browser.evaluate("mine.hidden") != before
    assert browser.evaluate(shown) == 1
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    press(browser, "Escape")
    assert browser.evaluate("viewer.open") is False


def submit(browser: Browser, values: dict[str, object]) -> None:
    browser.evaluate(
        f"(() => {{ const form = document.querySelector('#draw'); const values = {json.dumps(values)};"
        " for (const [name, value] of Object.entries(values)) { form.elements[name].value = value;"
        " form.elements[name].dispatchEvent(new Event('change', { bubbles: true })); }"
        " form.querySelector('button').click(); })()"
    )


@pytest.mark.parametrize("family", ["sd3", "flux", "sana"])
def test_a_grid_of_two_axes_is_drawn_again_from_its_png(browser: Browser, tmp_path: Path, family: str) -> None:
    model = DEMO if family == "sd3" else save_pipeline(family, tmp_path / "model")
    with served(tmp_path, [model], tmp_path / "state") as address:
        browser.open_address(f"{address}/playground")
        size = {"width": 64, "height": 32, "steps": 3}
        axes = {"columns": "guidance", "columns_values": "1, 3", "rows": "shift", "rows_values": "1-5:4"}
        submit(browser, {"prompt": 'a "red" cat, 红', "seeds": str(2**62 + 1), **size, **axes})
        wait_for(browser, "document.querySelector('#state').textContent.startsWith('done')")
        labels = "[...document.querySelectorAll('.drawn th')].map(cell => cell.textContent)"
        assert browser.evaluate(labels) == ["", "guidance 1", "guidance 3", "shift 1", "shift 5"]
        files = sorted((tmp_path / "playground").glob("[0-9]*.png"))
        assert len({path.read_bytes() for path in files}) == 4
        assert browser.evaluate("document.querySelector('#grid').hidden") is False
        facts = read_png_facts(files[3])
        assert (facts["guidance"], facts["shift"], facts["seed"]) == (3.0, 5.0, 2**62 + 1)
        # the file is read in the browser
        browser.open_address(f"{address}/playground")
        root = browser.call("DOM.getDocument")["root"]["nodeId"]
        field = browser.call("DOM.querySelector", nodeId=root, selector="#drop input")["nodeId"]
        browser.call("DOM.setFileInputFiles", nodeId=field, files=[str(files[3])])
        wait_for(browser, "document.querySelector('[name=seeds]').value === '4611686018427387905'")
        assert browser.evaluate("document.querySelector('[name=prompt]').value") == 'a "red" cat, 红'
        submit(browser, {})
        wait_for(browser, "document.querySelector('#state').textContent.startsWith('done')")
        again = max((tmp_path / "playground").glob("[0-9]*.png"))
        assert again not in files
        assert again.read_bytes() == files[3].read_bytes()
        assert browser.events_of("Runtime.exceptionThrown") == []


def test_a_drawing_shows_previews_and_stops_at_once(browser: Browser, tmp_path: Path) -> None:
    with served(tmp_path, [DEMO], tmp_path / "state") as address:
        browser.open_address(f"{address}/playground")
        submit(browser, {"prompt": "</td><img src=x onerror=alert(1)>", "steps": 1000})
        wait_for(browser, "document.querySelector('.drawn img')?.alt.includes('preview after step')")
        wait_for(browser, "document.querySelector('.drawn img').naturalWidth > 0")
        browser.evaluate("document.querySelector('#cancel').click()")
        wait_for(browser, "document.querySelector('#state').textContent.startsWith('stopped')")
        assert list((tmp_path / "playground").glob("*.png")) == []
        assert browser.events_of("Page.javascriptDialogOpening") == []


def test_an_evaluation_shows_the_best_images_beside_the_true_ones(browser: Browser, tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "eval")
    with served(tmp_path, [], tmp_path / "state") as address:
        for width in (390, 1280):
            browser.open_address(f"{address}/evaluations/{folder_id(folder)}?score=psnr", width)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate("document.querySelector('.sample footer').textContent").startswith("caption 39")
        browser.evaluate("document.querySelectorAll('.evaluated button')[1].click()")
        assert browser.evaluate("document.querySelectorAll('#viewer figure:not([hidden])').length") == 2
        assert browser.events_of("Runtime.exceptionThrown") == []
        for path in ("/evaluations", f"/evaluations/{folder_id(folder)}"):
            assert_readable_in_both_schemes(browser, address + path)
