"""The names of model families, and which keys of [model] only some of them know."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Strict
from pydantic_core import PydanticCustomError

from sd3_light.config.base import Allowed, KnownValues, Table, field_types, unwrap_annotation
from sd3_light.config.faults import Fault

AUTO = "auto"
FAMILY_NAMES = (
    *("sd3", "flux", "flux_kontext", "flux2", "krea2", "prx"),
    *("qwen_image", "qwen_image_edit", "qwen_image_edit_plus", "sana", "wan", "z_image"),
)
"""The families of this package, as `model.type` names them."""
_INSTALLED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_installed_class(name: str) -> bool:
    """Return whether a name is that of a class in an installed package: `package.module:Class`."""
    return _INSTALLED.fullmatch(name) is not None


def _in_lower_case(value: Any) -> Any:
    return value.lower() if isinstance(value, str) and ":" not in value else value


def _check_name(value: str) -> str:
    if value not in (AUTO, *FAMILY_NAMES) and not is_installed_class(value):
        raise PydanticCustomError("literal_error", "unknown value")
    return value


_NAMES = ", ".join(f'"{name}"' for name in FAMILY_NAMES)
FamilyName = Annotated[
    str,
    Strict(),
    KnownValues((AUTO, *FAMILY_NAMES)),
    BeforeValidator(_in_lower_case),
    AfterValidator(_check_name),
    Allowed(f'"{AUTO}", {_NAMES}, or "package.module:Class" of an installed package'),
]


@dataclass(frozen=True)
class KnownTo:
    """Annotation of a key: ``only`` these families know it, or all but those in ``without``.

    ``reason`` says why other families do not, ``hint`` what to do. ``harmless`` values mean the same everywhere.
    """

    reason: str
    hint: str = "remove it"
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    harmless: tuple[Any, ...] = ()

    def includes(self, family: str) -> bool:
        """Return whether a family knows the key."""
        return family not in self.without and (not self.only or family in self.only)

    def __str__(self) -> str:
        return f"{', '.join(self.only)} only" if self.only else f"not for {', '.join(self.without)}"


def known_to(annotation: Any) -> KnownTo | None:
    """Return which families know a key; None if all do."""
    return next((note for note in unwrap_annotation(annotation)[1] if isinstance(note, KnownTo)), None)


def unknown_keys(table: Table, prefix: str, family: str, title: str) -> Iterator[Fault]:
    """Yield the keys of a table that were written, also with their default values, and that a family does not know."""
    for key, annotation in field_types(type(table)).items():
        note = known_to(annotation)
        if note is None or note.includes(family) or key not in table.model_fields_set:
            continue
        value = getattr(table, key)
        if value is not None and value not in note.harmless:
            shown = None if isinstance(value, Table) else str(value)
            yield Fault("", f"{prefix}{key}", f"{title} does not know this key: {note.reason}", shown, hint=note.hint)


def foreign_keys(table: Table, family: str) -> list[str]:
    """Return the keys with their default values that ``family`` does not know; with "auto", that no family knows which
    knows the other values."""
    fields = type(table).model_fields
    notes = {key: note for key, annotation in field_types(type(table)).items() if (note := known_to(annotation))}
    chosen = {
        key: note for key, note in notes.items() if getattr(table, key) not in (fields[key].default, *note.harmless)
    }
    families: tuple[str, ...] = (family,)
    if family == AUTO:
        families = tuple(name for name in FAMILY_NAMES if all(note.includes(name) for note in chosen.values()))
    foreign = (key for key, note in notes.items() if not any(map(note.includes, families)))
    return [key for key in foreign if getattr(table, key) == fields[key].default]
