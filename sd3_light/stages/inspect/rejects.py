"""What was not used: every line of `rejects.jsonl` counted, some of each reason shown."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sd3_light.data.preprocess import Reject
from sd3_light.randomness import stream
from sd3_light.runlog.page.pictures import data_uri
from sd3_light.stages.inspect.pictures import THUMBNAIL_SIDE, location, open_partly

REJECTS = "rejects.jsonl"
MOST_SHOWN = 200
NO_PICTURE = "no picture"


@dataclass(frozen=True)
class ShownReject:
    """A reject for the page: its picture where it can be opened, else why not."""

    key: str
    reason: str
    detail: str
    picture: str = ""
    problem: str = ""


@dataclass
class Rejects:
    """All rejects counted by reason, some of them shown, and the number of lines that are no rejects."""

    counts: Counter[str] = field(default_factory=Counter)
    shown: list[ShownReject] = field(default_factory=list)
    damaged: int = 0


def read_rejects(folder: Path, places: Mapping[str, str], seed: int, most: int = MOST_SHOWN) -> Rejects:
    """Count a cache's rejects, and show at most ``most``, chosen at random, from every reason alike.

    At most ``most`` lines of each reason are held. A cache without the file has none.
    """
    path = folder / REJECTS
    found = Rejects()
    if not path.is_file():
        return found
    kept: dict[str, list[dict[str, Any]]] = {}
    draws = stream(seed, "inspect rejects", 0, 0, 0)
    with open(path, encoding="utf-8", errors="backslashreplace") as lines:
        for line in lines:
            item = _item(line)
            if item is None:
                found.damaged += 1
                continue
            reason = item["reason"]
            found.counts[reason] += 1
            _keep(item, kept.setdefault(reason, []), most, int(draws.integers(found.counts[reason])))
    shares = _shares({reason: len(items) for reason, items in kept.items()}, most)
    for reason, _ in found.counts.most_common():
        chosen = sorted(kept[reason][: shares[reason]], key=lambda item: item["key"])
        found.shown += [_show(item, places) for item in chosen]
    return found


def _item(line: str) -> dict[str, Any] | None:
    try:
        item = json.loads(line)
    except ValueError:
        return None
    fits = isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("key", "reason"))
    return item if fits else None


def _keep(item: dict[str, Any], kept: list[dict[str, Any]], most: int, place: int) -> None:
    """Reservoir sampling: ``place`` is drawn from as many as have come, so each stays with the same likelihood."""
    if len(kept) < most:
        kept.append(item)
        # a random place, so that the front of the list is a random choice too
        kept[place], kept[-1] = kept[-1], kept[place]
    elif place < most:
        kept[place] = item


def _shares(sizes: Mapping[str, int], most: int) -> dict[str, int]:
    """How many of each are shown: alike, and what a small one leaves goes to the larger."""
    shares, left = {}, most
    for number, name in enumerate(sorted(sizes, key=lambda name: sizes[name])):
        shares[name] = min(sizes[name], left // (len(sizes) - number))
        left -= shares[name]
    return shares


def _show(item: Mapping[str, Any], places: Mapping[str, str]) -> ShownReject:
    key, reason, detail = item["key"], item["reason"], str(item.get("detail", ""))
    text = str(item.get("image") or "")
    try:
        image = open_partly(location(places, label_of(key, places), text).read())
    except Reject as reject:
        return ShownReject(key, reason, detail, problem=_why(text, reject))
    return ShownReject(key, reason, detail, data_uri(image, THUMBNAIL_SIDE))


def _why(text: str, reject: Reject) -> str:
    if not text:
        return NO_PICTURE
    return {"unreadable": "not found", "missing_file": "not found", "too_large": "too large to open"}.get(
        reject.reason, "cannot be opened"
    )


def label_of(key: str, places: Iterable[str]) -> str:
    """The label of the source that a key belongs to: its beginning, up to the slash behind the ``#N``."""
    known = (place.removeprefix("directory:") for place in places if place.startswith("directory:"))
    return max((label for label in known if key.startswith(f"{label}/")), key=len, default="")
