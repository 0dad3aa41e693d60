"""The event table: everything in the log except steps, evaluations and samples."""

from collections.abc import Callable
from dataclasses import dataclass

from sd3_light.formats import byte_size, duration, number, plural, shorten, utc_time
from sd3_light.report.log_lines import LogEvent
from sd3_light.report.run_log import RunReport

MOST_ROWS = 400
"""Limit of rows per kind; frequent kinds get a quarter of it."""

_FREQUENT = ("checkpoint", "snapshot", "export", "skip")


@dataclass(frozen=True)
class EventRow:
    """A row of the table."""

    time: str
    step: str
    kind: str
    details: str
    is_error: bool


def event_rows(report: RunReport) -> tuple[list[EventRow], list[str]]:
    """Return the rows in the order of time, and texts that say which kinds are not shown in full."""
    chosen: list[LogEvent] = []
    omitted = []
    for kind, events in report.events.items():
        sample = list(events)
        most = MOST_ROWS // 4 if kind in _FREQUENT else MOST_ROWS
        shown = sample if len(sample) <= most else sample[:: -(-len(sample) // most)]
        if len(shown) < events.seen:
            omitted.append(f"{len(shown):,} of {events.seen:,} ({kind.replace('_', ' ')})")
        chosen += shown
    return [_row(event) for event in sorted(chosen, key=lambda event: event.get("time", 0))], omitted


def _row(event: LogEvent) -> EventRow:
    kind = event["event"]
    return EventRow(
        time=utc_time(event["time"]) if "time" in event else "",
        step=f"{event['step']:,}" if "step" in event else "",
        kind=kind.replace("_", " "),
        details=_DETAILS.get(kind, _all_fields)(event),
        is_error=kind == "skip" or kind.endswith("_failed"),
    )


def _begin(event: LogEvent) -> str:
    parts = [
        f"to step {event['total']:,}" if "total" in event else "",
        plural(event["world"], "process") if "world" in event else "",
        str(event.get("device", "")),
        str(event.get("engine", "")),
        f"from {event['checkpoint']}" if "checkpoint" in event else "",
    ]
    return ", ".join(filter(None, parts))


def _skip(event: LogEvent) -> str:
    loss, grad_norm = (number(float(event.get(name, "nan"))) for name in ("loss", "grad_norm"))
    return f"loss {loss}, gradient norm {grad_norm}"


def _saved_file(event: LogEvent) -> str:
    parts = [
        str(event.get("file", "")),
        f"{event['weights']} weights" if event.get("weights") else "",
        byte_size(event["bytes"]) if "bytes" in event else "",
        f"training waited {duration(event['stall_seconds'])}" if "stall_seconds" in event else "",
        f"written in {duration(event['seconds'])}" if "seconds" in event else "",
    ]
    return ", ".join(filter(None, parts))


def _reason(event: LogEvent) -> str:
    return str(event.get("reason", ""))


def _all_fields(event: LogEvent) -> str:
    fields = {name: value for name, value in event.items() if name not in ("event", "time", "step")}
    return shorten(", ".join(f"{name} {value}" for name, value in fields.items()), 300)


_DETAILS: dict[str, Callable[[LogEvent], str]] = {
    "start": _begin,
    "resume": _begin,
    "skip": _skip,
    "stop": _reason,
    **dict.fromkeys(("checkpoint", "snapshot", "export"), _saved_file),
    **dict.fromkeys(("checkpoint_failed", "snapshot_failed", "export_failed", "sample_failed"), _reason),
}
