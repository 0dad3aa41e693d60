"""The sample grids of a run, loaded for the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from PIL import Image

from sd3_light.formats import utc_time
from sd3_light.inputs import open_regular
from sd3_light.pages import data_uri
from sd3_light.report.log_lines import LogEvent
from sd3_light.report.run_log import EvenSample, RunReport
from sd3_light.runlog import progress

MOST_GRIDS = 64
"""Limit of grids on the page; of more an even choice is shown."""

MOST_BYTES = 15_000_000
"""Limit of all embedded grids together."""

_SIDE = 1280  # pixels
_T = TypeVar("_T")
UriOf = Callable[[Path, Image.Image], str]
"""Returns the source of an image in a page, from its path inside the run folder and the opened file."""


@dataclass(frozen=True)
class SampleGrid:
    """One grid as the page shows it."""

    step: int
    caption: str
    uri: str
    width: int
    height: int


@dataclass(frozen=True)
class GridSeries:
    """The grids of one kind of weights; ``total`` were drawn, ``grids`` are shown."""

    weights: str
    total: int
    grids: list[SampleGrid]


def load_grids(
    report: RunReport,
    notes: list[str],
    uri_of: UriOf = lambda _, image: data_uri(image.convert("RGB"), _SIDE),
) -> list[GridSeries]:
    """Load the grids that the log names, by weights; files that cannot be shown are added to ``notes``."""
    if not report.samples:
        return []
    num_series = len(report.samples)
    most = MOST_GRIDS // num_series
    chosen = {weights: evenly(distinct_grids(events), most) for weights, events in report.samples.items()}
    problems: list[str] = []
    loaded = []
    with progress("report", sum(map(len, chosen.values())), "grids") as bar:
        for weights, events in chosen.items():
            grids = []
            for event in events:
                try:
                    grids.append(_load(report.folder, event, uri_of))
                except (OSError, ValueError, Image.DecompressionBombError) as error:
                    reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
                    problems.append(f"{event.get('file', '')} {reason}")
                bar.advance()
            total = _num_grids(report.samples[weights])
            loaded.append(GridSeries(weights, total, _within_budget(grids, MOST_BYTES // num_series)))
    if problems:
        more = "" if len(problems) == 1 else f", and {len(problems) - 1:,} more"
        notes.append(f"Some sample grids of the log cannot be shown: {problems[0]}{more}.")
    return [series for series in loaded if series.grids]


def distinct_grids(events: EvenSample) -> list[LogEvent]:
    """Return one event per file, in the order of steps: a repeated step overwrote its file."""
    files = {str(event.get("file", "")): event for event in events}
    return sorted(files.values(), key=lambda event: event.get("step", 0))


def _num_grids(events: EvenSample) -> int:
    complete = len(list(events)) == events.seen
    return len(distinct_grids(events)) if complete else events.seen


def sample_file(event: LogEvent) -> Path:
    """Return the path of a grid inside the run folder; raise ValueError where it is outside."""
    file = Path(str(event.get("file", "")))
    if file.is_absolute() or ".." in file.parts:  # links inside the folder are the user's own
        raise ValueError("it is outside the run folder")
    return file


def _load(folder: Path, event: LogEvent, uri_of: UriOf) -> SampleGrid:
    file = sample_file(event)
    with open_regular(folder / file) as data, Image.open(data) as opened:
        size = opened.size
        uri = uri_of(file, opened)
    step = event.get("step", 0)
    samples = f" · {event['samples']:,} samples seen" if event.get("samples") is not None else ""
    caption = f"step {step:,}{samples} · {utc_time(event['time'])}"
    shrink = min(1.0, _SIDE / max(size))
    return SampleGrid(step, caption, uri, *(max(1, round(side * shrink)) for side in size))


def _within_budget(grids: list[SampleGrid], budget: int) -> list[SampleGrid]:
    """Return as many grids as fit into ``budget`` bytes, spread evenly."""
    chosen = grids
    while len(chosen) > 1 and sum(len(grid.uri) for grid in chosen) > budget:
        chosen = evenly(grids, len(chosen) - 1)
    return chosen


def evenly(items: Sequence[_T], most: int) -> list[_T]:
    """Return at most ``most`` items, spread evenly and including the first and the last."""
    if len(items) <= most:
        return list(items)
    if most <= 1:
        return [items[-1]]
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]
