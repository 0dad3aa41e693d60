"""Requests for images, and prompt files whose rows (`PromptRow`) leave missing values to the command.

A text file has a prompt a line. A CSV file has a header and the columns of `COLUMNS`; an empty cell means the command's
own value.
"""

import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sd3_light.config.faults import UserError

_FAULTS_SHOWN = 10
_MOST_STEPS = 1000  # more than the times that models know


@dataclass(frozen=True)
class ImageRequest:
    """One picture to make; sides in pixels. The negative prompt is read only where `uncond_text` is "empty".

    Where `steps` or `guidance` is None, the call that draws says them.
    """

    prompt: str
    seed: int
    width: int
    height: int
    negative_prompt: str = ""
    steps: int | None = None
    guidance: float | None = None


@dataclass(frozen=True)
class PromptRow:
    """A prompt, and what its line says of its picture; None leaves it to the command. `where` names file and line."""

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
    """The rows of a file of prompts: CSV where its name ends in .csv, else a prompt a line (empty lines are skipped).

    All faults of a file come in one report, each with its line.
    """
    if not path.is_file():
        raise UserError(f"--file: {path} does not exist")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as fault:
        raise UserError(f"{path} is not UTF-8 (byte {fault.start}); save it as UTF-8") from None
    if path.suffix.lower() == ".csv":
        return _csv_rows(path, text)
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [PromptRow(line, where=f"{path}:{number}") for number, line in lines if line]


def _csv_rows(path: Path, text: str) -> list[PromptRow]:
    lines = _csv_lines(path, text)
    _, header = next(lines, (0, []))
    _check_header(path, header)
    rows, faults = [], []
    for number, cells in lines:
        values, wrong = _parse(header, cells)
        faults += [f"{path}:{number}: {fault}" for fault in wrong]
        rows.append(PromptRow(**values, where=f"{path}:{number}") if not wrong else None)
    if faults:
        more = f"\n... and {len(faults) - _FAULTS_SHOWN} more" if len(faults) > _FAULTS_SHOWN else ""
        raise UserError("\n".join(faults[:_FAULTS_SHOWN]) + more)
    return [row for row in rows if row is not None]


def _csv_lines(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Cells of each row that is not blank, with the number of the line where it begins (cells may hold several)."""
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    begins = 1
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield begins, [cell.strip() for cell in cells]
            begins = reader.line_num + 1
    except csv.Error as fault:
        raise UserError(f"{path}:{begins}: no CSV: {fault}") from None


def _check_header(path: Path, header: list[str]) -> None:
    for name in header:
        if name not in COLUMNS:
            near = get_close_matches(name.lower(), COLUMNS, 1)
            hint = f"did you mean {near[0]}?" if near else f"the columns are {', '.join(COLUMNS)}"
            raise UserError(f"{path}:1: unknown column {name!r}; {hint}")
        if header.count(name) > 1:
            raise UserError(f"{path}:1: the column {name} is there twice")
    if "prompt" not in header:
        raise UserError(f"{path}:1: no column `prompt`; the first line names the columns: {', '.join(COLUMNS)}")


def _parse(header: list[str], cells: list[str]) -> tuple[dict[str, Any], list[str]]:
    """A line's values by column, and what is wrong with them."""
    if len(cells) != len(header):
        return {}, [f"{len(cells)} cells for {len(header)} columns; a text with a comma stands in quotes"]
    values: dict[str, Any] = {}
    faults = []
    for name, cell in zip(header, cells, strict=True):
        if not cell:
            continue
        try:
            values[name] = _PARSERS[name](cell)
        except ValueError:
            faults.append(f"{name} is {cell!r}; it must be {_WANTED[name]}")
    if "prompt" not in values:
        faults.append("the prompt is empty")
    return values, faults


def _whole(least: int, most: int) -> Callable[[str], int]:
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
    "seed": _whole(0, 2**63 - 1),
    "width": _whole(1, 2**16),
    "height": _whole(1, 2**16),
    "steps": _whole(1, _MOST_STEPS),
    "guidance": _guidance,
}
_WANTED = {
    "seed": "a whole number from 0",
    "width": "pixels, a whole number",
    "height": "pixels, a whole number",
    "steps": f"a whole number from 1 to {_MOST_STEPS}",
    "guidance": "a number from 0",
}
