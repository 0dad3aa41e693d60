"""The vocabulary of the schemas: strict scalar types, paths, and the plain words that say what a type allows."""

import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, SecretStr, Strict, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError


class Table(BaseModel):
    """A table of a TOML file: frozen, and an unknown key in it is a fault."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


@dataclass(frozen=True)
class Allowed:
    """Annotation: the words for what a type allows, where they cannot be derived from the type."""

    text: str


@dataclass(frozen=True)
class Choices:
    """Annotation: the known values of a text, for the report and its nearest-value hint."""

    values: tuple[str, ...]

    def __call__(self, value: Any) -> Any:
        """Pass a known value on."""
        if isinstance(value, str) and value not in self.values:
            raise PydanticCustomError("literal_error", "not a known value")
        return value


def bad(problem: str) -> PydanticCustomError:
    """The error that a validator raises to have `problem` shown to the user as it is."""
    return PydanticCustomError("plain_words", "{problem}", {"problem": problem})


def absolute(value: Any, info: ValidationInfo) -> Path:
    """A path, made absolute against the folder of the TOML that names it; nothing is looked up on disk."""
    if not isinstance(value, str | Path) or str(value) == "":
        raise PydanticCustomError("path_type", "not a path")
    return against((info.context or {}).get("base", Path()), value)


def against(base: Path, value: str | Path) -> Path:
    """A path as seen from the folder `base`: absolute, `..` taken off the text, symbolic links not followed."""
    return Path(os.path.abspath(base / Path(value).expanduser()))


def is_url(value: str) -> bool:
    """Whether a text is meant as a URL: `://` comes before any other slash."""
    return "://" in value and "/" not in value.partition("://")[0]


def path_or_url(value: Any, info: ValidationInfo) -> Path | str:
    """A path, or a URL as it stands but for a slash at its end."""
    if not isinstance(value, str) or not is_url(value):
        return absolute(value, info)
    scheme, _, rest = value.partition("://")
    host = rest.partition("/")[0]
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.\-]*", scheme):
        raise bad("not a URL of one protocol")
    # a secret may hold a slash, and then its @ comes after what looks like the host
    if "@" in host or not re.fullmatch(r"[^:]*(:\d+)?|\[.*\](:\d+)?", host):
        raise bad("a URL must not carry a user or password: credentials come from the environment")
    if re.search(r"[?#\s]", rest):
        raise bad("a URL must not have a query, a fragment or spaces: the files' names are added to it")
    if not rest.strip("/"):
        raise bad("the URL names no folder")
    if scheme == "file" and host:
        raise bad("a file URL has three slashes: file:///folder")
    return value.rstrip("/")


def without_secrets(text: str) -> str:
    """A text in which nothing between `://` and the last `@`, and no query of a URL, can be read."""
    text = re.sub(r"://.*@", "://(hidden)@", text)
    return re.sub(r"(://[^?\s]*)\?[^\s\"]*", r"\1?(hidden)", text)


def random_or_path(value: Any, info: ValidationInfo) -> Path | Literal["random"]:
    """The word "random", or a path."""
    return "random" if value == "random" else absolute(value, info)


def flag_or(word: str) -> Callable[[Any], Any]:
    """A validator: true, false or one word."""

    def known(value: Any) -> Any:
        if isinstance(value, bool) or value == word:
            return value
        raise bad("not a known value")

    return known


def slug(value: Any) -> Any:
    """A name that is also part of a file name."""
    if isinstance(value, str) and not re.fullmatch(r"[\w.\-]+", value):
        raise bad("becomes part of a file name: use letters, digits, '.', '_' and '-' only")
    return value


Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
Name = Annotated[str, Strict(), BeforeValidator(slug), Allowed("a name of letters, digits, '.', '_' and '-'")]
Positive = Annotated[float, Strict(), Gt(0)]
NotNegative = Annotated[float, Strict(), Ge(0)]
Fraction = Annotated[float, Strict(), Ge(0), Le(1)]
Decay = Annotated[float, Strict(), Ge(0), Lt(1)]
Count = Annotated[int, Strict(), Ge(1)]
CountOrZero = Annotated[int, Strict(), Ge(0)]
TomlPath = Annotated[Path, BeforeValidator(absolute), Allowed("a path")]
CacheLocation = Path | str
"""Where a cache lies: a Path is a folder, a str is a URL that fsspec knows."""
TomlLocation = Annotated[
    CacheLocation,
    BeforeValidator(path_or_url),
    Allowed("a path, or a URL such as s3://bucket/folder without credentials"),
]
FlagOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(flag_or("auto")), Allowed('true, false or "auto"')]
Checkpointing = bool | Literal["selective"]
"""Recompute no activations, those of whole blocks, or all except the outputs of matrix products and attention."""
FlagOrSelective = Annotated[Checkpointing, BeforeValidator(flag_or("selective")), Allowed('true, false or "selective"')]
RandomOrPath = Annotated[
    Literal["random"] | Path,
    BeforeValidator(random_or_path),
    Allowed('"random", or the path of a folder or file'),
]
Dtype = Literal["float32", "bfloat16", "float16"]

_SIGNS: tuple[tuple[type, str, str], ...] = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))
_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", SecretStr: "a text"}


def unwrap(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Take `Annotated` and `| None` off a type: (bare type, annotations)."""
    notes: tuple[Any, ...] = ()
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            notes += tuple(more)
        elif get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation):
            rest = [part for part in get_args(annotation) if part is not type(None)]
            if len(rest) > 1:
                return Union[tuple(rest)], notes  # noqa: UP007  (built at run time)
            annotation = rest[0]
        else:
            return annotation, notes


def element(annotation: Any, index: int) -> Any:
    """The type of one element of a list type; None where the type is no list."""
    bare, _ = unwrap(annotation)
    args = get_args(bare)
    if get_origin(bare) is not tuple or not args:
        return None
    return args[0] if args[-1] is Ellipsis else args[min(index, len(args) - 1)]


def table_of(annotation: Any) -> type[Table] | None:
    """The table that a type stands for, or None."""
    bare, _ = unwrap(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, Table) else None


@cache
def annotations(table: type[Table]) -> Mapping[str, Any]:
    """Key -> full type of a table, in the order of the schema."""
    hints = get_type_hints(table, include_extras=True)
    return {name: hints[name] for name in table.model_fields}


def tables(table: type[Table], name: str = "") -> Iterator[tuple[str, type[Table]]]:
    """The table and all tables under it, with their dotted names."""
    yield name, table
    for key, annotation in annotations(table).items():
        inner = table_of(annotation) or table_of(element(annotation, 0))
        if inner is not None:
            yield from tables(inner, f"{name}.{key}" if name else key)


def choices(annotation: Any) -> tuple[str, ...]:
    """The known values of a type that has a closed list of them."""
    bare, notes = unwrap(annotation)
    for note in notes:
        if isinstance(note, Choices):
            return note.values
    return tuple(str(value) for value in get_args(bare)) if get_origin(bare) is Literal else ()


def _bounds(notes: tuple[Any, ...]) -> str:
    flat = [part for note in notes for part in (note.metadata if isinstance(note, FieldInfo) else (note,))]
    found = [(sign, getattr(part, name)) for kind, name, sign in _SIGNS for part in flat if isinstance(part, kind)]
    return " and ".join(f"{sign} {bound}" for sign, bound in found)


def words(annotation: Any) -> str:
    """What a type allows, in plain words."""
    bare, notes = unwrap(annotation)
    for note in notes:
        if isinstance(note, Allowed):
            return note.text
    if known := choices(annotation):
        return ", ".join(f'"{value}"' for value in known)
    if get_origin(bare) is tuple:
        return _list_words(bare, notes)
    if table_of(bare) is not None:
        return "a table"
    bounds = _bounds(notes)
    return _SCALARS[bare] + (f" {bounds}" if bounds else "")


def _list_words(bare: Any, notes: tuple[Any, ...]) -> str:
    args = get_args(bare)
    if args[-1] is not Ellipsis:
        return f"a list of {len(args)}, each {words(args[0])}"
    least = max((note.min_length for note in notes if isinstance(note, MinLen)), default=0)
    some = f"a list of {least} or more" if least else "a list"
    return f"{some}, each {words(args[0])}"
