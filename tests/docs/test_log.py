"""The log: newest entry first, one screen each, and what pages and code say about it is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOG = (ROOT / "docs" / "evidence" / "LOG.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^## \d{4}-.*?(?=^## |\Z)", LOG, re.MULTILINE | re.DOTALL)
TITLES = [entry.splitlines()[0].removeprefix("## ") for entry in ENTRIES]
LINES, WIDTH = 50, 160
"""A screen; rows of tables may be wider."""


def test_entries_are_in_order_and_those_that_others_name_exist() -> None:
    assert len(ENTRIES) > 100
    dates = [title[:10] for title in TITLES]
    assert dates == sorted(dates, reverse=True)
    for start in re.findall(r'\bentry\s+"([^"]+)"', LOG):
        words = " ".join(start.split())
        assert any(title[10:].strip().startswith(words) for title in TITLES), start
    dates = {title[:10] for title in TITLES}
    named = {}
    for path in (*(ROOT / "docs").rglob("*.md"), *(ROOT / "sd3_light" / "recipes").rglob("*.toml"), ROOT / "README.md"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "LOG" in line and path.name != "LOG.md":
                named |= dict.fromkeys(re.findall(r"\b2\d{3}-\d\d-\d\d\b", line), path.name)
    assert named
    assert {date: name for date, name in named.items() if date not in dates} == {}


@pytest.mark.parametrize("entry", ENTRIES, ids=TITLES)
def test_an_entry_fits_a_screen_and_says_how_it_was_measured(entry: str) -> None:
    lines = entry.rstrip().splitlines()
    assert len(lines) <= LINES
    assert [line for line in lines[1:] if len(line) > WIDTH and not line.lstrip().startswith("|")] == []
    assert re.search(r"^- Set-up", entry, re.MULTILINE), "no set-up: command, hardware, seeds"
