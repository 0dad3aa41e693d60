"""What happened in a run besides its steps: a table with times."""

from collections.abc import Callable
from typing import Any

from sd3_light.runlog.page.frame import size_text
from sd3_light.runlog.page.html import Html, tag
from sd3_light.stages.report.gather import RunReport
from sd3_light.stages.report.words import duration, moment, number

MOST_ROWS = 400
"""The table has at most about so many; what is frequent is thinned out first."""

Event = dict[str, Any]
# what a reader looks for is told in full; these come often and are much the same
_FREQUENT = ("checkpoint", "export", "skip")


def happenings(report: RunReport) -> Html:
    """The table, in the order of time."""
    chosen, left_out = _choose(report)
    if not chosen:
        return tag("p", "The log tells of nothing but steps.", class_="soft")
    lines = (
        tag(
            "tr",
            tag("td", moment(event["time"]) if "time" in event else "", class_="when"),
            tag("td", f"{event['step']:,}" if "step" in event else "", class_="number"),
            tag("th", event["event"].replace("_", " "), scope="row"),
            tag("td", _tell(event)),
            class_="bad" if event["event"].endswith("_failed") or event["event"] == "skip" else None,
        )
        for event in chosen
    )
    head = tag("tr", *(tag("th", name, scope="col") for name in ("time", "step", "what", "more")))
    table = tag("table", tag("thead", head), tag("tbody", *lines), class_="events")
    words = [tag("p", f"Not all are shown: {', '.join(left_out)}.", class_="soft")] if left_out else []
    return tag("div", *words, table)


def _choose(report: RunReport) -> tuple[list[Event], list[str]]:
    chosen: list[Event] = []
    left_out = []
    for kind, events in report.events.items():
        kept = list(events)
        most = MOST_ROWS // 4 if kind in _FREQUENT else MOST_ROWS
        shown = kept if len(kept) <= most else kept[:: -(-len(kept) // most)]
        if len(shown) < events.seen:
            left_out.append(f"{len(shown):,} of {events.seen:,} ({kind.replace('_', ' ')})")
        chosen += shown
    return sorted(chosen, key=lambda event: event.get("time", 0)), left_out


def _tell(event: Event) -> str:
    """An event's own words; one of a kind that is not known tells its fields."""
    telling = _TELLING.get(event["event"], _tell_fields)
    return telling(event)


def _tell_begin(event: Event) -> str:
    parts = [
        f"to step {event['total']:,}" if "total" in event else "",
        f"{event['world']} process{'' if event['world'] == 1 else 'es'}" if "world" in event else "",
        str(event.get("device", "")),
        str(event.get("engine", "")),
        f"from {event['checkpoint']}" if "checkpoint" in event else "",
    ]
    return ", ".join(filter(None, parts))


def _tell_skip(event: Event) -> str:
    return f"loss {number(float(event.get('loss', 'nan')))}, gradient {number(float(event.get('grad_norm', 'nan')))}"


def _tell_file(event: Event) -> str:
    parts = [
        str(event.get("file", "")),
        f"{event['weights']} weights" if event.get("weights") else "",
        size_text(event["bytes"]) if "bytes" in event else "",
        f"training waited {duration(event['stall_seconds'])}" if "stall_seconds" in event else "",
        f"written in {duration(event['seconds'])}" if "seconds" in event else "",
    ]
    return ", ".join(filter(None, parts))


def _tell_reason(event: Event) -> str:
    return str(event.get("reason", ""))


def _tell_fields(event: Event) -> str:
    told = {name: value for name, value in event.items() if name not in ("event", "time", "step")}
    text = ", ".join(f"{name} {value}" for name, value in told.items())
    return text if len(text) <= 300 else f"{text[:299]}…"


_TELLING: dict[str, Callable[[Event], str]] = {
    "start": _tell_begin,
    "resume": _tell_begin,
    "skip": _tell_skip,
    "checkpoint": _tell_file,
    "export": _tell_file,
    "checkpoint_failed": _tell_reason,
    "export_failed": _tell_reason,
    "stop": _tell_reason,
}
