"""Every page: links, commands, files and versions exist; translations, the log and the site are complete."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from sd3_light import cli
from sd3_light.cli.train_py import _flags
from sd3_light.families.sd3.single_notes import _COMFY_T5_LENGTH, _T5_LENGTH
from tests.modules import load_module

ROOT = Path(__file__).parents[2]
SKIPPED = {".venv", ".git", "gpu_libs", "demo_run", "runs", "build", "dist"}
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in ROOT.rglob("*.md")
    if not SKIPPED & set(path.relative_to(ROOT).parts) and not any(part.startswith(".") for part in path.parts[1:])
)
TRANSLATED = [
    ("README.md", "README.zh.md"),
    *((name, name.replace("docs/", "docs/zh/")) for name in PAGES if name.startswith(("docs/start/", "docs/moving/"))),
    ("docs/reference/tasks.md", "docs/zh/reference/tasks.md"),
]
LOG = (ROOT / "docs" / "evidence" / "LOG.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^## \d{4}-.*?(?=^## |\Z)", LOG, re.MULTILINE | re.DOTALL)
TITLES = [entry.splitlines()[0].removeprefix("## ") for entry in ENTRIES]
LINES, WIDTH = 50, 160
"""A screen; rows of tables may be wider."""
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!change|-)(.+) \|$", TEXT.split("## Where does it go?")[1].split("\n## ")[0], re.MULTILINE)
PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w-]+\.(?:py|md|toml|txt)")
NAMED = re.compile(r"`(\w+)` (?:in|of) `([\w/-]+\.py)`")
PAGE = "docs/formats/compatibility.md"
CLIENTS = ("diffusers", "transformers", "peft", "safetensors", "huggingface_hub", "tensorboard")


def test_the_pages_are_found_and_name_every_room_and_reason(page: Any) -> None:
    assert {"CONTRIBUTING.md", "docs/README.md", "docs/reference/config.md"} <= set(PAGES)
    assert len(TRANSLATED) >= 8
    tree = next(block.text for block in page("CONTRIBUTING.md").blocks if "cli/" in block.text)
    named = {name for line in tree.splitlines() for name in line[:44].split()}
    rooms = {f"{path.parent.name}/" for path in (ROOT / "sd3_light").glob("*/__init__.py")}
    assert rooms - named == {"assets/", "recipes/"}
    assert [name for name in named if not (ROOT / "sd3_light" / name).exists()] == []
    from sd3_light.sources.preprocess import REASONS

    text = "\n".join(page("docs/formats/cache-format.md").prose)
    assert [reason for reason in REASONS if f"`{reason}`" not in text] == []


@pytest.mark.parametrize("name", PAGES)
def test_every_relative_link_resolves(page: Any, name: str) -> None:
    source = page(name)
    broken = []
    for link in source.links:
        if "://" in link or link.startswith("mailto:"):
            continue
        target, _, anchor = link.partition("#")
        path = (source.path.parent / target).resolve() if target else source.path
        if not path.exists() or (anchor and anchor not in page(str(path.relative_to(ROOT))).anchors):
            broken.append(link)
    assert broken == []


def code(block: Any) -> list[str]:
    """Return the lines of a block without comments and, in a listing of files, without descriptions: a translation
    translates both."""
    remark = r"(?<=\S)\s{2,}\S.*" if not block.language else r"(^|\s+)# .*"
    return [re.sub(remark, "", line).rstrip() for line in block.text.splitlines()]


@pytest.mark.parametrize(("name", "translation"), TRANSLATED)
def test_a_translation_has_the_same_sections_and_code(page: Any, name: str, translation: str) -> None:
    ours, theirs = page(name), page(translation)
    assert [level for level, _ in ours.headings] == [level for level, _ in theirs.headings]
    assert len(ours.headings) > 2
    assert [code(block) for block in ours.blocks] == [code(block) for block in theirs.blocks]
    assert [block.run for block in ours.blocks] == [block.run for block in theirs.blocks]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in a shell block, without comments, continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def options_of(words: list[str]) -> set[str]:
    """Return the options of the command that the words begin with: a verb, or a verb of a group."""
    command: Any = typer.main.get_command(cli.app)
    for word in words[1:]:
        if not hasattr(command, "commands"):
            break
        assert word in command.commands, words
        command = command.commands[word]
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("name", PAGES)
def test_every_documented_command_exists(page: Any, name: str) -> None:
    """Check verbs and options of `sd3-light`, flags of `train.py` and make targets."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    flags = {option for action in _flags()._actions for option in action.option_strings}
    for block in page(name).blocks:
        if block.language not in ("bash", "sh", "shell", "console"):
            continue
        for words in commands(block.text):
            used = {word.split("=", 1)[0] for word in words if word.startswith("--")}
            if words[0] == "sd3-light" and not words[1].startswith("-"):
                assert used <= options_of(words) | {"--help"}, words
            elif "train.py" in words:
                after = words[words.index("train.py") :]
                assert {word.split("=", 1)[0] for word in after if word.startswith("--")} <= flags, words
            elif words[0] == "make" and len(words) > 1 and "=" not in words[1]:
                assert f"\n{words[1]}:" in makefile, words


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


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_the_matrix_names_tested_versions_tests_and_differences() -> None:
    """The installed ones, and the older ones of the documented command."""
    page = read(PAGE)
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", read("constraints.txt"), re.MULTILINE))
    (command,) = re.findall(r"pip install --no-deps --target OLD (.*)", read("docs/reference/development.md"))
    older = dict(pin.split("==") for pin in command.split())
    assert [client for client in CLIENTS if pinned[client] not in page] == []
    assert [client for client, version in older.items() if version not in page] == []
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"test_\w+\.py", read(PAGE)))
    assert named
    assert named <= files
    # comfyUI's scheduler and T5 length; the dual attention of sd-scripts.
    (section,) = re.findall(r"^## In ComfyUI\n(.*?)^## ", read("docs/formats/single-file.md"), re.MULTILINE | re.DOTALL)
    lines = section.splitlines()
    assert any("`normal`" in line and "diffusers" in line for line in lines)
    assert any(f"T5 to at least {_COMFY_T5_LENGTH} tokens" in line and str(_T5_LENGTH) in line for line in lines)
    assert any("sd-scripts" in line and "dual attention" in line for line in lines)


@pytest.fixture(scope="module")
def site() -> Any:
    return load_module("docs_site", ROOT / "scripts" / "docs_site.py")


def listed(site: Any, folder: str) -> list[str]:
    """Return the pages of a folder's index in order."""
    pages = [page for section in site.sections(folder) for pages in section.values() for page in pages]
    return [path for page in pages for path in page.values()]


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
