"""Numbers, times and texts as people read them."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

_LONGEST_SECONDS = 1e12  # about 30,000 years

_SUFFIXES = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # from this value on, divided by this


def number(value: float, digits: int = 4) -> str:
    """Return a number with a few digits: `0.5123`, `1,234`, `1e-4`."""
    if not math.isfinite(value):
        return "not finite"
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return tick_label(value) if 0 < abs(value) < 1e-3 else f"{value:.{digits}g}"


def tick_label(value: float) -> str:
    """Return the short text of an axis tick: `250k`, `0.55`, `1e-4`."""
    size = abs(value)
    if size and size < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    for limit, divisor, suffix in _SUFFIXES:
        if size >= limit:
            return f"{value / divisor:.4g}{suffix}"
    return f"{value:.4g}" if size < 1000 else f"{value:,.0f}"


def thousands(value: int) -> str:
    """Return an integer with separators: `12,800`."""
    return f"{value:,}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage: `57.1%`."""
    return f"{share:.{digits}%}"


def plural(count: int, noun: str) -> str:
    """Return `1 resume`, `2 resumes` or `8 processes`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are; names that would change a terminal are quoted."""
    shown = ", ".join(name if name.isprintable() else repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def utc_time(timestamp: float) -> str:
    """Return the date and time of a Unix timestamp."""
    return f"{datetime.fromtimestamp(timestamp, UTC):%Y-%m-%d %H:%M:%S} UTC"


def duration(seconds: float) -> str:
    """Return `3 d 4 h`, `2 h 5 min`, `8 min 2 s` or `0.4 s`."""
    if not seconds < _LONGEST_SECONDS:  # also for nan
        return "an unknown time"
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next(index for index, (value, _) in enumerate(parts) if value)
    return " ".join(f"{value} {unit}" for value, unit in parts[first : first + 2] if value)


def byte_size(size: float) -> str:
    """Return a number of bytes with its unit: `8.9 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def shorten(text: str, longest: int = 200) -> str:
    """Return the text, cut to ``longest`` characters."""
    return text if len(text) <= longest else f"{text[: longest - 1].rstrip(' .')}…"


def language(text: str) -> str:
    """Return the `lang` attribute by which a browser chooses glyphs for the text; "" for scripts that need none."""
    if any("\u3040" <= letter <= "\u30ff" for letter in text):
        return "ja"
    if any("\uac00" <= letter <= "\ud7af" for letter in text):
        return "ko"
    if any("\u3400" <= letter <= "\u9fff" or "\uf900" <= letter <= "\ufaff" for letter in text):
        return "zh"
    return ""
