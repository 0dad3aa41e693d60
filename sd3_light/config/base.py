"""Building blocks of the schemas: strict scalar types, paths, and readable descriptions of what a type allows."""

import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SecretStr,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError

from sd3_light.config.faults import UserError
from sd3_light.inputs import path_problem

Resolution = tuple[int, int]
"""Width and height in pixels."""
SIDE_MULTIPLE = 16  # the VAE downsamples by 8 and a patch covers 2 latents
SIDE_RULE = f"sides are multiples of {SIDE_MULTIPLE}"


class Table(BaseModel):
    """Base class for the tables of a TOML file: frozen, and unknown keys are faults."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Allowed:
    """Annotation: describes what a type allows where the type itself cannot."""

    text: str


@dataclass(frozen=True)
class KnownValues:
    """Annotation: the known values of a string, used for validation and for suggesting the nearest one."""

    values: tuple[str, ...]

    def __call__(self, value: Any) -> Any:
        """Return ``value`` if it is known, otherwise raise."""
        if isinstance(value, str) and value not in self.values:
            raise PydanticCustomError("literal_error", "unknown value")
        return value


def invalid_value(problem: str) -> PydanticCustomError:
    """Return an error whose text is shown to the user unchanged."""
    return PydanticCustomError("message", "{problem}", {"problem": problem})


def parse_path(value: Any, info: ValidationInfo) -> Path:
    """Return an absolute path, relative paths starting at the TOML file's folder. Does not touch the disk."""
    if not isinstance(value, str | Path) or str(value) == "":
        raise PydanticCustomError("path_type", "not a path")
    return absolute_path((info.context or {}).get("base", Path()), value)


def absolute_path(base: Path, value: str | Path) -> Path:
    """Return ``value`` made absolute from ``base``. `..` is collapsed; symbolic links are not followed.

    A path that no file can have, or the home folder of an unknown user, is a ValueError.
    """
    try:
        path = os.path.abspath(base / Path(value).expanduser())
    except RuntimeError as error:
        raise invalid_value("there is no such user; write the whole path") from error
    if problem := path_problem(path):
        raise invalid_value(problem)
    return Path(path)


def is_url(value: str) -> bool:
    """Return whether a string is a URL: `://` comes before any other slash."""
    return "://" in value and "/" not in value.partition("://")[0]


def parse_location(value: Any, info: ValidationInfo) -> Path | str:
    """Return an absolute path, or a validated URL without its trailing slashes."""
    if not isinstance(value, str) or not is_url(value):
        return parse_path(value, info)
    scheme, _, rest = value.partition("://")
    host = rest.partition("/")[0]
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.\-]*", scheme):
        raise invalid_value("not a URL with a single protocol")
    # a password may contain a slash, so its @ can come after what looks like the host
    if "@" in host or not re.fullmatch(r"[^:]*(:\d+)?|\[.*\](:\d+)?", host):
        raise invalid_value("a URL must not contain a user or password: credentials come from the environment")
    if re.search(r"[?#\s]", rest):
        raise invalid_value("a URL must not have a query, a fragment or spaces: file names are appended to it")
    if not rest.strip("/"):
        raise invalid_value("the URL names no folder")
    if scheme == "file" and host:
        raise invalid_value("a file URL needs three slashes: file:///folder")
    return value.rstrip("/")


def without_secrets(text: str) -> str:
    """Hide everything between `://` and the last `@`, and the query of a URL."""
    text = re.sub(r"://.*@", "://(hidden)@", text)
    return re.sub(r"(://[^?\s]*)\?[^\s\"]*", r"\1?(hidden)", text)


def word_or_path(*words: str) -> Callable[[Any, ValidationInfo], Any]:
    """Return a validator that leaves ``words`` unchanged and makes anything else an absolute path."""
    return lambda value, info: value if value in words else parse_path(value, info)


def flag_or(*words: str) -> Callable[[Any], Any]:
    """Return a validator that accepts true, false or one of ``words``."""

    def validate(value: Any) -> Any:
        if isinstance(value, bool) or value in words:
            return value
        raise invalid_value("unknown value")

    return validate


def parse_level(value: Any) -> Any:
    """Accept how activations are recomputed."""
    if isinstance(value, float) and 0 < value < 1:
        return value
    return flag_or("selective", "host")(value)


def recomputed_blocks(level: "Checkpointing", blocks: int) -> int:
    """Return how many of the blocks recompute their activations: the first ones."""
    share = level if isinstance(level, float) else bool(level)
    return ceil(share * blocks)


def is_count(value: Any, least: int = 1) -> bool:
    """Return whether a TOML value is an integer from ``least`` on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def as_resolution(value: Any) -> Resolution | None:
    """Return (width, height) from a side or from [width, height], or None for anything else."""
    if is_count(value):
        return (value, value)
    if isinstance(value, list | tuple) and len(value) == 2 and all(is_count(side) for side in value):
        return (value[0], value[1])
    return None


def check_sides(resolution: Resolution, value: Any) -> None:
    """Raise an error that names ``value`` if a side of its resolution is not a multiple of `SIDE_MULTIPLE`."""
    if any(side % SIDE_MULTIPLE for side in resolution):
        raise invalid_value(f"{value} has a side that is not a multiple of {SIDE_MULTIPLE}")


def parse_image_size(value: Any) -> Resolution:
    """Return (width, height) from a side or from [width, height]."""
    resolution = as_resolution(value)
    if resolution is None:
        raise invalid_value("not a side or [width, height]")
    check_sides(resolution, value)
    return resolution


def parse_steps_or_share(value: Any) -> int | float:
    """Return a number of steps, or a share of all steps: a float between 0 and 1."""
    is_share = isinstance(value, float) and 0 <= value < 1
    if is_share or is_count(value, 0):
        return value  # type: ignore[no-any-return]
    raise invalid_value("not a number of steps or a share of them")


def parse_count_or_all(value: Any) -> int | str:
    """Return a number of things, or "all"."""
    if value == "all" or is_count(value, 0):
        return value  # type: ignore[no-any-return]
    raise invalid_value("not a number")


def check_slug(value: Any) -> Any:
    """Return ``value`` if it is safe in a file name."""
    if isinstance(value, str) and not re.fullmatch(r"[\w.\-]+", value):
        raise invalid_value("is used in file names: use only letters, digits, '.', '_' and '-'")
    return value


ImageSize = Annotated[Resolution, BeforeValidator(parse_image_size), Allowed(f"a side or [width, height]; {SIDE_RULE}")]
LARGEST_INTEGER = 2**63 - 1
"""The largest integer of TOML and of tensors; descriptions of types leave it out."""
Flag = Annotated[bool, Strict()]
TomlString = Annotated[str, Strict()]
Name = Annotated[str, Strict(), BeforeValidator(check_slug), Allowed("a name of letters, digits, '.', '_' and '-'")]
Positive = Annotated[float, Strict(), Gt(0)]
NotNegative = Annotated[float, Strict(), Ge(0)]
Fraction = Annotated[float, Strict(), Ge(0), Le(1)]
Decay = Annotated[float, Strict(), Ge(0), Lt(1)]
Count = Annotated[int, Strict(), Ge(1), Le(LARGEST_INTEGER)]
CountOrZero = Annotated[int, Strict(), Ge(0), Le(LARGEST_INTEGER)]
StepsOrShare = Annotated[
    int | float, BeforeValidator(parse_steps_or_share), Allowed("a number of steps, or a share of them between 0 and 1")
]
CountOrAll = Annotated[
    int | Literal["all"], BeforeValidator(parse_count_or_all), Allowed('a whole number from 0, or "all"')
]
TomlPath = Annotated[Path, BeforeValidator(parse_path), Allowed("a path")]
CacheLocation = Path | str
"""The location of a cache: a Path is a folder, a str is a URL that fsspec supports."""
DataLocation = Path | str
"""The location of images or masks: a Path is a file or folder, a str is a URL that fsspec supports."""
TomlLocation = Annotated[
    CacheLocation,
    BeforeValidator(parse_location),
    Allowed("a path, or a URL such as s3://bucket/folder without credentials"),
]
FlagOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(flag_or("auto")), Allowed('true, false or "auto"')]
Checkpointing = bool | float | Literal["selective", "host"]
"""Recompute no activations, those of whole blocks, of a share of the blocks, or all except the outputs of matrix
products and attention; with ``"host"`` those of whole blocks, whose inputs are in host memory."""
FlagOrLevel = Annotated[
    Checkpointing,
    BeforeValidator(parse_level),
    Allowed('true, false, a share of the blocks between 0 and 1, "selective" or "host"'),
]
RandomOrPath = Annotated[
    Literal["random"] | Path,
    BeforeValidator(word_or_path("random")),
    Allowed('"random", or the path of a folder or file'),
]
DtypeName = Literal["float32", "bfloat16", "float16"]

_BOUNDS: tuple[tuple[type, str, str], ...] = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))
_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", SecretStr: "a string"}


def unwrap_annotation(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Strip `Annotated` and `| None` from a type; returns (bare type, annotations)."""
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


def element_type(annotation: Any, index: int) -> Any:
    """Return the type of one element of a list type, or None if it is not a list type."""
    bare, _ = unwrap_annotation(annotation)
    args = get_args(bare)
    if get_origin(bare) is not tuple or not args:
        return None
    return args[0] if args[-1] is Ellipsis else args[min(index, len(args) - 1)]


def table_type(annotation: Any) -> type[Table] | None:
    """Return the `Table` subclass behind a type, or None."""
    bare, _ = unwrap_annotation(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, Table) else None


@cache
def field_types(table: type[Table]) -> Mapping[str, Any]:
    """Return key -> annotated type of a table, in schema order."""
    hints = get_type_hints(table, include_extras=True)
    return {name: hints[name] for name in table.model_fields}


def walk_tables(table: type[Table], name: str = "") -> Iterator[tuple[str, type[Table]]]:
    """Yield the table and all its nested tables with their dotted names."""
    yield name, table
    for key, annotation in field_types(table).items():
        inner = table_type(annotation) or table_type(element_type(annotation, 0))
        if inner is not None:
            yield from walk_tables(inner, f"{name}.{key}" if name else key)


def known_values(annotation: Any) -> tuple[str, ...]:
    """Return the values of a type with a closed set of values; empty for other types."""
    bare, notes = unwrap_annotation(annotation)
    for note in notes:
        if isinstance(note, KnownValues):
            return note.values
    return tuple(str(value) for value in get_args(bare)) if get_origin(bare) is Literal else ()


def describe_type(annotation: Any) -> str:
    """Describe the values that a type allows."""
    bare, notes = unwrap_annotation(annotation)
    for note in notes:
        if isinstance(note, Allowed):
            return note.text
    if values := known_values(annotation):
        return ", ".join(f'"{value}"' for value in values)
    if get_origin(bare) is tuple:
        return _describe_list(bare, notes)
    if table_type(bare) is not None:
        return "a table"
    limits = [(sign, getattr(note, name)) for kind, name, sign in _BOUNDS for note in notes if isinstance(note, kind)]
    shown = " and ".join(f"{sign} {limit}" for sign, limit in limits if limit != LARGEST_INTEGER)
    return f"{_SCALARS[bare]} {shown}".rstrip()


def require_value(table: type[Table], key: str, value: Any, name: str | None = None) -> None:
    """Raise a UserError unless a key of a table may have the value, a setting ``name`` of a script."""
    annotation = field_types(table)[key]
    try:
        TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        raise wrong_value(name or key, value, annotation) from error


def wrong_value(name: str, value: Any, annotation: Any) -> UserError:
    """Return an error about a setting whose value is not of its type."""
    described = describe_type(annotation)
    return UserError(f"{name} is {value!r}; give {f'one of {described}' if known_values(annotation) else described}")


def _describe_list(bare: Any, notes: tuple[Any, ...]) -> str:
    args = get_args(bare)
    if args[-1] is not Ellipsis:
        return f"a list of {len(args)}, each {describe_type(args[0])}"
    least = max((note.min_length for note in notes if isinstance(note, MinLen)), default=0)
    prefix = f"a list of {least} or more" if least else "a list"
    return f"{prefix}, each {describe_type(args[0])}"
