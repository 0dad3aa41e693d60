"""Select samples by `where`: read the columns that it uses, check their types, and evaluate it.

Terms over columns are evaluated before captions are read, those over the caption's length next, both during the scan.
Terms over the image's size are left until images have been probed; a record keeps the values that they need.
"""

import json
import math
from collections.abc import Collection, Mapping
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from sd3_light.config.base import DataLocation
from sd3_light.config.condition import (
    BOOLEAN,
    BUILT_IN,
    CAPTION_LENGTH,
    HEIGHT,
    NUMBER,
    TEXT,
    WIDTH,
    Condition,
    parse_condition,
)
from sd3_light.config.faults import UserError
from sd3_light.sources.preprocess import Reject

_SIZES = (WIDTH, HEIGHT)
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_TYPES: dict[str | None, tuple[type, ...]] = {NUMBER: (int, float, Decimal), TEXT: (str,), BOOLEAN: (bool,)}
_PLAIN: dict[str | None, type] = {NUMBER: float, TEXT: str, BOOLEAN: bool}
_MOST_NAMES = 1000
_MAX_BITS = 1000  # larger integers are not numbers of a dataset, and exceed a float


class Selection:
    """The condition of one scan."""

    def __init__(self, where: str) -> None:
        condition = parse_condition(where)
        self.kinds = condition.kinds
        self._by_columns, others = condition.split(BUILT_IN.values())
        self._by_caption, self._by_size = others.split(_SIZES)
        self._kept = sorted(self._by_size.keys - set(_SIZES))
        self._unseen = set(condition.kinds)
        self._names: dict[str, None] = {}
        self._num_checked = 0

    def note_names(self, names: Collection[str]) -> None:
        """Remember the names of existing columns, for `require_columns`."""
        if self._unseen:
            lowered = {name.lower() for name in names}
            self._unseen = {name for name in self._unseen if name.lower() not in lowered}
            if len(self._names) < _MOST_NAMES:
                self._names.update(dict.fromkeys(names))

    def take(self, row: Mapping[str, Any], is_text: bool = False) -> dict[str, Any]:
        """Return the row's values of the columns in use; with ``is_text`` (CSV) they are converted to their types."""
        self.note_names(row)
        values = {}
        for name, kind in self.kinds.items():
            value = row.get(name)
            if value is None:
                value = next((row[other] for other in row if other.lower() == name.lower()), None)
            if value is not None:
                values[name] = _from_text(value, kind) if is_text and isinstance(value, str) else value
        return values

    def checked(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with their types checked, missing ones left out. Raises Reject."""
        self._num_checked += 1
        checked = {}
        for name, value in values.items():
            kind = self.kinds[name]
            if type(value) is _PLAIN.get(kind) and value == value:  # the common case; NaN differs from itself
                checked[name] = value
                continue
            if value is None or (isinstance(value, float) and math.isnan(value)):
                continue
            is_boolean = isinstance(value, bool)
            if kind is not None and (is_boolean != (kind == BOOLEAN) or not isinstance(value, _TYPES[kind])):
                raise Reject("bad_column", f"{name} = {value!r:.60}, and where needs {kind} there")
            if isinstance(value, int) and value.bit_length() > _MAX_BITS:
                raise Reject("bad_column", f"{name} is an integer of {value.bit_length():,} bits")
            checked[name] = float(value) if isinstance(value, Decimal) else value
        return checked

    def matches_columns(self, values: Mapping[str, Any]) -> bool:
        """Return whether the terms over columns alone are true."""
        return self._by_columns.matches(values)

    def matches_caption(self, values: dict[str, Any], length: int) -> bool:
        """Add the length of the caption to the values; return whether the terms over it are true."""
        values[CAPTION_LENGTH] = length
        return not self._by_caption.terms or self._by_caption.matches(values)

    def kept(self, values: Mapping[str, Any]) -> str:
        """Return the values that the terms over the size need, as JSON; "" if there are none."""
        if not self._kept:
            return ""
        kept = {name: values[name] for name in self._kept if name in values}
        return json.dumps(kept) if kept else ""

    def require_columns(self, path: DataLocation) -> None:
        """Raise a UserError if a column appears nowhere in the directory; it must have samples."""
        if not self._unseen or not self._num_checked:
            return
        name = min(self._unseen)
        near = get_close_matches(name, self._names, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        names = f"the columns are {', '.join(self._names)!a:.200}" if self._names else "it has no columns at all"
        raise UserError(f"where: no sample of {path} has a column {name!r}; {hint}{names}")


def matches_size(where: str, kept: str, width: int, height: int) -> bool:
    """Return whether the terms over the image's size are true, with the other values that a scan has kept."""
    condition = _size_condition(where)
    if not condition.terms:
        return True
    return condition.matches({**(json.loads(kept) if kept else {}), WIDTH: width, HEIGHT: height})


@lru_cache(maxsize=64)
def _size_condition(where: str) -> Condition:
    return parse_condition(where).split(_SIZES)[1]


def _from_text(text: str, kind: str | None) -> Any:
    """Return a cell of a CSV table as a value of this type, None if it is empty, the text itself if it is another."""
    text = text.strip()
    if not text:
        return None
    if kind == BOOLEAN:
        return _BOOLEANS.get(text.lower(), text)
    try:
        return float(text) if kind == NUMBER else text
    except ValueError:
        return text
