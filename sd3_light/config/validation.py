"""From pydantic's errors to faults in plain words: where, what was given, what is allowed, what was meant."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sd3_light.config.base import Table, annotations, choices, element, table_of, tables, without_secrets, words
from sd3_light.config.faults import Fault
from sd3_light.config.schema_dataset import DatasetFile
from sd3_light.config.schema_train import ALIASES, TrainConfig

LIST_TABLES = ("directory", "ema.track")
KINDS: dict[str, type[Table]] = {"train": TrainConfig, "dataset": DatasetFile}
_SECRET_WORDS = {"key", "apikey", "token", "secret", "password", "passwd", "credential", "credentials"}


def looks_secret(key: str) -> bool:
    """Whether a key's name says that its value is a secret."""
    return bool(_SECRET_WORDS & set(key.lower().replace("-", "_").split("_")))


def show(value: Any, key: str = "", longest: int = 80) -> str:
    """A value as it stands in the TOML, cut to a readable length, secrets hidden."""
    text = "(hidden)" if looks_secret(key) else _plain(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _plain(value: Any) -> str:
    if isinstance(value, str | bool):
        return without_secrets(json.dumps(value, ensure_ascii=False))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {show(item, key)}" for key, item in value.items()) + "}"
    return str(value)


@dataclass(frozen=True)
class Checked:
    """What is left of a table when its faulty keys are taken out, the faults, and the keys that had them."""

    raw: dict[str, Any]
    faults: tuple[Fault, ...]
    bad: frozenset[str]


@dataclass(frozen=True)
class _Place:
    """Where an error is: the printed key, the type there, the table it is in, and the path to take out."""

    key: str
    annotation: Any
    table: str
    cut: tuple[str, ...]


def check_table(
    schema: type[Table], raw: Mapping[str, Any], *, kind: str, file: str, base: Path, prefix: str = "", table: str = ""
) -> Checked:
    """Validate a raw table; never raises. What comes back in `raw` validates but for required keys that are missing."""
    left = copy.deepcopy(dict(raw))
    faults: dict[str, Fault] = {}
    bad: set[str] = set()
    for error in _errors(schema, left, base):
        place = _locate(schema, error["loc"], table)
        fault = _fault(error, place, kind, file, prefix)
        faults.setdefault(fault.key, fault)
        bad.add(".".join(place.cut))
        _cut(left, place.cut)
    return Checked(left, tuple(faults.values()), frozenset(bad))


def _errors(schema: type[Table], raw: dict[str, Any], base: Path) -> Iterator[ErrorDetails]:
    try:
        schema.model_validate(raw, context={"base": base})
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            if detail["type"] != "default_factory_not_called":  # a default that waits for a faulty key
                yield detail


def _locate(schema: type[Table], loc: Sequence[int | str], table: str) -> _Place:
    inside: type[Table] | None = schema
    annotation: Any = None
    key, cut, frozen = "", [], False
    for part in loc:
        if isinstance(part, int):
            key, frozen = f"{key}[{part}]", True
            annotation = element(annotation, part)
        elif inside is None:
            break  # pydantic's own label inside a union: no key of the file
        else:
            key = f"{key}.{part}" if key else part
            annotation = annotations(inside).get(part)
            if not frozen:
                cut.append(part)
        inside = table_of(annotation)
    names = [part for part in loc if isinstance(part, str)]
    return _Place(key, annotation, ".".join([table, *names[:-1]] if table else names[:-1]), tuple(cut))


def _cut(raw: dict[str, Any], path: tuple[str, ...]) -> None:
    *parents, last = path
    for parent in parents:
        raw = raw.get(parent, {})
    raw.pop(last, None)


def _fault(error: ErrorDetails, place: _Place, kind: str, file: str, prefix: str) -> Fault:
    key, name = prefix + place.key, place.key.rpartition(".")[2]
    if error["type"] == "extra_forbidden":
        return Fault(
            file, key, "unknown key", given=show(error["input"], name), hint=nearest_key(kind, place.table, name)
        )
    allowed = words(place.annotation)
    if error["type"] == "missing":
        return Fault(file, key, "is required and missing", allowed=allowed)
    if error["type"] == "plain_words" and table_of(place.annotation):
        return Fault(file, key, error["msg"], given=show(error["input"], name))
    hint = _value_hint(error["input"], place.annotation)
    return Fault(file, key, _problem(error), given=show(error["input"], name), allowed=allowed, hint=hint)


def _problem(error: ErrorDetails) -> str:
    kind = error["type"]
    if kind == "plain_words":
        return error["msg"]
    if kind == "literal_error":
        return "not a known value"
    if kind.startswith(("greater_than", "less_than", "too_short", "too_long")):
        return "out of range"
    if kind == "finite_number":
        return "must be finite"
    return "wrong type"


def _value_hint(given: Any, annotation: Any) -> str | None:
    if not isinstance(given, str):
        return None
    if known := choices(annotation):
        if given in known:
            return "write it without quotes"
        close = get_close_matches(given.lower(), known, 1)
        return f'did you mean "{close[0]}"?' if close else None
    allowed = words(annotation)
    unquoted = given.lower() in ("true", "false") if allowed == "true or false" else _is_number(given)
    return "write it without quotes" if unquoted and ("number" in allowed or allowed == "true or false") else None


def _is_number(text: str) -> bool:
    return text.strip().lstrip("+-").replace(".", "", 1).replace("e-", "", 1).isdigit()


def nearest_key(kind: str, table: str, name: str) -> str | None:
    """What the writer of an unknown key may have meant: its own table first, then the others, then the other file."""
    index = [(file, where, key) for file in sorted(KINDS, key=lambda file: file != kind) for where, key in _keys(file)]
    for file, where, key in index:
        if key == name:
            return f"`{key}` belongs {_home(kind, file, where)}"
    for scope in ([row for row in index if row[:2] == (kind, table)], [row for row in index if row[0] == kind]):
        close = get_close_matches(name, [key for *_, key in scope], 1, cutoff=0.7)
        if close:
            file, where, key = next(row for row in scope if row[2] == close[0])
            return f"did you mean `{key}`{'' if where == table else ' ' + _home(kind, file, where)}?"
    return None


def _keys(kind: str) -> Iterator[tuple[str, str]]:
    for where, table in tables(KINDS[kind]):
        yield from ((where, key) for key in table.model_fields)
    if kind == "train":
        yield from (("", alias) for alias in ALIASES)


def _home(kind: str, file: str, where: str) -> str:
    brackets = f"[[{where}]]" if where in LIST_TABLES else f"[{where}]"
    table = f"in {brackets}" if where else "at the top level, above the first [table]"
    return table if file == kind else f"in the {file} TOML"
