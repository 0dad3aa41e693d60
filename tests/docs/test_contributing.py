"""CONTRIBUTING's table of where a change goes, against the files and names that exist."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!change|-)(.+) \|$", TEXT.split("## Where does it go?")[1].split("\n## ")[0], re.MULTILINE)
PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w-]+\.(?:py|md|toml|txt)")
NAMED = re.compile(r"`(\w+)` (?:in|of) `([\w/-]+\.py)`")


@cache
def files() -> list[Path]:
    folders = ("sd3_light", "tests", "docs", "benchmarks", "scripts")
    return [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]


def resolved(name: str, earlier: list[Path]) -> Path | None:
    """Return the path of a name in a row: from the root, from the package, or beside an earlier one of the row."""
    folders = [Path(), Path("sd3_light"), *(path if (ROOT / path).is_dir() else path.parent for path in earlier)]
    found = [folder / name for folder in folders if (ROOT / folder / name).exists()]
    if found:
        return found[-1] if "/" not in name else found[0]
    if name.startswith("test_"):
        return next((path for path in files() if path.name == name), None)
    return None


@pytest.mark.parametrize("row", ROWS, ids=[row.split(" |")[0] for row in ROWS])
def test_a_row_names_what_exists(row: str) -> None:
    paths: list[Path] = []
    for name in re.findall(r"`([^`]+)`", row):
        if PATH.fullmatch(name) and name != "verb.py":  # of a folder that does not exist yet
            path = resolved(name, paths)
            assert path is not None, f"{name} does not exist"
            paths.append(path)
    for name, file in NAMED.findall(row):
        path = resolved(file, paths)
        assert path is not None
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), f"{file} has no {name}"


def test_pages_name_files_that_exist() -> None:
    """The logs of changes and experiments keep the names of their time."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for page in (page for page in pages if page.name not in ("CHANGELOG.md", "LOG.md")):
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"\b(?:sd3_light|tests|benchmarks|scripts|examples)/[\w/.-]+\.(?:py|toml|md)\b", text):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
    assert 15 <= len(ROWS) <= 20
