"""The form of a TOML file: one field per key of its schema, with the value in the text and the documentation."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sd3_light.config.base import Table, field_types, known_values, unwrap_annotation, walk_tables
from sd3_light.config.docs import is_leaf, key_text
from sd3_light.config.schema_dataset import DatasetDefaults, DatasetFile, DirectoryConfig
from sd3_light.config.schema_train import ALIASES, TrainConfig
from sd3_light.config.toml_file import parse_value
from sd3_light.config.toml_text import format_toml
from sd3_light.config.validation import LIST_TABLES, is_secret_key

_MOST_ROWS = 50  # of a list of tables that have fields


@dataclass(frozen=True)
class FormField:
    """A key of the form; ``value`` is its text, as `--set` takes it, "" where the file does not have it."""

    key: str
    name: str
    value: str
    choices: tuple[str, ...]
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class FormGroup:
    """The fields of a table."""

    title: str
    about: str
    fields: Sequence[FormField]

    @property
    def count(self) -> int:
        """How many of its keys the file has."""
        return sum(bool(field.value) for field in self.fields)


def form_groups(kind: str, raw: Mapping[str, Any]) -> list[FormGroup]:
    """Return the form of a train or dataset TOML with this content."""
    return list(_dataset_groups(raw) if kind == "dataset" else _groups(TrainConfig, raw))


def _dataset_groups(raw: Mapping[str, Any]) -> Iterator[FormGroup]:
    yield _group("All directories", "Keys of every [[directory]] that does not set its own.", DatasetDefaults, "", raw)
    directories = raw.get("directory")
    rows = directories if isinstance(directories, list) else []
    for index, row in enumerate(rows[:_MOST_ROWS]):
        about = DirectoryConfig.__doc__ or ""
        yield _group(f"[[directory]] {index + 1}", about, DirectoryConfig, f"directory[{index}]", row)


def _groups(schema: type[Table], raw: Mapping[str, Any]) -> Iterator[FormGroup]:
    for name, table in walk_tables(schema):
        if name in LIST_TABLES:
            rows = _value(raw, name)
            for index, row in enumerate((rows if isinstance(rows, list) else [])[:_MOST_ROWS]):
                yield _group(f"[[{name}]] {index + 1}", table.__doc__ or "", table, f"{name}[{index}]", row)
        elif name != "eval_datasets":  # a field of the top level
            group = _group(f"[{name}]" if name else "Top level", table.__doc__ or "", table, name, _value(raw, name))
            if group.fields:
                yield group


def _group(title: str, about: str, table: type[Table], prefix: str, raw: Any) -> FormGroup:
    values = raw if isinstance(raw, Mapping) else {}
    fields = [
        _field(key, table, f"{prefix}.{key}" if prefix else key, values)
        for key, annotation in field_types(table).items()
        if is_leaf(annotation) and not is_secret_key(key) and not (table is DatasetFile and key == "directory")
    ]
    line = re.sub(r"^\[+[\w.]+\]+: ", "", about.splitlines()[0]) if about else ""
    return FormGroup(title, line[:1].upper() + line[1:], fields)


def _field(key: str, table: type[Table], name: str, values: Mapping[str, Any]) -> FormField:
    text = key_text(key, table)
    annotation = field_types(table)[key]
    choices = known_values(annotation)
    if unwrap_annotation(annotation)[0] is bool:
        choices = ("true", "false")
    spellings = [key, *(alias for alias, long in ALIASES.items() if long == key)]
    written = next((spelling for spelling in spellings if spelling in values), None)
    value = "" if written is None else _shown(values[written])
    whole = name if written in (None, key) else f"{name.removesuffix(key)}{written}"
    default = "" if text.default in ("absent", "**required**") else text.default.strip("`")
    # a value that is none of the choices is a fault: it is typed, so that it can be seen
    return FormField(
        key=whole,
        name=key,
        value=value,
        choices=choices if value in ("", *choices) else (),
        type=text.type,
        default="required" if text.default == "**required**" else default,
        meaning=text.meaning,
    )


def _shown(value: Any) -> str:
    """Return a value as `--set` takes it: text without quotes where it stays the same text."""
    if isinstance(value, str) and value.strip() == value and "\n" not in value and parse_value(value) == (value, None):
        return value
    return format_toml(value)


def _value(raw: Any, name: str) -> Any:
    for part in name.split(".") if name else ():
        raw = raw.get(part) if isinstance(raw, Mapping) else None
    return raw
