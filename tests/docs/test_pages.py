"""Every page: links resolve, commands exist, translations have the same sections and code."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from sd3_light import cli
from sd3_light.cli.train_py import _flags

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
