"""The lines of keys in a TOML text, and values that are replaced while everything else stays."""

import tomllib
from itertools import product

import pytest

from sd3_light.config.toml_text import format_toml, line_of, toml_entries, with_value
from sd3_light.recipes import FOLDER
from tests.refusals import refused

TEXT = '''# head
a = 1 # one
b.c = "x # y" # c
"quoted key" = 'it''s'
[model] # m
p = """
[no]
x = 1 \\"""
""" # after
l = [ # in
  1, # c
  "]",
]
[[directory]]
path = 'x'
[[directory]]
path = "y" # second
[directory.z]
q = {r = 1, s = "}"} # inline
'''.replace("'it''s'", "'it'")


def test_every_key_has_its_line_and_its_value() -> None:
    entries = {entry.key: (entry.line, TEXT[entry.start : entry.stop]) for entry in toml_entries(TEXT)}
    assert entries == {
        "a": (2, "1"),
        "b.c": (3, '"x # y"'),
        "quoted key": (4, "'it'"),
        "model": (5, "[model] # m"),
        "model.p": (6, '"""\n[no]\nx = 1 \\"""\n"""'),
        "model.l": (10, '[ # in\n  1, # c\n  "]",\n]'),
        "directory[0]": (14, "[[directory]]"),
        "directory[0].path": (15, "'x'"),
        "directory[1]": (16, "[[directory]]"),
        "directory[1].path": (17, '"y"'),
        "directory[1].z": (18, "[directory.z]"),
        "directory[1].z.q": (19, '{r = 1, s = "}"}'),
    }


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.name)
def test_the_values_of_all_recipes_are_found(path: "object") -> None:
    text = path.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    parts = [text[entry.start : entry.stop] for entry in toml_entries(text) if not entry.is_header]
    values = [tomllib.loads(f"x = {part}")["x"] for part in parts]
    assert all(value in values for value in tomllib.loads(text).values() if not isinstance(value, dict | list))


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("a", 2),
        ("model.p", 6),
        ("model.missing", 5),
        ("model.l[1]", 10),
        ("directory[1].path", 17),
        ("directory[1].missing", 16),
        ("directory", 14),
        ("directory[7].path", 14),
        ("optimizer.lr", 1),
        ("b", 3),
        ("line 7", 7),
        ("file", 1),
    ],
)
def test_a_fault_is_at_its_key_or_its_table(key: str, line: int) -> None:
    assert line_of(key, toml_entries(TEXT)) == line


def test_texts_with_faults_are_read_to_the_end() -> None:
    for parts in product('a="[]\n#\\', repeat=4):
        text = "".join(parts) * 2
        for entry in toml_entries(text):
            assert 0 <= entry.start <= entry.stop <= len(text)


@pytest.mark.parametrize("text", ["x = '" + "a" * 200_000, '"' + "\\" * 200_000, "[" * 200_000, "a.b = [\n" * 20_000])
def test_hostile_texts_take_no_time(text: str) -> None:
    assert len(toml_entries(text)) <= text.count("=") + 1  # one may look like a header


@pytest.mark.parametrize(
    ("key", "value", "before", "after"),
    [
        ("a", "2", "a = 1 # one\n", "a = 2 # one\n"),
        ("b.c", "hello there", '"x # y" # c', '"hello there" # c'),
        ("b.c", 'a "quote"', '"x # y" # c', '"a \\"quote\\"" # c'),
        ("model.l", "[3]", '[ # in\n  1, # c\n  "]",\n]', "[3]"),
        ("model.new", "true", '"]",\n]\n', '"]",\n]\nnew = true\n'),
        ("directory[0].repeats", "2", "path = 'x'\n", "path = 'x'\nrepeats = 2\n"),
        ("directory[1].path", "z", '"y" # second', '"z" # second'),
        ("a", "", "a = 1 # one\n", ""),
    ],
)
def test_one_value_changes_and_all_else_stays(key: str, value: str, before: str, after: str) -> None:
    assert TEXT.count(before) == 1
    assert with_value(TEXT, key, value) == TEXT.replace(before, after)


def test_a_key_of_a_new_table_and_of_an_empty_text() -> None:
    assert with_value(TEXT, "optimizer.lr", "1e-4") == f"{TEXT}\n[optimizer]\nlr = 1e-4\n"
    assert with_value("", "seed", "1") == "seed = 1\n"
    assert with_value("", "optimizer.lr", "1") == "[optimizer]\nlr = 1\n"
    assert with_value("# c\n[model]\n", "seed", "1") == "# c\nseed = 1\n[model]\n"
    assert with_value("a = 1", "b", "2") == "a = 1\nb = 2\n"
    assert with_value("[model]", "model.b", "2") == "[model]\nb = 2\n"
    assert with_value("a = 1\n", "b", "") == "a = 1\n"


@pytest.mark.parametrize(
    ("text", "key", "value", "problem"),
    [
        ("a = 1\n", "a", "[1", "the value is not TOML"),
        ("a = \n", "a", "1", "the text is not TOML"),
        ("a = {b = 1}\n", "a.c", "1", "cannot be set here"),
        ("d = [{p = 1}]\n", "d[0].p", "2", "there is no"),
        ("a = 1\n", "d[0].p", "2", "there is no"),
    ],
)
def test_what_cannot_be_changed_alone_is_refused(text: str, key: str, value: str, problem: str) -> None:
    refused(problem, with_value, text, key, value)


@pytest.mark.parametrize("value", ["a", 'a "b" \\ \n \x7f 中', True, 3, 1e-5, [1, ["x"]], {"a b": {"c": 1}}])
def test_values_are_written_as_toml(value: object) -> None:
    assert tomllib.loads(f"x = {format_toml(value)}") == {"x": value}
