"""Samples over the steps of one run or several: one row of images per prompt and seed."""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from PIL import Image

from sd3_light.config.faults import UserError
from sd3_light.formats import shorten
from sd3_light.inputs import open_regular, parse_json, read_limited
from sd3_light.pages import render_template
from sd3_light.report.grids import distinct_grids, evenly, sample_file
from sd3_light.report.log_lines import LogEvent
from sd3_light.ui.folders import Folders
from sd3_light.ui.run_pages import RunRow, run_row

MOST_STEPS = 8
"""Images per row; of more steps an even choice is shown."""
MOST_PROMPTS = 24
"""Pairs of prompt and seed on a page."""

_LARGEST_FILE = 64_000_000  # bytes


@dataclass(frozen=True)
class StepImage:
    """One image at one step of a run."""

    step: int
    url: str


@dataclass
class SampleRow:
    """The images of one run for one prompt and seed."""

    run: str
    weights: str
    images: list[StepImage] = field(default_factory=list)


Rows = dict[tuple[str, int], list[SampleRow]]
"""(prompt, seed) -> one row per run and weights."""


def samples_page(folders: Folders, run_ids: Sequence[str], text: str = "") -> str:
    """Return the samples of the runs whose prompts contain ``text``, over steps."""
    if not run_ids:
        raise UserError("no run is chosen; mark some in the list of runs")
    chosen = [run_row(folders, run_id) for run_id in dict.fromkeys(run_ids)]
    notes = [f"{row.folder}: {row.problem}" for row in chosen if row.problem]
    rows: Rows = {}
    for row in chosen:
        _add_run(row, rows, notes)
    matching = {key: each for key, each in rows.items() if text.casefold() in key[0].casefold()}
    shown = dict(list(matching.items())[:MOST_PROMPTS])
    return render_template(
        "samples.html",
        folder=", ".join(str(row.folder) for row in chosen),
        runs=[row.id for row in chosen],
        several=len(chosen) > 1,
        text=text,
        groups=[(prompt, seed, each) for (prompt, seed), each in shown.items()],
        total=len(matching),
        notes=notes,
        back=f"/compare?{urlencode([('run', row.id) for row in chosen])}",
        served="/",
        live=True,
    )


def sample_image(folder: Path, file: str, cell: int | None) -> bytes:
    """Return a grid of a run as PNG, or one image of it. Raises UserError where there is none."""
    path = _inside(folder, file)
    boxes = _grid_facts(path, path.stat().st_mtime_ns)[2]
    with open_regular(path) as data, Image.open(data) as image:
        if cell is None:
            return read_limited(path, _LARGEST_FILE)
        if not 0 <= cell < len(boxes):
            raise UserError(f"{file} has no image {cell}")
        buffer = io.BytesIO()
        image.crop(boxes[cell]).save(buffer, "PNG")
    return buffer.getvalue()


def _inside(folder: Path, file: str) -> Path:
    try:
        path = folder / sample_file({"file": file})
    except ValueError as error:
        raise UserError(f"{shorten(file)}: {error}") from error
    # `os.path.isfile` is False for names that are too long, where `Path.is_file` fails
    if path.suffix.lower() != ".png" or not os.path.isfile(path) or path.stat().st_size > _LARGEST_FILE:
        raise UserError(f"{shorten(file)} is not a sample grid of {folder}")
    return path


def _add_run(row: RunRow, rows: Rows, notes: list[str]) -> None:
    name = row.folder.absolute().name
    without_cells = 0
    for weights, events in row.report.samples.items():
        own: dict[tuple[str, int], SampleRow] = {}
        for event in evenly(distinct_grids(events), MOST_STEPS):
            cells = _cells(row, event)
            without_cells += not cells
            for key, image in cells.items():
                if key not in own:
                    own[key] = SampleRow(name, weights)
                    rows.setdefault(key, []).append(own[key])
                own[key].images.append(image)
    if without_cells:
        notes.append(
            f"{name}: {without_cells} grids are missing, or an earlier version wrote them; see the run's page."
        )


def _cells(row: RunRow, event: LogEvent) -> dict[tuple[str, int], StepImage]:
    """Return the images of a grid by prompt and seed; none where the file does not say where they are."""
    try:
        file = sample_file(event)
        path = _inside(row.folder, str(file))
        prompts, seeds, boxes = _grid_facts(path, path.stat().st_mtime_ns)
    except (UserError, ValueError, OSError):
        return {}
    if len(boxes) != len(prompts) * len(seeds):
        return {}
    keys = [(prompt, seed) for prompt in prompts for seed in seeds]
    base, version = f"/runs/{row.id}/sample?file={quote(file.as_posix())}", path.stat().st_mtime_ns
    return {
        key: StepImage(event.get("step", 0), f"{base}&cell={index}&version={version}") for index, key in enumerate(keys)
    }


@lru_cache(4096)
def _grid_facts(path: Path, _version: int) -> tuple[list[str], list[int], list[tuple[int, int, int, int]]]:
    """Return the prompts, seeds and boxes of a grid's images; empty for other files."""
    try:
        with open_regular(path) as file, Image.open(file) as image:
            texts, size = dict(getattr(image, "text", {})), image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    prompts, seeds, cells = (_list(texts.get(name, "[]")) for name in ("prompts", "seeds", "cells"))
    return [str(prompt) for prompt in prompts], [seed for seed in seeds if isinstance(seed, int)], _boxes(cells, size)


def _list(text: str) -> list[Any]:
    try:
        value = parse_json(text)
    except ValueError:
        return []
    return value if isinstance(value, list) else []


def _boxes(cells: Sequence[Any], size: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Return the boxes if all of them are inside the image, else none."""
    boxes = [tuple(cell) for cell in cells if isinstance(cell, list) and len(cell) == 4]
    valid = [
        (left, top, right, bottom)
        for left, top, right, bottom in boxes
        if all(isinstance(side, int) for side in (left, top, right, bottom))
        and 0 <= left < right <= size[0]
        and 0 <= top < bottom <= size[1]
    ]
    return valid if len(valid) == len(cells) else []
