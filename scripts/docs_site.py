"""Builds the site of the documentation into site/: `make docs-site`. A broken link or anchor ends it with an error.

The site has the repository's folders, so that every relative link works there as on a git host: the pages are the
Markdown files of `FOLDERS`, and files that they link to are copied. The navigation is the two indexes, docs/README.md
and docs/zh/README.md: their sections, with the links in the first column of each table.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STAGE = ROOT / "build" / "docs-site"
FOLDERS = (".", "docs/**", "benchmarks", "sd3_light/assets/**")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?:\]\(|(?:src|srcset)=\")([^)\s#\"]+)")
ROW = re.compile(r"^\| \[(.+?)\]\((.+?)\)", re.MULTILINE)


def site_files() -> list[Path]:
    """Return the pages and the files that they link to."""
    pages = {path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md")}
    linked = {path for page in pages for path in linked_files(page)}
    return sorted({path.resolve() for path in (*pages, *linked, ROOT / "docs" / "site.css")})


def linked_files(page: Path) -> list[Path]:
    """Return the files that a page links to. Zensical reports missing pages, and this function all other files."""
    prose = CODE.sub("", page.read_text(encoding="utf-8"))
    links = [link for link in LINK.findall(prose) if not re.match(r"\w+:", link)]
    broken = [link for link in links if not (page.parent / link).is_file()]
    if broken:
        sys.exit(f"{path_of(page)}: no such file: {', '.join(broken)}")
    return [page.parent / link for link in links]


def sections(folder: str) -> list[dict[str, Any]]:
    """Return the sections of a folder's index and their pages, as the navigation lists them."""
    home = ROOT / folder / "README.md"
    found = []
    for section in home.read_text(encoding="utf-8").split("\n## ")[1:]:
        pages = [{title: path_of(home.parent / link)} for title, link in ROW.findall(section)]
        found.append({section.splitlines()[0]: pages})
    return found


def path_of(path: Path) -> str:
    """Return the path of a file from the repository's root."""
    return path.resolve().relative_to(ROOT).as_posix()


def main() -> int:
    """Copy the pages, write the configuration and run Zensical; return its exit status."""
    shutil.rmtree(STAGE, ignore_errors=True)
    for path in site_files():
        copy = STAGE / "pages" / path_of(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    navigation = [
        {"SD3-Light": "README.md"},
        {"Documentation": "docs/README.md"},
        *sections("docs"),
        {"中文": ["README.zh.md", "docs/zh/README.md", *sections("docs/zh")]},
    ]
    config = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    (STAGE / "mkdocs.yml").write_text(f"{config}\nnav: {json.dumps(navigation)}\n", encoding="utf-8")
    command = [sys.executable, "-P", "-m", "zensical", "build", "--clean", "--strict"]
    status = subprocess.run(command, cwd=STAGE, check=False).returncode
    if status == 0:
        shutil.rmtree(ROOT / "site", ignore_errors=True)
        shutil.move(STAGE / "site", ROOT / "site")
    return status


if __name__ == "__main__":
    sys.exit(main())
