"""Templates escape every value, fail on missing ones, and inline styles and scripts under a content policy."""

import base64
import hashlib
import math
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import UndefinedError

import sd3_light.pages
from sd3_light.formats import byte_size, duration, language, number, plural, tick_label
from sd3_light.pages import Chart, ChartLine, ChartMark, check_output_path, render_template, save_page
from sd3_light.pages.html import environment
from sd3_light.report.inspect.histogram import HistogramBin
from sd3_light.report.inspect.line_sample import LineGroup
from sd3_light.ui.run_pages import RunControls
from tests.refusals import refused
from tests.unit.pages.parsed_page import ParsedPage, assert_self_contained

ROOT = Path(sd3_light.pages.__file__).parent
FILES = sorted((ROOT / "templates" / "components").glob("*.html"))
COMPONENTS = [path for path in FILES if "{% macro" in path.read_text()]
HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=http://127.0.0.1:9/x onerror=alert(1)>'",
    "</style></script></title></textarea><svg onload=alert(1)>",
    "{{ 7 * 7 }} {% raw %} &lt;b&gt; &amp;",
    "javascript:alert(1)",
)
IMAGE = "data:image/png;base64,AAAA"


def macro(component: str, name: str) -> Any:
    return getattr(environment().get_template(f"components/{component}.html").module, name)


@cache
def components(text: str) -> dict[str, str]:
    """Return every component, rendered with the text wherever a value from data can be."""
    line = ChartLine(text, [(0, 1.0), (1, 2.0)], last=2.0, source=(text, text, text), interval=[(0, 1.0, 2.0)])
    event = SimpleNamespace(time=text, step=text, kind=text, details=text, is_error=True)
    grid = SimpleNamespace(step=1, caption=text, uri=IMAGE, width=1, height=1)
    origin = SimpleNamespace(captions=[text, text + " 猫"], key=text)
    sample = SimpleNamespace(
        **{"origin": origin, "size": (8, 8), "original": "", "decoded": IMAGE, "masked": IMAGE, "problem": text},
        **{"psnr_text": text, "resize_text": text},
    )
    long = SimpleNamespace(**{**vars(sample), "origin": SimpleNamespace(captions=[text * 300], key=text)})
    rejects = [SimpleNamespace(key=text, reason=text, detail=text, image=image, problem=text) for image in (IMAGE, "")]
    pair = SimpleNamespace(first_image=IMAGE, image="", first=text, key=text)
    bins = [HistogramBin(1, 1, 2), HistogramBin(2, 2, 0)]
    return {
        "bars.html": macro("bars", "bucket_bars")([(text, 8, 8, 3)]) + macro("bars", "reason_bars")([(text, text, 3)]),
        "chart.html": macro("chart", "chart_group")(
            [Chart(text, [line], text, [ChartMark(0, text)], x_name=text)], text
        )
        + macro("chart", "chart_controls")({text: {"id": text + "'", "rows": []}}),
        "duplicates.html": macro("duplicates", "duplicate_group")(LineGroup(text, 9, [pair]), text),
        "events.html": macro("events", "event_table")([event], [text]),
        "grids.html": macro("grids", "grid_slider")(SimpleNamespace(weights=text, total=3, grids=[grid, grid]))
        + macro("grids", "prompt_list")([text]),
        "histogram.html": macro("histogram", "histogram")(
            SimpleNamespace(title=text, summary=text, unit=text, bins=bins)
        ),
        "notes.html": macro("notes", "note_box")([text]),
        "reject_card.html": macro("reject_card", "reject_group")(LineGroup(text, 9, rejects), text)
        + macro("reject_card", "reject_group")(LineGroup(text, 1, rejects[1:]), text),
        "run_controls.html": "".join(
            macro("run_controls", "run_controls")(
                RunControls("/runs/a", running, True, True, [("/", text)], text, starting)
            )
            for running, starting in ((True, False), (False, True), (False, False))
        ),
        "sample_card.html": macro("sample_card", "sample_card")(sample) + macro("sample_card", "sample_card")(long),
        "section.html": macro("section", "section")(text, text, caller=str),
        "table.html": macro("table", "facts_table")([(text, text, text)]),
        "tiles.html": macro("tiles", "tile_row")([(text, text, text)]),
    }


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("name", [path.name for path in COMPONENTS])
def test_every_component_escapes_text_from_data(name: str, text: str) -> None:
    safe, hostile = (ParsedPage(components(value)[name]) for value in ("safe", text))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in safe.elements]
    assert [set(attributes) for _, attributes in hostile.elements] == [set(each) for _, each in safe.elements]
    assert text in hostile.text


@pytest.mark.parametrize("text", HOSTILE)
def test_the_frame_of_a_page_escapes_text_from_data(text: str) -> None:
    page = ParsedPage(render_template("charts.html", title=text, charts=[]))
    assert_self_contained(page)
    assert page.text.count(text) == 2  # title and heading
    with pytest.raises(UndefinedError, match="'charts' is undefined"):
        render_template("charts.html", title="x")


def test_the_policy_allows_exactly_the_script_of_the_page() -> None:
    page = ParsedPage(render_template("charts.html", title="x", charts=[]))
    script = page.source.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert page.policy.endswith(f"; script-src 'sha256-{digest}'")
    assert "{{" not in page.source


def test_styles_and_scripts_cannot_leave_their_element() -> None:
    files = [*(ROOT / "styles").iterdir(), *(ROOT / "scripts").iterdir()]
    assert len(files) >= 8
    assert [path.name for path in files if "</" in path.read_text()] == []


def test_the_output_path_is_checked_before_the_work(tmp_path: Path) -> None:
    check_output_path(tmp_path / "new" / "page.html")
    assert (tmp_path / "new").is_dir()
    refused(r"--out: .* is a folder; name the file", check_output_path, tmp_path)
    (tmp_path / "file").touch()
    refused("cannot create the folder", check_output_path, tmp_path / "file" / "page.html")


def test_half_a_surrogate_pair_is_written_as_an_escape(tmp_path: Path) -> None:
    save_page(tmp_path / "page.html", render_template("charts.html", title="\ud800.jpg", charts=[]))
    assert b"<title>\\ud800.jpg</title>" in (tmp_path / "page.html").read_bytes()


def test_numbers_durations_and_languages() -> None:
    assert [duration(seconds) for seconds in (0.44, 12, 482, 7500, 270_000, 86_400)] == [
        *("0.4 s", "12 s", "8 min 2 s", "2 h 5 min", "3 d 3 h", "1 d")
    ]
    assert [number(value) for value in (0.51234, 12345.6, 1e-4, math.nan)] == ["0.5123", "12,346", "1e-4", "not finite"]
    sizes = [byte_size(size) for size in (0, 999, 31_100, 8.9e9, 2e12)]
    assert sizes == ["0 B", "999 B", "31.1 kB", "8.9 GB", "2 TB"]
    assert [plural(1, "resume"), plural(2, "resume"), plural(8, "process")] == ["1 resume", "2 resumes", "8 processes"]
    assert tick_label(-2.5e9) == "-2.5G"
    languages = [language(text) for text in ("a cat", "一只猫", "これは猫", "고양이", "a 猫", "")]
    assert languages == ["", "zh", "ja", "ko", "zh", ""]


def test_bars_are_drawn_to_scale_and_an_open_bin_has_a_plus() -> None:
    bars = macro("bars", "bucket_bars")([("512x256", 512, 256, 1), ("256x256", 256, 256, 1)])
    assert 'width="28.0" height="14.0"' in bars
    assert 'width="14.0" height="14.0"' in bars
    bins = [HistogramBin(22, 22, 4), HistogramBin(23, 23, 2, is_open=True)]
    html = macro("histogram", "histogram")(SimpleNamespace(title="", summary="", unit="words", bins=bins))
    assert "<span>22</span>" in html
    assert "<span>23+</span>" in html


def test_notes_are_in_the_part_of_the_page_that_updates_itself() -> None:
    """A note that comes or goes must not change the number of parts: the reader's settings are kept by part."""

    def parts(notes: list[str]) -> list[str]:
        page = render_template("error.html", notes=notes, served="/", live=True)
        main = ET.fromstring(page[page.index("<main") : page.index("</main>") + len("</main>")])
        assert "a note" not in page[: page.index("<main")]
        assert "a note" not in page[page.index("</main>") :]
        assert ("a note" in "".join(main.itertext())) == bool(notes)
        return [part.tag for part in main]

    assert parts(["a note"]) == parts(["a note", "another"]) == parts([]) == ["div", "p"]
