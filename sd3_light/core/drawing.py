"""How an export says that its images are drawn: steps and guidance, in the entry `sampling` of its facts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.core.sampling import OwnDrawing

SAMPLING = "sampling"
"""The entry of an export's facts, and of a LoRA file's."""
_LAST_TIME = "last_time"
_NOTE = "as its export says"


def drawing_facts(drawing: OwnDrawing, last_time: float | None = None) -> dict[str, Any]:
    """Return the entry of an export's facts; empty if nothing is stated.

    ``last_time`` is that of the last call of sampling, for an adapter whose base has another one.
    """
    values = {"steps": drawing.steps, "guidance": drawing.guidance, _LAST_TIME: last_time}
    stated = {name: value for name, value in values.items() if value is not None}
    return {SAMPLING: stated} if stated else {}


def stated_drawing(facts: Mapping[str, Any], where: Path) -> OwnDrawing:
    """Return the steps and the guidance that facts state, None where they do not; ``where`` is their file."""
    table = _table(facts, where)
    note = _NOTE if table.keys() & {"steps", "guidance"} else ""
    return OwnDrawing(table.get("steps"), table.get("guidance"), note)


def stated_last_time(facts: Mapping[str, Any], where: Path) -> float | None:
    """Return the time of the last call of sampling that the facts of an adapter state."""
    time: float | None = _table(facts, where).get(_LAST_TIME)
    return time


def _table(facts: Mapping[str, Any], where: Path) -> dict[str, Any]:
    table = facts.get(SAMPLING, {})
    if not isinstance(table, dict):
        raise UserError(f"{where}: {SAMPLING} is {table!r:.80}, not a table; export the model again")
    for name, is_valid in _VALID.items():
        if name in table and not is_valid(table[name]):
            raise UserError(f"{where}: {SAMPLING}.{name} is {table[name]!r:.80}; export the model again")
    return table


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_VALID: dict[str, Callable[[Any], bool]] = {
    "steps": lambda value: type(value) is int and 1 <= value <= 1000,
    "guidance": lambda value: _is_number(value) and 0 <= value <= 1000,
    _LAST_TIME: lambda value: _is_number(value) and 0 <= value < 1,
}
