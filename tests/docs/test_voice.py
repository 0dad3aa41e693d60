"""Code, messages and docs avoid the words that the project has retired; see the Voice section of CONTRIBUTING.md."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("sd3_light", "tests", "benchmarks", "examples", "scripts", "docs")
SUFFIXES = {".py", ".md", ".toml", ".html", ".css", ".js"}

RETIRED = {
    r"foretells?|foretold": "estimate, predict",
    r"anew": "again, rebuilt",
    r"mend(s|ed|ing)?": "fix",
    r"nobody|whoever": "no process, the caller",
    r"(can ?not |can |to )?be had": "be available",
    r"(go|goes|going|went|gone) on( from)?": "continue, resume",
    r"hung(er|ry)|patience": "data starvation, timeout",
    r"wish(es|ed)?": "request, option, setting",
    r"blames?": "user error",
    r"learner|dut(y|ies)": "train state, hook",
    r"so many": "that many",
    r"otherwise than": "differently from",
    r"our (own )?fault": "a bug in sd3-light",
    r"(is|are|was) (told|said)": "is documented, is reported",
    r"tells of": "describes",
    r"(?<!there )is no(?= [a-z])": "is not a",
    r"by hand": "manually, custom",
    r"of (its|their|one's|our) own": "custom, separate",
    r"(images|samples|steps|tokens|words|captions|batches|bytes|rows|shards|files|lines) an? (second|step|epoch|sample"
    r"|image|caption|GPU|process|rank|worker|shard|batch|file|machine|row|line)": "per",
    r"pictures?": "image",
}
"""Patterns of whole words, in prose and in identifiers, and what to write instead."""

ALLOWED: tuple[tuple[str, str], ...] = (
    # public names, flags, stream purposes and JSON keys that stay as they are
    (r".*", r"ClassPictures|--pictures|picture_max|picture_sha|[\"`]pictures[\"`]|world-picture|vae-picture"),
    (r"README.*|.*ui\.md", "</?picture>"),  # the tag
    (r".*", r"counts\['pictures'\]|_purpose\(\"picture\""),
    (r"tests/unit/families/sd3/.*", "one word and then so many others"),  # a long caption
)
"""(file, line) patterns where a retired word is the right one."""


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path != Path(__file__) and "zh" not in path.parts:
                yield path
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "train.py"))


def words(line: str) -> str:
    """Return the line with identifiers split into words, in lower case."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", line).lower()


def is_allowed(path: Path, line: str) -> bool:
    name = str(path.relative_to(ROOT))
    return any(re.fullmatch(file, name) and re.search(text, line) for file, text in ALLOWED)


def word(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"\b({pattern.lower()})\b")


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, str]]:
    """(location and text, words) of every line with a retired word that is not allowed there."""
    any_word = word("|".join(RETIRED))
    return [
        (f"{path.relative_to(ROOT)}:{number}: {line.strip()}", words(line))
        for path in sources()
        if any_word.search(words(text := path.read_text(encoding="utf-8")))
        for number, line in enumerate(text.splitlines(), 1)
        if any_word.search(words(line)) and not is_allowed(path, line)
    ]


@pytest.mark.parametrize("pattern", RETIRED)
def test_retired_words_do_not_return(lines: list[tuple[str, str]], pattern: str) -> None:
    assert [line for line, text in lines if word(pattern).search(text)] == [], f"write {RETIRED[pattern]!r} instead"


def test_identifiers_are_split_into_words() -> None:
    assert words("def _look_at_Wishes(pictureFolder)") == "def  look at wishes(picture folder)"
