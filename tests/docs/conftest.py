"""Parsing of the Markdown pages for the tests of the docs."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = "<!-- run -->"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and whether it is marked to be run."""

    language: str
    text: str
    run: bool


class Page:
    """A Markdown file, split into fenced blocks and prose."""

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
        assert inside is None, f"{self.path}: unclosed fence"

    @property
    def headings(self) -> list[tuple[int, str]]:
        """(level, text) in order."""
        matches = (re.match(r"(#+) (.*)", line) for line in self.prose)
        return [(len(match[1]), match[2].strip()) for match in matches if match]

    @property
    def anchors(self) -> set[str]:
        """The anchors that GitHub creates for the headings."""
        return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for _, text in self.headings}

    @property
    def links(self) -> list[str]:
        """Targets of links and images, without those in code spans."""
        text = re.sub(r"`[^`]*`", "", "\n".join(self.prose))
        return re.findall(r"\]\(([^)\s]+)\)", text)

    @property
    def to_run(self) -> list[str]:
        """The bash blocks that are marked to be run."""
        return [block.text for block in self.blocks if block.run and block.language == "bash"]


@pytest.fixture(scope="session")
def page() -> Callable[[str], Page]:
    """Return a function that reads a page by its path in the repository."""
    return lambda name: Page(ROOT / name)
