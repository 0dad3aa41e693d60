"""Rejected inputs by reason: how many there are, and the keys of the first few."""

from collections import Counter
from dataclasses import dataclass, field

from sd3_light.sources.preprocess import REASONS

_SHOWN = 3


@dataclass
class Rejects:
    """Counts by reason, and the keys of the first inputs of each.

    ``uncaptioned`` says of the first image without a caption which files were found and why they were not read.
    """

    counts: Counter[str] = field(default_factory=Counter)
    keys: dict[str, list[str]] = field(default_factory=dict)
    uncaptioned: str = ""

    def add(self, reason: str, key: str, detail: str = "") -> None:
        """Count one input."""
        self.counts[reason] += 1
        if reason == "no_caption":
            self.uncaptioned = self.uncaptioned or detail
        if self.counts[reason] <= _SHOWN:
            self.keys.setdefault(reason, []).append(key)

    def lines(self) -> list[str]:
        """Return one line per reason, the most frequent first."""
        return [self._line(*item) for item in sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))]

    def _line(self, reason: str, count: int) -> str:
        line, keys = f"rejected {count:,}: {reason} ({REASONS[reason]})", self.keys.get(reason, [])
        more = f" and {count - len(keys):,} more" if count > len(keys) else ""
        line = f"{line}: {', '.join(keys)}{more}" if keys else line
        return f"{line}: {self.uncaptioned}" if reason == "no_caption" and self.uncaptioned else line


def reject_line(key: str, reason: str, detail: str, image: str) -> dict[str, str]:
    """Return one line of rejects.jsonl."""
    return {"key": key, "reason": reason, "detail": detail, "image": image}
