"""Validates tables and turns pydantic's errors into faults: location, value, what is allowed, and a suggestion."""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sd3_light.config.base import (
    Table,
    describe_type,
    element_type,
    field_types,
    known_values,
    table_type,
    walk_tables,
    without_secrets,
)
from sd3_light.config.faults import MOST_SHOWN, Fault
from sd3_light.config.schema_dataset import DatasetFile
from sd3_light.config.schema_train import ALIASES, TrainConfig

LIST_TABLES = ("directory", "ema.track", "sampling.image")
SCHEMAS: dict[str, type[Table]] = {"train": TrainConfig, "dataset": DatasetFile}
"""Schema by kind of file."""
SYNONYMS = {
    "learning_rate": "lr",
    "batch_size": "micro_batch_size_per_gpu",
    "train_batch_size": "micro_batch_size_per_gpu",
    "max_train_steps": "max_steps",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "lr_warmup_steps": "warmup_steps",
    "gradient_checkpointing": "activation_checkpointing",
    "mixed_precision": "transformer_dtype",
    "num_workers": "num_dataloader_workers",
    "lora_rank": "rank",
    "network_dim": "rank",
    "lora_alpha": "alpha",
    "network_alpha": "alpha",
    "checkpointing_steps": "checkpoint_every_n_steps",
    "image_dir": "path",
}
"""Names that other trainers give to our keys."""
_SECRET_WORDS = {"key", "apikey", "token", "secret", "password", "passwd", "credential", "credentials"}


def is_secret_key(key: str) -> bool:
    """Return whether a key's name suggests that its value is a secret."""
    return bool(_SECRET_WORDS & set(key.lower().replace("-", "_").split("_")))


def _resembles_secret(key: str) -> bool:
    """Return whether a key may be a mistyped name of a secret: `wandb_api_kye`, `hftoken`."""
    words = re.split(r"[^a-z]+", key.lower())
    return any(get_close_matches(word, _SECRET_WORDS, 1, 0.6) for word in words) or any(
        secret in key.lower() for secret in _SECRET_WORDS
    )


def format_value(value: Any, key: str = "", max_length: int = 80, known_key: bool = True) -> str:
    """Format a value as TOML writes it, shortened to ``max_length``, with secrets hidden."""
    is_hidden = is_secret_key(key) if known_key else _resembles_secret(key)
    text = "(hidden)" if is_hidden else _format(value)
    return text if len(text) <= max_length else text[: max_length - 3] + "..."


def _format(value: Any) -> str:
    if isinstance(value, str | bool):
        return without_secrets(json.dumps(value, ensure_ascii=False))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_format(item) for item in value) + "]"
    if isinstance(value, dict):
        items = (f"{key} = {format_value(item, key, known_key=False)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    return str(value)


@dataclass(frozen=True)
class CheckedTable:
    """A table without its faulty keys, its faults, and the names of the faulty keys."""

    raw: dict[str, Any]
    faults: tuple[Fault, ...]
    faulty_keys: frozenset[str]


@dataclass(frozen=True)
class _ErrorLocation:
    """The printed key of an error, the type there, the table it is in, and the path to remove."""

    key: str
    annotation: Any
    table: str
    path: tuple[str, ...]


def check_table(
    schema: type[Table],
    raw: Mapping[str, Any],
    *,
    file_kind: str | None,
    file: str,
    base: Path,
    prefix: str = "",
    table: str = "",
) -> CheckedTable:
    """Validate a raw table without raising. The returned `raw` is valid except for missing required keys.

    Only the first `MOST_SHOWN` faults have values and suggestions, which take time; none if `file_kind` is None.
    """
    valid = copy.deepcopy(dict(raw))
    faults: dict[str, Fault] = {}
    faulty_keys: set[str] = set()
    for error in _errors(schema, valid, base):
        location = _locate(schema, error["loc"], table)
        if file_kind is not None and len(faults) < MOST_SHOWN:
            fault = _fault(error, location, file_kind, file, prefix)
        else:
            fault = Fault(file, prefix + location.key, _problem(error))
        faults.setdefault(fault.key, fault)
        faulty_keys.add(".".join(location.path))
        _remove(valid, location.path)
    return CheckedTable(valid, tuple(faults.values()), frozenset(faulty_keys))


def _errors(schema: type[Table], raw: dict[str, Any], base: Path) -> Iterator[ErrorDetails]:
    try:
        schema.model_validate(raw, context={"base": base})
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            if detail["type"] != "default_factory_not_called":  # a default that depends on a faulty key
                yield detail


def _locate(schema: type[Table], loc: Sequence[int | str], table: str) -> _ErrorLocation:
    current: type[Table] | None = schema
    annotation: Any = None
    key = ""
    path = []
    in_list = False
    for part in loc:
        if isinstance(part, int):
            key = f"{key}[{part}]"
            in_list = True
            annotation = element_type(annotation, part)
        elif current is None:
            break  # pydantic's label inside a union, not a key of the file
        else:
            key = f"{key}.{part}" if key else part
            annotation = field_types(current).get(part)
            if not in_list:
                path.append(part)
        current = table_type(annotation)
    names = [part for part in loc if isinstance(part, str)]
    return _ErrorLocation(key, annotation, ".".join([table, *names[:-1]] if table else names[:-1]), tuple(path))


def _remove(raw: dict[str, Any], path: tuple[str, ...]) -> None:
    *parents, last = path
    for parent in parents:
        raw = raw.get(parent, {})
    raw.pop(last, None)


def _fault(error: ErrorDetails, location: _ErrorLocation, file_kind: str, file: str, prefix: str) -> Fault:
    key = prefix + location.key
    name = location.key.rpartition(".")[2]
    is_unknown = error["type"] == "extra_forbidden"
    value = format_value(error["input"], name, known_key=not is_unknown)
    if is_unknown:
        return Fault(file, key, "unknown key", value=value, hint=suggest_key(file_kind, location.table, name))
    allowed = describe_type(location.annotation)
    if error["type"] == "missing":
        return Fault(file, key, "is required and missing", allowed=allowed)
    if error["type"] == "message" and table_type(location.annotation):
        return Fault(file, key, error["msg"], value=value)
    hint = _value_hint(error["input"], location.annotation)
    return Fault(file, key, _problem(error), value=value, allowed=allowed, hint=hint)


def _problem(error: ErrorDetails) -> str:
    kind = error["type"]
    if kind == "message":
        return error["msg"]
    if kind == "literal_error":
        return "unknown value"
    if kind.startswith(("greater_than", "less_than", "too_short", "too_long")):
        return "out of range"
    if kind == "finite_number":
        return "must be finite"
    return "wrong type"


def _value_hint(value: Any, annotation: Any) -> str | None:
    if not isinstance(value, str):
        return None
    unquote = "write it without quotes"
    if values := known_values(annotation):
        if value in values:
            return unquote
        close = _closest(value.lower(), values)
        return None if close is None else f'did you mean "{close}"?'
    allowed = describe_type(annotation)
    if allowed == "true or false":
        return unquote if value.lower() in ("true", "false") else None
    is_numeric = "number" in allowed or "integer" in allowed
    return unquote if is_numeric and _is_number(value) else None


def _is_number(text: str) -> bool:
    return text.strip().lstrip("+-").replace(".", "", 1).replace("e-", "", 1).isdigit()


def suggest_key(file_kind: str, table: str, name: str) -> str | None:
    """Suggest what an unknown key was meant to be: from its own table, other tables, then the other file."""
    index = _index(file_kind)
    for kind, key_table, key in index:
        if key == name:
            return f"`{key}` belongs {_describe_location(file_kind, kind, key_table)}"
    same_table = [row for row in index if row[:2] == (file_kind, table)]
    same_file = [row for row in index if row[0] == file_kind]
    synonym = SYNONYMS.get(name)
    choices = [(scope, synonym) for scope in (same_table, same_file, index)]
    choices += [(scope, _closest(name, [row[2] for row in scope], cutoff=0.7)) for scope in (same_table, same_file)]
    for scope, wanted in choices:
        for kind, key_table, key in scope:
            if key == wanted:
                location = "" if key_table == table else " " + _describe_location(file_kind, kind, key_table)
                return f"did you mean `{key}`{location}?"
    return None


def _closest(name: str, options: Sequence[str], cutoff: float = 0.6) -> str | None:
    """Return the option nearest to a mistyped name, or None if none is near."""
    return next(iter(get_close_matches(name, options, 1, cutoff)), None)


def looks_like(raw: Mapping[str, Any]) -> str | None:
    """Return the kind of file that a TOML is by its tables, or None if they do not show it."""
    is_dataset = "directory" in raw
    is_train = any(key in raw for key in ("dataset", "model", "optimizer"))
    return None if is_dataset == is_train else "dataset" if is_dataset else "train"


@cache
def _index(file_kind: str) -> tuple[tuple[str, str, str], ...]:
    """Return file kind, table and name of every key, those of ``file_kind`` first."""
    kinds = sorted(SCHEMAS, key=lambda kind: kind != file_kind)
    return tuple((kind, table, key) for kind in kinds for table, key in _keys(kind))


def _keys(file_kind: str) -> Iterator[tuple[str, str]]:
    for name, table in walk_tables(SCHEMAS[file_kind]):
        yield from ((name, key) for key in table.model_fields)
    if file_kind == "train":
        yield from (("", alias) for alias in ALIASES)


def _describe_location(file_kind: str, key_kind: str, table: str) -> str:
    if key_kind != file_kind:
        return f"in the {key_kind} TOML"
    if not table:
        return "at the top level, above the first [table]"
    return f"in [[{table}]]" if table in LIST_TABLES else f"in [{table}]"
