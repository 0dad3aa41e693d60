"""The site of the documentation: its navigation has every page, and files that are linked exist."""

from pathlib import Path
from typing import Any

import pytest

from tests.modules import load_module

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site() -> Any:
    return load_module("docs_site", ROOT / "scripts" / "docs_site.py")


def listed(site: Any, folder: str) -> list[str]:
    """Return the pages of a folder's index in order."""
    return [
        path
        for section in site.sections(folder)
        for pages in section.values()
        for one in pages
        for path in one.values()
    ]


def test_the_indices_have_every_page_once_and_files_are_copied(site: Any) -> None:
    pages = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("[!z]*/*.md"))
    assert sorted(path for path in listed(site, "docs") if path.startswith("docs/")) == pages
    pages = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "zh").glob("*/*.md"))
    assert sorted(listed(site, "docs/zh")) == pages
    files = {site.path_of(path) for path in site.site_files()}
    assert {"README.md", "docs/README.md", "docs/images/icons.png", "docs/images/ui-dark.png", "LICENSE"} <= files


def test_a_link_to_a_missing_file_is_an_error(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "here.py").touch()
    page = tmp_path / "page.md"
    page.write_text("[a](here.py#L1) `[code](absent.py)` [web](https://example.com/)\n```\n[code](absent.py)\n```\n")
    assert site.linked_files(page) == [tmp_path / "here.py"]
    page.write_text("[a](here.py) ![b](absent.png)\n")
    with pytest.raises(SystemExit, match=r"page\.md: no such file: absent\.png"):
        site.linked_files(page)
