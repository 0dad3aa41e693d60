"""Numbers, times and states in words."""

import math
from datetime import UTC, datetime

from sd3_light.runlog.page.axes import label
from sd3_light.stages.report.gather import RunReport


def number(value: float, digits: int = 4) -> str:
    """A number in a few digits: ``0.5123``, ``1,234``, ``1e-4``."""
    if not math.isfinite(value):
        return "not finite"
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return label(value) if 0 < abs(value) < 1e-3 else f"{value:.{digits}g}"


def count(how_many: int, what: str) -> str:
    """``1 resume``, ``2 resumes``, ``8 processes``"""
    many = "es" if what.endswith("s") else "s"
    return f"{how_many:,} {what}{'' if how_many == 1 else many}"


def moment(time: float) -> str:
    """A time since 1970 as a date."""
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"


def duration(seconds: float) -> str:
    """``3 d 4 h``, ``2 h 5 min``, ``8 min 2 s``, ``0.4 s``"""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next(at for at, (value, _) in enumerate(parts) if value)
    return " ".join(f"{value} {unit}" for value, unit in parts[first : first + 2] if value)


def state(report: RunReport) -> str:
    """Whether the run is over, and why."""
    stop, parts = report.last.get("stop"), report.parts
    if stop is not None and (not parts or stop["time"] >= parts[-1].begin["time"]):
        step, reason = stop.get("step", 0), stop.get("reason", "a reason that is not told")
        return f"finished at step {step:,}" if reason == "finished" else f"stopped at step {step:,} by {reason}"
    step = report.last.get("step")
    if step is not None:
        total = parts[-1].begin.get("total") if parts else None
        if total is not None and step["step"] >= total:
            return f"finished at step {step['step']:,}"
        return f"at step {step['step']:,}; it runs, or was killed"
    return "no step yet"
