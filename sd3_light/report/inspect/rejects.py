"""Rejected inputs: all lines of `rejects.jsonl` are counted, some of each reason are shown."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd3_light.data.manifest import REJECTS_FILE
from sd3_light.pages import data_uri
from sd3_light.randomness import stream
from sd3_light.report.inspect.line_sample import LineSample, sample_lines
from sd3_light.report.inspect.source_images import THUMBNAIL_SIDE, image_location, open_truncated
from sd3_light.sources.preprocess import Reject

MOST_SHOWN = 200

_PROBLEMS = {"unreadable": "not found", "missing_file": "not found", "too_large": "too large to open"}


@dataclass(frozen=True)
class RejectCard:
    """A rejected input on the page. ``image`` is a data URI, "" where it cannot be opened; ``problem`` says why."""

    key: str
    reason: str
    detail: str
    image: str = ""
    problem: str = ""


def read_rejects(folder: Path, places: Mapping[str, str], seed: int, most: int = MOST_SHOWN) -> LineSample[RejectCard]:
    """Count the rejects of a cache by reason, and choose at most ``most`` to show."""
    rng = stream(seed, "inspect rejects", 0, 0, 0)
    return sample_lines(folder / REJECTS_FILE, "reason", most, rng, lambda item: _card(item, places))


def source_label(key: str, places: Iterable[str]) -> str:
    """Return the label of the source of a key: its prefix, up to the slash after the ``#N``."""
    labels = (place.removeprefix("directory:") for place in places if place.startswith("directory:"))
    return max((label for label in labels if key.startswith(f"{label}/")), key=len, default="")


def _card(item: Mapping[str, Any], places: Mapping[str, str]) -> RejectCard:
    key = item["key"]
    reason = item["reason"]
    detail = str(item.get("detail", ""))
    text = str(item.get("image") or "")
    try:
        image = open_truncated(image_location(places, source_label(key, places), text).read())
    except Reject as error:
        problem = _PROBLEMS.get(error.reason, "cannot be opened") if text else ""
        return RejectCard(key, reason, detail, problem=problem)
    return RejectCard(key, reason, detail, data_uri(image, THUMBNAIL_SIDE))
