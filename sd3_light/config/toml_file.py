"""Reading a TOML file, with faults in place of exceptions; overrides from the command line."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sd3_light.config.faults import Fault
from sd3_light.config.schema_train import ALIASES

SET = "--set"


def read_toml(path: Path) -> tuple[dict[str, Any] | None, list[Fault]]:
    """The file's tables, or None and the fault."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        return None, [Fault(str(path), "file", f"cannot be read: {error.strerror}", hint="check the path")]
    except UnicodeDecodeError as error:
        return None, [Fault(str(path), "file", f"is not UTF-8 text: byte {error.start}", hint="save it as UTF-8")]
    try:
        return tomllib.loads(text), []
    except tomllib.TOMLDecodeError as error:
        line, problem = _line(str(error), text)
        return None, [Fault(str(path), f"line {line}", f"TOML syntax: {problem}")]


def _line(message: str, text: str) -> tuple[int, str]:
    """(line, message without its place); tomllib gives the place in words only."""
    found = re.search(r" \(at line (\d+), column \d+\)$", message)
    line = int(found[1]) if found else text.count("\n") + 1
    return line, re.sub(r" \(at [^)]*\)$", "", message)


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> tuple[set[str], list[Fault]]:
    """Set `key.path=VALUE` in `raw`; the keys that were set, and the faults of overrides that cannot be."""
    keys: set[str] = set()
    faults = []
    for text in overrides:
        key, equals, value_text = text.partition("=")
        key = ALIASES.get(key.strip(), key.strip())
        problem = None if equals and re.fullmatch(r"[\w\-]+(\.[\w\-]+)*", key) else "is not of the form key.path=VALUE"
        value, value_problem = _value(value_text.strip())
        new = _first_new(raw, key.split("."))
        problem = problem or value_problem or _set(raw, key.split("."), value)
        if problem is None:
            keys.add(new)
        else:
            faults.append(
                Fault(SET, key.partition(" ")[0] or text, problem, hint="for example --set optimizer.lr=2e-4")
            )
    return keys, faults


def _value(text: str) -> tuple[Any, str | None]:
    """A TOML value; a bare word is a text."""
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            return None, f"the value is not TOML: {_line(str(error), text)[1]}"
        return text, None
    return (found["value"], None) if set(found) == {"value"} else (text, None)


def _first_new(raw: Any, path: list[str]) -> str:
    """The shortest part of a key path that the file does not have: what the command line answers for."""
    for depth, name in enumerate(path, start=1):
        if not isinstance(raw, dict) or name not in raw:
            return ".".join(path[:depth])
        raw = raw[name]
    return ".".join(path)


def _set(raw: dict[str, Any], path: list[str], value: Any) -> str | None:
    for depth, name in enumerate(path[:-1]):
        inner = raw.setdefault(name, {})
        if not isinstance(inner, dict):
            file = " (keys of the dataset TOML are not set here)" if path[0] == "dataset" else ""
            return f"{'.'.join(path[: depth + 1])} is not a table{file}"
        raw = inner
    raw[path[-1]] = value
    return None
