"""Sample grids through time: a slider where scripts run, one below the other where they do not."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from PIL import Image

from sd3_light.runlog import progress
from sd3_light.runlog.page.html import Html, tag
from sd3_light.runlog.page.pictures import data_uri
from sd3_light.stages.report.gather import Event, Kept, RunReport
from sd3_light.stages.report.words import moment

MOST_GRIDS = 64
"""Of more grids an even choice is shown."""

BUDGET = 15_000_000
"""Letters that all pictures together may take of the page."""

_SIDE = 1280
_T = TypeVar("_T")


@dataclass(frozen=True)
class Grid:
    """A picture of the page."""

    event: Event
    uri: str
    size: tuple[int, int]


@dataclass
class Grids:
    """The grids of one kind of weights, of ``drawn`` that were drawn in all."""

    weights: str
    drawn: int
    shown: list[Grid]


def load_grids(report: RunReport, notes: list[str]) -> list[Grids]:
    """The grids that the log tells of and that are there; what is missing goes to ``notes``."""
    if not report.samples:
        return []
    share = len(report.samples)
    chosen = {weights: _evenly(_distinct(kept), MOST_GRIDS // share) for weights, kept in report.samples.items()}
    missing: list[str] = []
    found = []
    with progress("report", sum(map(len, chosen.values())), "grids") as bar:
        for weights, events in chosen.items():
            shown = []
            for event in events:
                grid = _load(report.folder, event, missing)
                shown += [] if grid is None else [grid]
                bar.advance()
            found.append(Grids(weights, _how_many(report.samples[weights]), _within(shown, BUDGET // share)))
    if missing:
        more = "" if len(missing) == 1 else f" and {len(missing) - 1:,} more"
        notes.append(f"Sample grids that the log tells of cannot be shown: {missing[0]}{more}.")
    return found


def _distinct(events: Kept) -> list[Event]:
    """One of each file, in the order of steps: a step that was repeated has drawn its file anew."""
    files = {str(event.get("file", "")): event for event in events}
    return sorted(files.values(), key=lambda event: event.get("step", 0))


def _how_many(events: Kept) -> int:
    kept = len(list(events))
    return len(_distinct(events)) if kept == events.seen else events.seen


def show_grids(grids: Grids) -> Html:
    """The pictures of one kind of weights, the last one first in sight."""
    many = len(grids.shown) > 1
    words = f"Drawn with the {grids.weights} weights. " if grids.weights else ""
    if len(grids.shown) < grids.drawn:
        words += f"{len(grids.shown):,} of {grids.drawn:,} grids are shown, chosen evenly over the run."
    name = f"grid-{grids.weights or 'all'}"
    last = len(grids.shown) - 1
    slider = tag("input", type="range", min=0, max=last, value=last, step=1, id=name, aria_label="which grid is shown")
    control = [tag("div", slider, tag("output", for_=name), class_="slider", hidden="")] if many else []
    figures = [_figure(grid) for grid in grids.shown]
    return tag("div", tag("p", words, class_="soft"), *control, *figures, class_="grids")


def _figure(grid: Grid) -> Html:
    step, samples = grid.event.get("step", 0), grid.event.get("samples")
    seen = "" if samples is None else f" · {samples:,} samples seen"
    title = f"step {step:,}{seen} · {moment(grid.event['time'])}"
    width, height = grid.size
    picture = tag("img", src=grid.uri, alt=f"samples at step {step:,}", width=width, height=height)
    return tag("figure", picture, tag("figcaption", title))


def _load(folder: Path, event: Event, missing: list[str]) -> Grid | None:
    name = str(event.get("file", ""))
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:  # links within the folder are its owner's
        missing.append(f"{name} lies outside the run folder")
        return None
    try:
        with Image.open(path) as image:
            shown = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as fault:
        missing.append(f"{name} is not there" if isinstance(fault, FileNotFoundError) else f"{name}: {fault}")
        return None
    shown.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)  # never enlarges
    return Grid(event, data_uri(shown, _SIDE), shown.size)


def _within(grids: list[Grid], budget: int) -> list[Grid]:
    """So many of them, evenly, as fit."""
    shown = grids
    while len(shown) > 1 and sum(len(grid.uri) for grid in shown) > budget:
        shown = _evenly(grids, len(shown) - 1)
    return shown


def _evenly(things: Sequence[_T], most: int) -> list[_T]:
    """At most ``most`` of them, spread evenly, the first and the last among them."""
    if len(things) <= most:
        return list(things)
    if most <= 1:
        return [things[-1]]
    return [things[round(at * (len(things) - 1) / (most - 1))] for at in range(most)]
