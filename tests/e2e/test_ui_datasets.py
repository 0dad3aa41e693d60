"""Find the bad captions of a dataset, fix them and continue: in a real browser, with real files and processes."""

import json
from pathlib import Path

import pytest
from PIL import Image

from sd3_light.runlog import read_log
from sd3_light.ui.folders import folder_id
from tests.e2e.browser import (
    Browser,
    assert_asks_only,
    assert_fits_width,
    assert_no_errors,
    assert_readable_in_both_schemes,
    choose_option,
    click_at,
    click_text,
    type_text,
    wait_for,
)
from tests.e2e.browser import press as press_key
from tests.e2e.ui_server import served
from tests.project import Project
from tests.waiting import wait_until

MANY = 20_000


def press(browser: Browser, text: str) -> None:
    """Press the button with this text, and wait until the next page is loaded."""
    browser.evaluate("window.isOld = true")
    click_text(browser, text)
    wait_for(browser, "!window.isOld && document.readyState === 'complete'")


def show(browser: Browser, **fields: str) -> None:
    """Filter and sort the samples as a reader does."""
    for name, value in fields.items():
        if name == "sort":
            choose_option(browser, "form.fields [name=sort]", value or "dataset order")
        else:
            type_text(browser, f"form.fields [name={name}]", value)
    press(browser, "Show")


def keys(browser: Browser) -> list[str]:
    return list(browser.evaluate("[...document.querySelectorAll('.sample')].map(each => each.dataset.key)"))


def list_dataset(browser: Browser, address: str, toml: Path) -> None:
    """Open a dataset as a reader does who has opened the address of the server, and list its images."""
    browser.open_address(address)
    press(browser, "Data")
    click_at(browser, f"document.querySelector('a[href=\"/datasets/{folder_id(toml)}\"]')")
    wait_for(browser, "document.querySelector('#continue') !== null")
    press(browser, "List images")
    wait_for(browser, "document.querySelectorAll('.sample').length > 0 && !document.querySelector('#job p')")


def write_caption(browser: Browser, text: str) -> None:
    """Change the first caption on the page with the keyboard."""
    click_at(browser, "document.querySelector('.edited .edit')")
    wait_for(browser, "document.querySelector('.edited textarea') !== null")
    type_text(browser, ".edited textarea", text)
    press_key(browser, "Enter", modifiers=2)
    wait_for(browser, "document.querySelector('[data-saved]') !== null")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fix_captions_see_what_is_encoded_again_and_resume(browser: Browser, project: Project) -> None:
    captions = json.loads((project.images / "captions.json").read_text(encoding="utf-8"))
    (project.images / "captions.json").unlink()  # its rows cannot be changed in place
    table = project.images / "metadata.jsonl"
    rows = [{"file_name": name, "text": texts} for name, texts in captions.items()]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    project.train()
    name, before = rows[-1]["file_name"], table.read_text(encoding="utf-8")
    with served(project.folder) as address:
        list_dataset(browser, address, project.data_toml)
        for measure, sort, badge in (("Measure PSNR", "PSNR", " dB"), ("Find cut captions", "", "")):
            press(browser, measure)
            wait_for(browser, "!document.querySelector('#job p')")
            show(browser, sort=sort)
            assert badge in browser.evaluate("document.querySelector('.mark').textContent")
        assert "0 of 40 samples have a caption" in browser.evaluate("document.querySelector('main').textContent")
        show(browser, text=name)
        assert keys(browser) == [f"images#0/{name}"]
        write_caption(browser, "a red circle <b>&")
        old = json.dumps(captions[name][0])
        assert table.read_text(encoding="utf-8") == before.replace(old, '"a red circle <b>&"')
        press(browser, "What will be encoded again?")
        plan = "document.querySelector('#plan')?.textContent.replaceAll('│', ' ')"
        wait_for(browser, f"/captions +1 +encoded/.test({plan})")
        assert "the caption changed" in browser.evaluate("document.querySelector('#plan').textContent")
        (project.folder / "train.toml").write_text(
            project.train_toml.read_text(encoding="utf-8").replace("max_steps = 4", "max_steps = 6"), encoding="utf-8"
        )
        press(browser, "Encode and resume")
        log = project.run / "log.jsonl"
        wait_until(lambda: [each for each in read_log(log) if each.get("event") == "step" and each["step"] == 6])
        assert browser.events_of("Runtime.exceptionThrown") == []


def write_images(root: Path, count: int) -> None:
    """Write images with captions; of every hundredth the caption is bad in one of several ways."""
    (root / "images").mkdir()
    blobs = []
    for number in range(8):
        Image.new("RGB", (64 + 16 * (number % 3), 64), (30 * number, 90, 10)).save(root / "image.png")
        blobs.append((root / "image.png").read_bytes())
    (root / "image.png").unlink()
    for number in range(count):
        (root / f"images/{number:05d}.png").write_bytes(blobs[number % 8])
        caption = "watermark, a photo" if number % 100 == 7 else "x" if number == 12 else f"a good caption of {number}"
        if number != 55:
            (root / f"images/{number:05d}.txt").write_text(caption, encoding="utf-8")
    (root / "data.toml").write_text('resolutions = [64]\n\n[[directory]]\npath = "images"\n', encoding="utf-8")
    (root / "train.toml").write_text(
        'output_dir = "run"\ndataset = "data.toml"\nmax_steps = 2\nsave_every_n_steps = 2\n[model]\n'
        'diffusers_path = "no_model"\ntrain_type = "sd3_light_pretrain"\nsize = "tiny2"\n',
        encoding="utf-8",
    )


@pytest.mark.parametrize("count", [300, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_find_and_fix_captions(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    write_images(tmp_path, count)
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$3 ${5:-}"\nexit 0\n')
    fake.chmod(0o755)
    bad = count // 100
    with served(tmp_path) as address:
        list_dataset(browser, address, tmp_path / "data.toml")
        wait_for(browser, f"document.querySelector('#total').textContent === '{count - 1:,} samples'")
        show(browser, where="caption_length < 5")
        assert keys(browser) == ["images#0/00012.png"]
        write_caption(browser, "a better caption")
        assert (tmp_path / "images/00012.txt").read_text(encoding="utf-8") == "a better caption"
        show(browser, where="", tag="watermark")
        assert browser.evaluate("document.querySelector('#total').textContent") == f"{bad:,} samples"
        click_at(browser, "document.querySelector('#bulk [name=scope][value=all]')")
        choose_option(browser, "#bulk [name=mode]", "replace or remove a tag")
        type_text(browser, "#bulk [name=find]", "watermark")
        press(browser, "Preview")
        assert f"{bad:,} captions in {bad:,} files" in browser.evaluate("document.body.innerText")
        assert browser.evaluate("document.querySelector('del').textContent") == "watermark, "
        assert "watermark" in (tmp_path / "images/00007.txt").read_text(encoding="utf-8")
        press(browser, "Change")
        assert (tmp_path / "images/00007.txt").read_text(encoding="utf-8") == "a photo"
        show(browser, tag="")
        click_at(browser, "document.querySelector('[name=key]')")
        assert browser.evaluate("document.querySelector('#marked').textContent") == "1"
        press(browser, "Exclude")
        assert (tmp_path / "data.exclude.txt").read_text(encoding="utf-8") == "images#0/00000.png\n"
        press(browser, "rejected")
        assert keys(browser) == ["images#0/00055.png"]
        write_caption(browser, "it has a caption now")
        monkeypatch.setattr("sys.executable", str(fake))
        press(browser, "What will be encoded again?")
        wait_for(browser, "document.querySelector('#plan')?.textContent === 'cache --dry-run'")
        press(browser, "Encode and train")
        wait_until(lambda: (tmp_path / "run/console.txt").exists())
        assert browser.events_of("Runtime.exceptionThrown") == []


def test_the_pages_fit_and_are_readable(browser: Browser, tmp_path: Path) -> None:
    write_images(tmp_path, 60)
    (tmp_path / f"images/{'long' * 30}.png").write_bytes((tmp_path / "images/00001.png").read_bytes())
    (tmp_path / f"images/{'long' * 30}.txt").write_text("word" * 300, encoding="utf-8")
    with served(tmp_path) as address:
        page = f"{address}/datasets/{folder_id(tmp_path / 'data.toml')}"
        list_dataset(browser, address, tmp_path / "data.toml")
        for query in ("", "?show=rejected", "?show=duplicates", "?tags=1&sort=caption+length&order=descending"):
            for width in (390, 1280):
                browser.open_address(page + query, width)
                assert_fits_width(browser, width)
            assert_asks_only(browser, address)
            assert_no_errors(browser)
            assert_readable_in_both_schemes(browser, page + query)


def test_a_caption_that_changed_elsewhere_is_shown_as_an_error(browser: Browser, tmp_path: Path) -> None:
    write_images(tmp_path, 20)
    with served(tmp_path) as address:
        list_dataset(browser, address, tmp_path / "data.toml")
        click_at(browser, "document.querySelector('.edited .edit')")
        wait_for(browser, "document.querySelector('.edited textarea') !== null")
        (tmp_path / "images/00000.txt").write_text("theirs", encoding="utf-8")
        type_text(browser, ".edited textarea", "mine")
        click_at(browser, "document.querySelector('.edited form button')")
        wait_for(browser, "document.querySelector('.edited output').textContent.includes('has changed since')")
        assert (tmp_path / "images/00000.txt").read_text(encoding="utf-8") == "theirs"
        assert browser.evaluate("document.querySelector('.edited textarea').value") == "mine"
