"""Rejected inputs: all lines of `rejects.jsonl` are counted, some of each reason are shown."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from sd3_light.data.preprocess import Reject
from sd3_light.inputs import parse_json
from sd3_light.pages import data_uri
from sd3_light.randomness import stream
from sd3_light.stages.inspect.cache_stats import reason_meaning
from sd3_light.stages.inspect.source_images import THUMBNAIL_SIDE, image_location, open_truncated

REJECTS = "rejects.jsonl"
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


@dataclass(frozen=True)
class RejectGroup:
    """The rejects of one reason: how many there are, and those that are shown."""

    reason: str
    meaning: str
    total: int
    shown: list[RejectCard]


@dataclass
class RejectSummary:
    """All rejects counted by reason, some of them shown, and the number of damaged lines."""

    counts: Counter[str] = field(default_factory=Counter)
    shown: list[RejectCard] = field(default_factory=list)
    damaged: int = 0

    @property
    def groups(self) -> list[RejectGroup]:
        """The rejects that are shown, by reason."""
        by_reason = groupby(self.shown, key=lambda reject: reject.reason)
        return [
            RejectGroup(reason, reason_meaning(reason), self.counts[reason], list(shown)) for reason, shown in by_reason
        ]


def read_rejects(folder: Path, places: Mapping[str, str], seed: int, most: int = MOST_SHOWN) -> RejectSummary:
    """Count the rejects of a cache, and choose at most ``most`` to show: at random, spread evenly over the reasons."""
    path = folder / REJECTS
    summary = RejectSummary()
    if not path.is_file():
        return summary
    reservoirs: dict[str, list[dict[str, Any]]] = {}
    rng = stream(seed, "inspect rejects", 0, 0, 0)
    with open(path, encoding="utf-8", errors="backslashreplace") as lines:
        for line in lines:
            item = _parse_line(line)
            if item is None:
                summary.damaged += 1
                continue
            reason = item["reason"]
            summary.counts[reason] += 1
            slot = int(rng.integers(summary.counts[reason]))
            _add_to_reservoir(item, reservoirs.setdefault(reason, []), most, slot)
    shares = _even_shares({reason: len(items) for reason, items in reservoirs.items()}, most)
    for reason, _ in summary.counts.most_common():
        chosen = sorted(reservoirs[reason][: shares[reason]], key=lambda item: item["key"])
        summary.shown += [_card(item, places) for item in chosen]
    return summary


def source_label(key: str, places: Iterable[str]) -> str:
    """Return the label of the source of a key: its prefix, up to the slash after the ``#N``."""
    labels = (place.removeprefix("directory:") for place in places if place.startswith("directory:"))
    return max((label for label in labels if key.startswith(f"{label}/")), key=len, default="")


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        item = parse_json(line)
    except ValueError:
        return None
    is_valid = isinstance(item, dict) and all(isinstance(item.get(name), str) for name in ("key", "reason"))
    return item if is_valid else None


def _add_to_reservoir(item: dict[str, Any], reservoir: list[dict[str, Any]], most: int, slot: int) -> None:
    """Reservoir sampling: ``slot`` is uniform over all items so far, so each stays with the same probability."""
    if len(reservoir) < most:
        reservoir.append(item)
        # a random slot, so that any prefix of the list is a random choice too
        reservoir[slot], reservoir[-1] = reservoir[-1], reservoir[slot]
    elif slot < most:
        reservoir[slot] = item


def _even_shares(sizes: Mapping[str, int], most: int) -> dict[str, int]:
    """Return how many of each reason are shown: equal shares, and what a small one leaves goes to the larger ones."""
    shares, left = {}, most
    for index, name in enumerate(sorted(sizes, key=lambda name: sizes[name])):
        shares[name] = min(sizes[name], left // (len(sizes) - index))
        left -= shares[name]
    return shares


def _card(item: Mapping[str, Any], places: Mapping[str, str]) -> RejectCard:
    key, reason, detail = item["key"], item["reason"], str(item.get("detail", ""))
    text = str(item.get("image") or "")
    try:
        image = open_truncated(image_location(places, source_label(key, places), text).read())
    except Reject as error:
        problem = _PROBLEMS.get(error.reason, "cannot be opened") if text else ""
        return RejectCard(key, reason, detail, problem=problem)
    return RejectCard(key, reason, detail, data_uri(image, THUMBNAIL_SIDE))
