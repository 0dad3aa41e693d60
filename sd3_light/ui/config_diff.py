"""Which keys differ between the configs of runs."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sd3_light.formats import shorten
from sd3_light.inputs import read_limited

_LONGEST = 1 << 18  # bytes of a config
_LONGEST_VALUE = 120  # letters


def differing_keys(configs: Mapping[str, Path], notes: list[str]) -> list[tuple[str, list[str]]]:
    """Return each key whose values differ between resolved configs, with its value in each; "" where it is missing.

    A config that cannot be read has no values, and a note says why.
    """
    tables = [_flat_config(name, path, notes) for name, path in configs.items()]
    keys = sorted({key for table in tables for key in table})
    rows = [(key, [table.get(key, "") for table in tables]) for key in keys]
    return [(key, [shorten(value, _LONGEST_VALUE) for value in values]) for key, values in rows if len(set(values)) > 1]


def _flat_config(name: str, path: Path, notes: list[str]) -> dict[str, str]:
    try:
        table = tomllib.loads(read_limited(path, _LONGEST).decode())
        return dict(_flat("", table))
    except FileNotFoundError:
        notes.append(f"{name} has no config.toml; its keys are not compared.")
    except OSError as error:
        notes.append(f"{name}: config.toml cannot be read: {error.strerror}.")
    except (ValueError, RecursionError):  # not TOML, not UTF-8
        notes.append(f"{name}: config.toml is not valid TOML; its keys are not compared.")
    return {}


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the full name and the text of every value."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False, default=str)
