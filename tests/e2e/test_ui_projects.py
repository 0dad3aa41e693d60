"""Projects in a real browser: the editor, and the journey from 20 images to a LoRA without a terminal."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sd3_light.assets import DEMO
from sd3_light.new.kinds import KINDS
from sd3_light.ui.folders import folder_id
from sd3_light.world import write_dataset
from tests.e2e.browser import (
    Browser,
    assert_fits_width,
    assert_readable_in_both_schemes,
    click_at,
    click_text,
    press,
    type_text,
    wait_for,
)
from tests.e2e.ui_server import served
from tests.families import save_pipeline
from tests.project import Project
from tests.waiting import wait_until

NUM_IMAGES = 20


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, raw_project: Project) -> Path:
    """A folder with 20 captioned images and a project."""
    folder = tmp_path_factory.mktemp("work")
    write_dataset(folder / "images", NUM_IMAGES, seed=1)
    for name in ("train.toml", "data.toml"):
        shutil.copy(raw_project.folder / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def server(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(work, [DEMO], tmp_path_factory.mktemp("state")) as address:
        yield address


def set_field(browser: Browser, key: str, value: str) -> None:
    """Find a key in the form of the editor, write its value, and wait until the text has it."""
    type_text(browser, "#find", key)
    field = f'#form [name="{key}"]'
    wait_for(browser, f"document.querySelector({field!r})?.checkVisibility()")
    type_text(browser, field, value)
    press(browser, "Tab")
    name = key.rpartition(".")[2]
    wait_for(browser, f"/\\b{name} = {value}\\b/.test(document.querySelector('#text').value)")


def test_the_editor_finds_faults_documents_keys_and_saves(browser: Browser, server: str, work: Path) -> None:
    config = work / "train.toml"
    config.write_text(config.read_text().replace("max_steps = 4", "max_steps = 4  # few"))
    address = f"{server}/projects/{folder_id(config)}"
    for width in (390, 1280):
        browser.open_address(address, width)
        wait_for(browser, "document.querySelector('#faults').innerText === 'None.'")
        assert_fits_width(browser, width)
    assert browser.evaluate("document.querySelector('#text').value") == config.read_text()
    assert browser.evaluate("document.querySelector('#save').disabled") is True
    browser.evaluate(
        "(() => { const text = document.querySelector('#text');"
        " text.value = text.value.replace('lr = 1e-3', 'lrr = 1e-3');"
        " text.dispatchEvent(new Event('input')); })()"
    )
    line = config.read_text()[: config.read_text().index("lr = 1e-3")].count("\n") + 1
    faults = "document.querySelector('#faults').innerText"
    wait_for(browser, f"{faults}.includes('optimizer.lrr unknown key') && {faults}.includes('line {line}')")
    assert "did you mean `lr`?" in browser.evaluate(faults)
    assert f"● {line}" in browser.evaluate("document.querySelector('#gutter').textContent")
    browser.evaluate("document.querySelector('#faults button').click()")
    browser.evaluate("document.querySelector('#text').dispatchEvent(new Event('click'))")
    position = "document.querySelector('#text').value.slice(0, document.querySelector('#text').selectionStart)"
    assert browser.evaluate(position).count("\n") + 1 == line
    browser.evaluate(
        "(() => { const text = document.querySelector('#text');"
        " text.value = text.value.replace('lrr = 1e-3', 'lr = 1e-3');"
        " text.dispatchEvent(new Event('input')); })()"
    )
    wait_for(browser, f"{faults} === 'None.'")
    browser.evaluate(
        "(() => { const text = document.querySelector('#text'); const place = text.value.indexOf('max_steps');"
        " text.setSelectionRange(place, place); text.dispatchEvent(new Event('click')); })()"
    )
    assert "max_steps" in browser.evaluate("document.querySelector('#doc').innerText")
    assert "an integer >= 1" in browser.evaluate("document.querySelector('#doc').innerText")
    set_field(browser, "max_steps", "7")
    before = config.read_text()
    assert "max_steps = 4" in before, "nothing is written before Save"
    click_text(browser, "Save")
    wait_for(browser, "document.querySelector('#saved').textContent === 'saved'")
    assert config.read_text() == before.replace("max_steps = 4", "max_steps = 7")
    config.write_text("# an editor was here\n" + config.read_text())
    set_field(browser, "max_steps", "8")
    click_text(browser, "Save")
    wait_for(browser, "document.querySelector('#saved').textContent.includes('has changed since the page read it')")
    assert "max_steps = 7" in config.read_text()
    browser.evaluate("document.querySelector('#text').value = savedText")  # leaves the page without a question
    assert browser.events_of("Runtime.exceptionThrown") == []


def test_the_pages_of_projects_are_readable_and_fit(browser: Browser, server: str, work: Path) -> None:
    for path in ("/projects", f"/projects/{folder_id(work / 'data.toml')}"):
        browser.open_address(server + path, 390)
        assert_fits_width(browser, 390)
        assert_readable_in_both_schemes(browser, server + path)
        assert browser.events_of("Log.entryAdded") == []


def fill(browser: Browser, form: str, values: dict[str, str]) -> None:
    """Type into the fields of a form."""
    for name, value in values.items():
        type_text(browser, f"{form} [name={name}]", value)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_every_kind_of_project_works(browser: Browser, server: str, work: Path, tmp_path: Path, family: str) -> None:
    model = DEMO if family == "sd3" else save_pipeline(family, tmp_path / "flux")
    for kind in KINDS:
        out = work / f"{family}-{kind}"
        browser.open_address(f"{server}/projects")
        click_at(browser, f"document.querySelector('[name=kind][value={kind}]')")
        values = {"data": str(work / "images"), "model": str(model), "out": str(out)}
        fill(browser, "form.fields", {**values, "gpu_memory": "24", "resolution": "64"})
        click_text(browser, "Show the plan")
        wait_for(browser, "document.body?.innerText.includes('What check says') || document.querySelector('.notes p')")
        notes = browser.evaluate("document.querySelector('.notes')?.innerText ?? ''")
        is_of_sd3 = KINDS[kind].recipe not in ("lora", "finetune", "reward", "distill")
        is_narrow = kind == "pretrain"  # the demo's encoders are narrower than its size
        if KINDS[kind].references or is_narrow or (family == "flux" and is_of_sd3):
            assert notes, f"{kind} is for other models, and the page says so"
            continue
        assert not notes, (kind, notes)
        click_text(browser, "Create the project")
        wait_for(browser, "document.querySelector('#faults')?.innerText === 'None.'")
        prompts = {f"{kind}_prompts.txt"} if KINDS[kind].draws else set()
        assert {path.name for path in out.iterdir()} == {f"{kind}.toml", f"{kind}_data.toml"} | prompts
        assert browser.events_of("Runtime.exceptionThrown") == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_20_images_to_a_lora_without_a_terminal(browser: Browser, server: str, work: Path) -> None:
    project = work / "project"
    browser.open_address(server)
    click_text(browser, "Projects")
    wait_for(browser, "document.querySelector('form.fields') !== null")
    fill(browser, "form.fields", {"data": str(work / "images"), "model": str(DEMO), "out": str(project)})
    click_text(browser, "Show the plan")
    wait_for(browser, "document.body?.innerText.includes('What check says')")
    plan = browser.evaluate("document.querySelector('main').innerText")
    assert f"{NUM_IMAGES} images at 64 px" in plan
    assert "disk, run" in plan
    assert not project.exists(), "nothing is written before the plan is accepted"
    click_text(browser, "Create the project")
    wait_for(browser, "document.querySelector('#faults')?.innerText === 'None.'")
    assert {path.name for path in project.iterdir()} == {"lora.toml", "lora_data.toml"}
    changes = {"max_steps": 4, "save_every_n_steps": 4, "warmup_steps": 1, "num_dataloader_workers": 0}
    for key, value in changes.items():
        set_field(browser, key, str(value))
    click_text(browser, "Save")
    wait_for(browser, "document.querySelector('#saved').textContent === 'saved'")
    assert "# of the validation loss" in (project / "lora.toml").read_text(), "comments stay"
    click_text(browser, "Start")
    wait_for(browser, "document.querySelector('h1')?.textContent === 'Run lora'")
    wait_for(browser, "document.querySelector('.tile b')?.textContent === '4'")
    exported = project / "runs" / "lora" / "exports"
    wait_until(lambda: list(exported.glob("step-*/*.safetensors")) or list(exported.glob("step-*/**/*.safetensors")))
    click_text(browser, "Queue")
    wait_for(browser, "document.querySelector('main section:nth-of-type(3)')?.innerText.includes('done')")
    click_text(browser, "Projects")
    wait_for(browser, "document.querySelector('h1')?.textContent === 'Projects'")
    link = f"h3 a[href$='{folder_id(project / 'lora.toml')}']"
    click_at(browser, f'document.querySelector("{link}")')
    wait_for(browser, "document.querySelector('#faults')?.innerText === 'None.'")
    set_field(browser, "max_steps", "6")
    click_text(browser, "Save")
    wait_for(
        browser, "document.querySelector('#resuming').innerText.includes('Applies on resume: max_steps = 6 (was 4)')"
    )
    click_text(browser, "Resume")
    wait_for(browser, "document.querySelector('.tile b')?.textContent === '6'")
    draw_and_share(browser, project)


def draw_and_share(browser: Browser, project: Path) -> None:
    """See the samples, draw with the LoRA, and look at a dry run of sharing it, by the links of the pages."""
    run = project / "runs" / "lora"
    wait_until(lambda: (run / "exports" / "step-00000006" / "proof.json").is_file())
    click_text(browser, "Queue")
    wait_for(browser, "document.querySelector('main section:nth-of-type(3)')?.innerText.includes('done')")
    click_text(browser, "lora")
    wait_for(browser, "document.querySelector('h1')?.textContent === 'Run lora'")
    click_text(browser, "Samples over steps")
    wait_for(browser, "[...document.querySelectorAll('.matrix img')].some(image => image.naturalWidth > 0)")
    browser.evaluate("history.back()")
    wait_for(browser, "document.querySelector('h1')?.textContent === 'Run lora'")
    click_text(browser, "Draw")
    wait_for(browser, "document.querySelector('#draw') !== null")
    fill(browser, "#draw", {"prompt": "a red circle", "seeds": "4", "steps": "2"})
    click_text(browser, "Draw")
    wait_for(browser, "document.querySelector('#state').textContent.startsWith('done')")
    wait_for(browser, "[...document.querySelectorAll('.drawn img')].every(image => image.naturalWidth > 0)")
    assert "step-00000006" in browser.evaluate("document.querySelector('#drawn').innerText")
    browser.evaluate("history.back()")
    wait_for(browser, "document.querySelector('h1')?.textContent === 'Run lora'")
    click_text(browser, "Share")
    wait_for(browser, "document.querySelector('[name=repo]') !== null")
    fill(browser, "form.fields", {"repo": "me/lora", "licence": "mit"})
    click_text(browser, "Dry run")
    wait_for(browser, "document.querySelector('main pre') !== null")
    text = browser.evaluate("document.querySelector('main').innerText")
    for part in ("pytorch_lora_weights.safetensors", "license: mit", "| images | 20", "samples.jpg", "HF_HUB_OFFLINE"):
        assert part in text
    assert browser.evaluate("[...document.querySelectorAll('button')].some(each => each.textContent === 'Upload')") is (
        False
    )
    assert browser.events_of("Runtime.exceptionThrown") == []
