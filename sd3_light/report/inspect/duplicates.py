"""Duplicates on the page of a cache: pairs of images, so that a wrong one is seen at a glance."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd3_light.data.manifest import DUPLICATES, DUPLICATES_FILE
from sd3_light.pages import data_uri
from sd3_light.randomness import stream
from sd3_light.report.inspect.line_sample import LineSample, sample_lines
from sd3_light.report.inspect.rejects import source_label
from sd3_light.report.inspect.source_images import THUMBNAIL_SIDE, image_location
from sd3_light.sources.preprocess import Reject
from sd3_light.sources.video import open_still

_MOST_SHOWN = 60
DUPLICATE_MEANINGS = {
    DUPLICATES["keep"]: "Images with the same bytes as an earlier one; they are used.",
    DUPLICATES["drop"]: "Images with the same bytes as an earlier one; they are left out.",
    DUPLICATES["similar"]: "Images that look like an earlier one, such as copies of another size; they are left out.",
}


@dataclass(frozen=True)
class DuplicatePair:
    """An image and the earlier one that it duplicates: keys and data URIs ("" where it cannot be opened)."""

    first: str
    first_image: str
    key: str
    image: str


def read_duplicates(folder: Path, places: Mapping[str, str], seed: int) -> LineSample[DuplicatePair]:
    """Count the duplicates of a cache by kind, and choose some pairs to show, at random."""
    rng = stream(seed, "inspect duplicates", 0, 0, 0)
    return sample_lines(folder / DUPLICATES_FILE, "kind", _MOST_SHOWN, rng, lambda item: _pair(item, places))


def _pair(item: Mapping[str, Any], places: Mapping[str, str]) -> DuplicatePair:
    first = str(item.get("first", ""))
    key = item["key"]
    first_image = _thumbnail(first, item.get("first_image"), places)
    return DuplicatePair(first, first_image, key, _thumbnail(key, item.get("image"), places))


def _thumbnail(key: str, location: object, places: Mapping[str, str]) -> str:
    try:
        image = open_still(image_location(places, source_label(key, places), str(location or "")))
    except Reject:
        return ""
    return data_uri(image, THUMBNAIL_SIDE)
