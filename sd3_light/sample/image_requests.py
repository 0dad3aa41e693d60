"""Prompt files, whose rows (`PromptRow`) leave missing values to the command.

A text file has one prompt per line. A CSV file has a header and the columns of `COLUMNS`; an empty cell means the
command's value.
"""

import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError
from sd3_light.inputs import read_limited

_FAULTS_SHOWN = 10
_MAX_STEPS = 1000  # models have 1000 timesteps


@dataclass(frozen=True)
class PromptRow:
    """A prompt and its settings from a file; None means the command's value. `where` is the file and line."""

    prompt: str
    seed: int | None = None
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    where: str = ""


COLUMNS = tuple(field.name for field in fields(PromptRow) if field.name != "where")


def read_prompt_rows(path: Path) -> list[PromptRow]:
    """Read a prompt file: CSV if its name ends in .csv, else one prompt per line. One error reports all its faults."""
    if not path.is_file():
        raise UserError(f"--file: {path} does not exist")
    try:
        text = read_limited(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"--file: {path} cannot be read: {error.strerror}; give a text file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    if path.suffix.lower() == ".csv":
        return _csv_rows(path, text)
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [PromptRow(line, where=f"{path}:{number}") for number, line in lines if line]


def _csv_rows(path: Path, text: str) -> list[PromptRow]:
    lines = _csv_lines(path, text)
    _, header = next(lines, (0, []))
    _check_header(path, header)
    rows = []
    faults = []
    for number, cells in lines:
        values, row_faults = _parse(header, cells)
        faults += [f"{path}:{number}: {fault}" for fault in row_faults]
        rows.append(PromptRow(**values, where=f"{path}:{number}") if not row_faults else None)
    if faults:
        more = f"\n... and {len(faults) - _FAULTS_SHOWN} more" if len(faults) > _FAULTS_SHOWN else ""
        raise UserError("\n".join(faults[:_FAULTS_SHOWN]) + more)
    return [row for row in rows if row is not None]


def _csv_lines(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line number, cells) of each row that is not blank; a cell may span several lines."""
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    start = 1
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield start, [cell.strip() for cell in cells]
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{start}: not valid CSV: {error}") from None


def _check_header(path: Path, header: list[str]) -> None:
    for name in header:
        if name not in COLUMNS:
            near = get_close_matches(name.lower(), COLUMNS, 1)
            hint = f"did you mean {near[0]}?" if near else f"the columns are {', '.join(COLUMNS)}"
            raise UserError(f"{path}:1: unknown column {name!r}; {hint}")
        if header.count(name) > 1:
            raise UserError(f"{path}:1: the column {name} appears twice")
    if "prompt" not in header:
        raise UserError(f"{path}:1: no column `prompt`; the first line must name the columns: {', '.join(COLUMNS)}")


def _parse(header: list[str], cells: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return a row's values by column, and their faults."""
    if len(cells) != len(header):
        return {}, [f"{len(cells)} cells for {len(header)} columns; put text with a comma in quotes"]
    values: dict[str, Any] = {}
    faults = []
    for name, cell in zip(header, cells, strict=True):
        if not cell:
            continue
        try:
            values[name] = _PARSERS[name](cell)
        except ValueError:
            faults.append(f"{name} is {cell!r}; it must be {_EXPECTED[name]}")
    if "prompt" not in values:
        faults.append("the prompt is empty")
    return values, faults


def _integer(least: int, most: int) -> Callable[[str], int]:
    def parse(cell: str) -> int:
        value = int(cell)
        if not least <= value <= most:
            raise ValueError(cell)
        return value

    return parse


def _guidance(cell: str) -> float:
    value = float(cell)
    if not math.isfinite(value) or value < 0:
        raise ValueError(cell)
    return value


_PARSERS: dict[str, Callable[[str], Any]] = {
    "prompt": str,
    "negative_prompt": str,
    "seed": _integer(0, 2**63 - 1),
    "width": _integer(1, 2**16),
    "height": _integer(1, 2**16),
    "steps": _integer(1, _MAX_STEPS),
    "guidance": _guidance,
}
_EXPECTED = {
    "seed": "an integer from 0",
    "width": "an integer, in pixels",
    "height": "an integer, in pixels",
    "steps": f"an integer from 1 to {_MAX_STEPS}",
    "guidance": "a number from 0",
}
