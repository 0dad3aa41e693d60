"""Markdown as the tests of the docs read it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUN = "<!-- run -->"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and whether the line before it asks for it to be run."""

    language: str
    text: str
    run: bool


class Page:
    """A Markdown file, its fenced blocks apart from the rest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks: list[Block] = []
        self.prose: list[str] = []
        self._read(path.read_text(encoding="utf-8").splitlines())

    def _read(self, lines: list[str]) -> None:
        inside: list[str] | None = None
        language, before = "", ""
        for line in lines:
            fence = line.lstrip().startswith("```")
            if inside is None and fence:
                inside, language = [], line.strip().removeprefix("```")
            elif inside is None:
                self.prose.append(line)
                before = line.strip()
            elif fence:
                self.blocks.append(Block(language, "\n".join(inside), before == RUN))
                inside, before = None, ""
            else:
                inside.append(line)
        assert inside is None, f"{self.path}: a fence is not closed"

    @property
    def headings(self) -> list[tuple[int, str]]:
        """(level, text) in order."""
        found = (re.match(r"(#+) (.*)", line) for line in self.prose)
        return [(len(match[1]), match[2].strip()) for match in found if match]

    @property
    def anchors(self) -> set[str]:
        """What a link may name after `#`, as GitHub makes it of headings."""
        return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for _, text in self.headings}

    @property
    def links(self) -> list[str]:
        """Targets of links and pictures, code spans left out."""
        text = re.sub(r"`[^`]*`", "", "\n".join(self.prose))
        return re.findall(r"\]\(([^)\s]+)\)", text)

    @property
    def to_run(self) -> list[str]:
        """The bash blocks that ask to be run."""
        return [block.text for block in self.blocks if block.run and block.language == "bash"]


@pytest.fixture(scope="session")
def page() -> Any:
    """Name below the repository -> its page; a page that is not there skips by name."""

    def read(name: str) -> Page:
        if not (ROOT / name).is_file():
            pytest.skip(f"{name} is not written yet")
        return Page(ROOT / name)

    return read
