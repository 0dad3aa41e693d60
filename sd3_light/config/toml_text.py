"""The text of a TOML file: the lines of its keys, and values that are replaced while comments stay."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.config.schema_train import ALIASES
from sd3_light.config.toml_file import parse_value

_PART = re.compile(r"[ \t]*(?:([A-Za-z0-9_-]+)|\"((?:[^\"\\\n]|\\.)*)\"|'([^'\n]*)')[ \t]*(\.?)")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_EQUALS = re.compile(r"=[ \t]*")
_TOKEN = re.compile(
    r"""
    # strings of several lines, of which up to two quotes belong to the text; possessive, so that nothing is remembered
    \"{3} (?:[^"\\]++|\\.?|"{1,2}(?!"))*+ (?:"{3,5}|\Z)
    | '{3} .*? (?:'{3,5}|\Z)
    | " (?:[^"\\\n]|\\[^\n])* "?
    | ' [^'\n]* '?
    | \#[^\n]*
    | [^"'#\[\]{}\s]+
    | .
    """,
    re.DOTALL | re.VERBOSE,
)
_OPENING = "[{"
_CLOSING = "]}"


@dataclass(frozen=True)
class TomlEntry:
    """A key or a table's header: its whole key as faults print it, its line from 1, and where its text is.

    ``start`` to ``stop`` are the value, of a header its line.
    """

    key: str
    line: int
    start: int
    stop: int
    is_header: bool = False


def toml_entries(text: str) -> list[TomlEntry]:
    """Return the keys and headers of a TOML text in order. A text with faults of syntax gives what can be read."""
    return list(_entries(text))


def _entries(text: str) -> Iterator[TomlEntry]:
    counts: dict[str, int] = {}
    prefix = ""
    position = 0
    line = 1
    while position < len(text):
        end = _line_end(text, position)
        stripped = text[position:end].lstrip()
        if stripped.startswith("["):
            prefix = _header(stripped, counts)
            yield TomlEntry(prefix, line, position, end, is_header=True)
        elif stripped and not stripped.startswith("#"):
            parts, after = _key(text, position)
            equals = _EQUALS.match(text, after)
            if parts and equals:
                stop = _value_end(text, equals.end())
                yield TomlEntry(".".join(filter(None, (prefix, *parts))), line, equals.end(), stop)
                end = _line_end(text, stop)
        line += text.count("\n", position, end + 1)
        position = end + 1


def _line_end(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end


def _key(text: str, position: int) -> tuple[list[str], int]:
    """Return the parts of a dotted key and where it ends."""
    parts = []
    while match := _PART.match(text, position):
        parts.append(next(group for group in match.groups()[:3] if group is not None))
        position = match.end()
        if not match[4]:
            break
    return parts, position


def _header(line: str, counts: dict[str, int]) -> str:
    """Return the table of a header; the tables of a list are numbered in ``counts``."""
    is_list = line.startswith("[[")
    parts, _ = _key(line, 2 if is_list else 1)
    name = ""
    for index, part in enumerate(parts):
        name = f"{name}.{part}" if name else part
        if is_list and index == len(parts) - 1:
            counts[name] = counts.get(name, -1) + 1
        if name in counts:
            name = f"{name}[{counts[name]}]"
    return name


def _value_end(text: str, position: int) -> int:
    """Return where a value ends: at the end of its line, without a comment, but after what it has opened."""
    depth = 0
    last = position
    for match in _TOKEN.finditer(text, position):
        token = match[0]
        if token == "\n" and not depth:
            break
        depth += (token in _OPENING) - (token in _CLOSING)
        if token[0] != "#" and not token.isspace():
            last = match.end()
    return last


def line_of(key: str, entries: Sequence[TomlEntry]) -> int:
    """Return the line of a fault's key, of its table if it is missing, or 1. A key of syntax names its line."""
    if match := re.fullmatch(r"line (\d+)", key):
        return int(match[1])
    lines = {entry.key: entry.line for entry in reversed(entries)}
    spellings = {long: short for short, long in ALIASES.items()}
    name = key
    while name:
        for candidate in (name, spellings.get(name, name)):
            if candidate in lines:
                return lines[candidate]
        inner = [entry.line for entry in entries if entry.key.startswith((f"{name}.", f"{name}["))]
        if inner:
            return min(inner)
        name = re.sub(r"(\[\d+\]|(^|\.)[^.\[]*)$", "", name)
    return 1


def with_value(text: str, key: str, value: str) -> str:
    """Return the text with another value of a key, as `--set` takes it; "" removes the key. All else stays as it is.

    Raises UserError for a value that is not TOML, and for a key that cannot be changed on its own.
    """
    entries = toml_entries(text)
    entry = next((entry for entry in entries if entry.key == key and not entry.is_header), None)
    if not value.strip():
        changed = text if entry is None else _without(text, entry)
        return _require_change(text, changed, key, None)
    parsed, problem = parse_value(value.strip())
    if problem is not None:
        raise UserError(f"{key}: {problem}")
    written = format_toml(parsed) if isinstance(parsed, str) else value.strip()
    changed = _added(text, entries, key, written) if entry is None else _replaced(text, entry, written)
    return _require_change(text, changed, key, parsed)


def format_toml(value: Any) -> str:
    """Return a value in one line of TOML."""
    if isinstance(value, str):
        # the escapes of JSON are TOML's, except for the delete character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(format_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_name(name)} = {format_toml(item)}" for name, item in value.items()) + "}"
    return str(value)


def _name(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _replaced(text: str, entry: TomlEntry, written: str) -> str:
    return text[: entry.start] + written + text[entry.stop :]


def _without(text: str, entry: TomlEntry) -> str:
    """Return the text without the lines of a key."""
    begin = text.rfind("\n", 0, entry.start) + 1
    return text[:begin] + text[_line_end(text, entry.stop) + 1 :]


def _added(text: str, entries: Sequence[TomlEntry], key: str, written: str) -> str:
    """Return the text with a new key at the end of its table, which is added if it is missing."""
    table, _, name = key.rpartition(".")
    line = f"{name} = {written}\n"
    own = [entry for entry in entries if entry.key == table and entry.is_header]
    own += [entry for entry in entries if not entry.is_header and entry.key.rpartition(".")[0] == table]
    if own:
        end = _line_end(text, max(entry.stop for entry in own))
        break_line = "" if text[end : end + 1] == "\n" else "\n"
        return text[:end] + break_line + text[end : end + 1] + line + text[end + 1 :]
    if table.endswith("]"):
        raise UserError(f"there is no [[{table.rpartition('[')[0]}]] of this number; add it in the text")
    if table:
        return f"{text.rstrip()}\n\n[{table}]\n{line}".lstrip("\n")
    first = next((entry.start for entry in entries if entry.is_header), len(text))
    return text[:first] + ("" if not text[:first] or text[:first].endswith("\n") else "\n") + line + text[first:]


def _require_change(before: str, after: str, key: str, value: Any) -> str:
    """Return the new text if it differs from the old one in this key alone."""
    try:
        expected = tomllib.loads(before)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{key}: the text is not TOML ({str(error)[:200]}); fix it first") from error
    try:
        _put(expected, key, value)
        is_expected = _without_empty(expected) == _without_empty(tomllib.loads(after))
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise UserError(f"{key} cannot be set here; change it in the text") from error
    if not is_expected:
        raise UserError(f"{key} cannot be set here; change it in the text")
    return after


def _put(table: Any, key: str, value: Any) -> None:
    *parents, last = [part for part in re.split(r"\.|(?=\[\d+\])", key) if part]
    for part in parents:
        table = table[int(part[1:-1])] if part[0] == "[" else table.setdefault(part, {})
    if value is None:
        table.pop(last, None)
    else:
        table[last] = value


def _without_empty(value: Any) -> Any:
    if isinstance(value, Mapping):
        inner = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item != {}}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value
