"""Numbers in the fields of forms."""

from collections.abc import Mapping
from typing import Any

from sd3_light.config.faults import UserError

_MOST_SHOWN = 60  # characters of a text that is not a number


def number_of(values: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    """Return the number that a field has; None where it is empty. Raises UserError."""
    text = str(values.get(name, "")).strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise UserError(f"{name} is {text[:_MOST_SHOWN]!r}; it must be a number from {least:g} to {most:g}")
    return value
