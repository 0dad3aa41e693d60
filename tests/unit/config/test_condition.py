"""The expressions of `where`: what they mean, and errors that name the position."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sd3_light.config import DirectoryConfig
from sd3_light.config.condition import BOOLEAN, BUILT_IN, NUMBER, TEXT, WIDTH, ConditionError, parse_condition

VALUES = {"a": 6.0, "b": 3, "label": "cat", "ok": True, "odd name": 1, "width": -1, WIDTH: 640, BUILT_IN["height"]: 480}
TRUE = [
    "",
    "a > 5.5",
    "a > 5.5 and width >= 512",
    "not a < 5.5",
    "2 <= b < 4",
    "a == 6 and b != 2",
    "a < b or ok",
    "ok == true and not ok == False",
    "label == 'cat'",
    "label in ['dog', \"cat\"] and b not in (1, -2)",
    "'ca' in label and 'dog' not in label",
    "label < 'dog'",
    "width / height > 1.3 and width * height >= 512 * 512",
    "-b + 4 == +1",
    "missing is None and a is not None",
    "missing is null or missing > 3",
    "missing > 3 or a > 5",
    'column["odd name"] == 1 and column["width"] == -1 and width == 640',
    "a > 5.5  # a comment\n  and b == 3",
]
FALSE = [
    "a > 6",
    "1 < b < 3",
    "missing > 3",
    "not missing > 3",
    "not (missing > 3 and a > 5)",
    "missing == 3",
    "missing != 3",
    "missing in [3]",
    "missing not in [3]",
    "missing + a > 0",
    "2 < missing < 3",
    "absent",
    "not absent",
    "a / (b - 3) > 0",
    "a > 5.5  # a comment\n  and b == 4",
]


@pytest.mark.parametrize("text", TRUE)
def test_a_sample_matches(text: str) -> None:
    assert parse_condition(text).matches(VALUES)


@pytest.mark.parametrize("text", FALSE)
def test_a_sample_does_not_match(text: str) -> None:
    assert not parse_condition(text).matches(VALUES)


@pytest.mark.parametrize("text", ["a / 2 > 1", "a * 1.5 > 1", "a + 0.5 > 1", "a / 2 < 1"])
def test_a_number_beyond_all_others_is_unknown(text: str) -> None:
    """A caption file may contain an integer of 400 digits, which no float holds."""
    assert not parse_condition(text).matches({"a": 10**400})
    assert parse_condition("a > 1").matches({"a": 10**400})


@pytest.mark.parametrize("text", ["x > 3", "not x > 3", "x == 'a'", "x", "not x", "x in [1]", "not 'a' in x"])
def test_null_does_not_match(text: str) -> None:
    assert not parse_condition(text).matches({"x": None})


def test_nested_chains_evaluate_each_part_once() -> None:
    text = "a == 6"
    for _ in range(45):
        text = f"ok == ({text}) == ok"
    assert parse_condition(text).matches(VALUES)


def test_types_and_terms_of_a_condition() -> None:
    condition = parse_condition("a > 1 and b == 'x' and c and d < e and f is None and g < h and h == '1'")
    kinds = {"a": NUMBER, "b": TEXT, "c": BOOLEAN, "d": NUMBER, "e": NUMBER, "f": None, "g": TEXT, "h": TEXT}
    assert condition.kinds == kinds
    first, rest = parse_condition("a > 1 and (b > 2 and (width > 5 or a > 9))").split([WIDTH])
    assert first.keys == {"a", "b"}
    assert rest.keys == {WIDTH, "a"}
    assert first.matches({"a": 2, "b": 3})
    assert not rest.matches({"a": 2, WIDTH: 5})


ERRORS = {
    "a > ": "invalid syntax at the end",
    "a = 5": "invalid syntax",
    "a > 1 AND b > 2": "at character 7",
    "a > 5, width > 100": r"`a > 5, width > 100` is not supported.*at character 1\)",
    "美学 > 5, width > 100": r"`美学 > 5, width > 100` is not supported.*at character 1\)",
    "é > 5,\n美学 > 100": r"`é > 5,` is not supported.*at line 1, character 1\)",
    "\rwidth": r"`width` is a number.*at line 2, character 1\)",
    "a > 1 and\r\nwidth": r"`width` is a number.*at line 2, character 1\)",
    "a > 1 and\nb >> 2 > 0": "`b >> 2` is not supported.*at line 2, character 1",
    "len(label) > 3": r"`len\(label\)` is not supported.*at character 1",
    "a > 1 and __import__('os').system('true')": "is not supported.*at character 11",
    "a.b > 1": "`a.b` is not supported",
    "a[0] > 1": r'write column\["name"\]',
    "(lambda: 1)": "is not supported",
    "[x for x in y]": "is not supported",
    "f'{a}' == 'b'": "is not supported",
    "(a := 3) > 2": "is not supported",
    "a ** 9 > 1": "is not supported",
    "a > 'high' and a > 3": r"`3` is a number, and a text is needed there \(at character 20\)",
    "width > 'wide'": r"`'wide'` is a text, and a number is needed there \(at character 9\)",
    "a + 1": "`a . 1` is a number, and a boolean is needed",
    "'文字' == label and width": r"`width` is a number.*at character 19",
    "ok and ok > false": "orders booleans",
    "a == None": "`is None` finds missing values",
    "a is 3": "works only with None",
    "1 < a in [2]": "chains",
    "a in [b]": "is not a constant",
    "a in []": "empty list",
    "a in [1, 'x']": "is a text, and a number is needed",
    "a > 1j": "is not a number",
    "a > b'x'": "is not a number",
    "a > 1, b > 2": "is not supported",
    "not " * 60 + "a": "nested deeper",
    "a" * 5000: "longer than",
    "(" * 3000 + "a": "too many nested",
    "a" + " < a" * 900 + "\0": "null bytes",
}


@pytest.mark.parametrize("text", ERRORS, ids=lambda text: text[:30])
def test_errors_name_the_part_and_its_position(text: str) -> None:
    with pytest.raises(ConditionError, match=ERRORS[text]) as caught:
        parse_condition(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("value", "problem"), [("len(a) > 3", "at character 1"), (3, "string")])
def test_the_config_reports_an_invalid_condition(value: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        DirectoryConfig(path=Path("set"), resolutions=[64], where=value)
