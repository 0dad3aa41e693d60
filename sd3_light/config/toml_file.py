"""Reads a TOML file and applies overrides from the command line. Errors become faults."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sd3_light.config.faults import Fault
from sd3_light.config.schema_train import ALIASES
from sd3_light.inputs import read_limited, require_shallow

SET = "--set"


def read_toml(path: Path, text: str | None = None) -> tuple[dict[str, Any] | None, list[Fault]]:
    """Return the file's content, or None and the fault; ``text`` is taken in place of what the file has."""
    try:
        text = read_limited(path).decode("utf-8-sig") if text is None else text.removeprefix("\ufeff")
    except IsADirectoryError:
        tomls = ", ".join(sorted(file.name for file in path.glob("*.toml"))[:5])
        hint = f"give one of its files: {tomls}" if tomls else "give a TOML file; `sd3-light new` writes one"
        return None, [Fault(str(path), "file", "cannot be read: it is a folder", hint=hint)]
    except OSError as error:
        return None, [Fault(str(path), "file", f"cannot be read: {error.strerror}", hint="check the path")]
    except UnicodeDecodeError as error:
        return None, [Fault(str(path), "file", f"is not UTF-8 text: byte {error.start}", hint="save it as UTF-8")]
    try:
        return _parse(text), []
    except ValueError as error:
        line, problem = _split_error(str(error), text)
        return None, [Fault(str(path), f"line {line}", f"TOML syntax: {problem}")]


def _parse(text: str) -> dict[str, Any]:
    """Parse TOML; a fault of syntax, a number of thousands of digits and very deep nesting are ValueErrors."""
    try:
        parsed = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    require_shallow(parsed)
    return parsed


def _split_error(message: str, text: str) -> tuple[int, str]:
    """Split tomllib's message into the line number and the rest. Python 3.11 has no attribute for the line."""
    match = re.search(r" \(at line (\d+), column \d+\)$", message)
    line = int(match[1]) if match else text.count("\n") + 1
    return line, re.sub(r" \(at [^)]*\)$", "", message)


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> tuple[set[str], list[Fault]]:
    """Apply `key.path=VALUE` strings to `raw`. Returns the keys that were set and the faults of invalid overrides."""
    keys: set[str] = set()
    faults = []
    for override in overrides:
        key, equals, value_text = override.partition("=")
        key = ALIASES.get(key.strip(), key.strip())
        problem = (
            None if equals and re.fullmatch(r"[\w\-]+(\.[\w\-]+)*", key) else "does not have the form key.path=VALUE"
        )
        value, value_problem = parse_value(value_text.strip())
        new_key = _first_new_key(raw, key.split("."))
        problem = problem or value_problem or _set(raw, key.split("."), value)
        if problem is None:
            keys.add(new_key)
        else:
            hint = "for example --set optimizer.lr=2e-4"
            faults.append(Fault(SET, key.partition(" ")[0] or override, problem, hint=hint))
    return keys, faults


def parse_value(text: str) -> tuple[Any, str | None]:
    """Parse a TOML value; a bare word is a string. Returns the value and the problem, if any."""
    try:
        parsed = _parse(f"value = {text}")
    except ValueError as error:
        if text[:1] in ("[", "{", '"', "'") or not isinstance(error, tomllib.TOMLDecodeError):
            return None, f"the value is not TOML: {_split_error(str(error), text)[1]}"
        return text, None
    return (parsed["value"], None) if set(parsed) == {"value"} else (text, None)


def _first_new_key(raw: Any, path: list[str]) -> str:
    """Return the shortest prefix of a key path that the file does not have: the part that the override adds."""
    for depth, name in enumerate(path, start=1):
        if not isinstance(raw, dict) or name not in raw:
            return ".".join(path[:depth])
        raw = raw[name]
    return ".".join(path)


def _set(raw: dict[str, Any], path: list[str], value: Any) -> str | None:
    for depth, name in enumerate(path[:-1]):
        inner = raw.setdefault(name, {})
        if not isinstance(inner, dict):
            note = " (keys of the dataset TOML cannot be set here)" if path[0] == "dataset" else ""
            return f"{'.'.join(path[: depth + 1])} is not a table{note}"
        raw = inner
    raw[path[-1]] = value
    return None
