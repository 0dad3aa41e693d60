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
from sd3_light.report.grids import distinct_grids, sample_file
from sd3_light.report.log_lines import LogEvent
from sd3_light.ui.folders import Folders
from sd3_light.ui.run_pages import RunRow, run_row

MOST_PROMPTS = 200
"""Pairs of prompt and seed on a page."""

LARGEST_FILE = 64_000_000
"""Bytes of an image that is shown."""
_OPEN_GRIDS = 2  # decoded, in memory


@dataclass
class SampleMatrix:
    """What the page's script shows: where the image of each prompt, step and run is.

    ``keys`` are pairs of prompt and seed. ``series`` are one run with one kind of weights each; a grid in it has a
    number of ``layouts``, which list the index of the key of every image.
    """

    keys: list[tuple[str, int]] = field(default_factory=list)
    layouts: list[list[int]] = field(default_factory=list)
    series: list[dict[str, Any]] = field(default_factory=list)

    def layout(self, keys: Sequence[tuple[str, int]]) -> int:
        """Return the number of the layout of these keys; new ones are added."""
        self.keys += [key for key in dict.fromkeys(keys) if key not in self.keys]
        layout = [self.keys.index(key) for key in keys]
        if layout not in self.layouts:
            self.layouts.append(layout)
        return self.layouts.index(layout)

    def filtered(self, text: str) -> "SampleMatrix":
        """Return the matrix of the first keys whose prompts contain a text; others are -1 in the layouts."""
        matching = [number for number, (prompt, _) in enumerate(self.keys) if text.casefold() in prompt.casefold()]
        numbers = {old: new for new, old in enumerate(matching[:MOST_PROMPTS])}
        layouts = [[numbers.get(key, -1) for key in layout] for layout in self.layouts]
        return SampleMatrix([self.keys[old] for old in numbers], layouts, self.series)


def samples_page(folders: Folders, run_ids: Sequence[str], text: str = "") -> str:
    """Return the samples of the runs whose prompts contain ``text``: prompts, steps and runs as a matrix."""
    if not run_ids:
        raise UserError("no run is chosen; mark some in the list of runs")
    chosen = [run_row(folders, run_id) for run_id in dict.fromkeys(run_ids)]
    notes = [f"{row.folder}: {row.problem}" for row in chosen if row.problem]
    whole = SampleMatrix()
    for row in chosen:
        _add_run(row, whole, notes)
    matrix = whole.filtered(text)
    matching = sum(text.casefold() in prompt.casefold() for prompt, _ in whole.keys)
    return render_template(
        "samples.html",
        folder=", ".join(str(row.folder) for row in chosen),
        runs=[row.id for row in chosen],
        text=text,
        matrix=vars(matrix),
        total=matching,
        notes=notes,
        back=f"/compare?{urlencode([('run', row.id) for row in chosen])}",
        served="/",
        live=True,
    )


def sample_image(folder: Path, file: str, cell: int | None) -> bytes:
    """Return a grid of a run as PNG, or one image of it. Raises UserError where there is none."""
    path = _inside(folder, file)
    version = path.stat().st_mtime_ns
    boxes = _grid_facts(path, version)[2]
    if cell is None:
        return read_limited(path, LARGEST_FILE)
    if not 0 <= cell < len(boxes):
        raise UserError(f"{file} has no image {cell}")
    buffer = io.BytesIO()
    _decoded(path, version).crop(boxes[cell]).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


@lru_cache(_OPEN_GRIDS)
def _decoded(path: Path, _version: int) -> Image.Image:
    """Return a grid: a page asks for many of its images, one after the other."""
    try:
        with open_regular(path) as data, Image.open(data) as image:
            image.load()
            return image.copy()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _inside(folder: Path, file: str) -> Path:
    try:
        path = folder / sample_file({"file": file})
    except ValueError as error:
        raise UserError(f"{shorten(file)}: {error}") from error
    # `os.path.isfile` is False for names that are too long, where `Path.is_file` fails
    if path.suffix.lower() != ".png" or not os.path.isfile(path) or path.stat().st_size > LARGEST_FILE:
        raise UserError(f"{shorten(file)} is not a sample grid of {folder}")
    return path


def _add_run(row: RunRow, matrix: SampleMatrix, notes: list[str]) -> None:
    name = row.folder.absolute().name
    without_cells = 0
    for weights, events in row.report.samples.items():
        grids = []
        for event in distinct_grids(events):
            grid = _grid(row, event, matrix)
            without_cells += grid is None
            grids += [] if grid is None else [grid]
        if grids:
            matrix.series.append({"run": name, "id": row.id, "weights": weights, "grids": grids})
    if without_cells:
        notes.append(f"{name}: {without_cells} grids are missing or damaged; see the run's page.")


def _grid(row: RunRow, event: LogEvent, matrix: SampleMatrix) -> list[Any] | None:
    """Return step, address and layout of a grid; None where the file does not say where its images are."""
    try:
        file = sample_file(event)
        path = _inside(row.folder, str(file))
        version = path.stat().st_mtime_ns
        prompts, seeds, boxes = _grid_facts(path, version)
    except (UserError, ValueError, OSError):
        return None
    if not boxes or len(boxes) != len(prompts) * len(seeds):
        return None
    layout = matrix.layout([(prompt, seed) for prompt in prompts for seed in seeds])
    return [event.get("step", 0), f"{quote(file.as_posix())}&version={version}", layout]


@lru_cache(4096)
def _grid_facts(path: Path, _version: int) -> tuple[list[str], list[int], list[tuple[int, int, int, int]]]:
    """Return the prompts, seeds and boxes of a grid's images; empty for other files."""
    try:
        with open_regular(path) as file, Image.open(file) as image:
            texts = dict(getattr(image, "text", {}))
            size = image.size
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
